"""The inputs that the fuzzing begins with: captures of a real server, and hand-made odd cases."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from .inputs import contract
from .targets import TARGETS, Target

SEEDS = Path(__file__).parent / "seeds"
_CAPTURES = Path(__file__).parents[1] / "captures"
_CAPTURES_OF = {"answer": ("*.json", "*.sse"), "stream": ("*.sse",), "events": ("*.sse",)}


@cache
def seed_bodies(target: Target) -> tuple[bytes, ...]:
    """The bodies as they are in their files, without steering bytes."""
    paths = sorted((SEEDS / target.name).iterdir())
    for pattern in _CAPTURES_OF.get(target.name, ()):
        paths += sorted(_CAPTURES.glob(pattern))
    return tuple(path.read_bytes() for path in paths)


@cache
def inputs_of(target: Target) -> tuple[bytes, ...]:
    """The same as inputs: as they are, and written in tokens."""
    inputs = [target.steering + body for body in seed_bodies(target)]
    if target.tokens:
        first = bytes((target.steering[0] | 1,))
        inputs += [first + target.steering[1:] + contract(body, target.tokens) for body in seed_bodies(target)]
    return tuple(inputs)


def write_corpus(folder: Path) -> None:
    """Put the seeds beside what earlier runs have found to be of interest."""
    for target in TARGETS.values():
        of_target = folder / target.name
        of_target.mkdir(parents=True, exist_ok=True)
        for data in inputs_of(target):
            (of_target / hashlib.sha1(data).hexdigest()).write_bytes(data)
