"""What a run finds: one smallest input for each law that broke, or place that raised."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from .targets import Target, Violation

#: bound on making one input smaller
_MINIMISE_S = 20.0


@dataclass(slots=True)
class Finding:
    """One way in which a target failed."""

    signature: str
    data: bytes
    count: int


def failure_of(target: Target, data: bytes) -> str | None:
    """Check one input; what broke, in words that are the same for every input that breaks it so; None: all holds."""
    try:
        target.check(data)
    except Violation as err:
        return f"law: {err}"
    except Exception as err:
        frames = [frame for frame in traceback.extract_tb(err.__traceback__) if "inference_worker" in frame.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "outside"
        return f"{type(err).__name__} in {where}"
    return None


class Findings:
    """Collects them, so that a known one does not end the run."""

    def __init__(self, target: Target, folder: Path) -> None:
        self._target = target
        self._folder = folder
        self._known: dict[str, Finding] = {}

    def __len__(self) -> int:
        return len(self._known)

    def check(self, data: bytes) -> None:
        signature = failure_of(self._target, data)
        if signature is None:
            return
        known = self._known.setdefault(signature, Finding(signature, data, 0))
        known.count += 1
        if known.count == 1 or len(data) < len(known.data):
            known.data = data
            self._write(known)

    def minimise(self) -> None:
        """Make each input smaller while it breaks in the same way."""
        for finding in self._known.values():
            finding.data = _minimised(
                finding.data, lambda data, wanted=finding.signature: failure_of(self._target, data) == wanted
            )
            self._write(finding)

    def _write(self, finding: Finding) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        number = list(self._known).index(finding.signature) + 1
        path = self._folder / f"{self._target.name}-{number}"
        path.with_suffix(".bin").write_bytes(finding.data)
        said = {"target": self._target.name, "signature": finding.signature, "count": finding.count}
        path.with_suffix(".json").write_text(json.dumps(said | {"input": repr(finding.data)}, indent=2) + "\n")


def _minimised(data: bytes, breaks: Callable[[bytes], bool]) -> bytes:
    ends_at = monotonic() + _MINIMISE_S
    is_smaller = True
    while is_smaller and monotonic() < ends_at:
        is_smaller = False
        for candidate in _smaller(data):
            if breaks(candidate):
                data, is_smaller = candidate, True
                break
    return data


def _smaller(data: bytes) -> Iterator[bytes]:
    length = len(data) // 2
    while length:
        for start in range(0, len(data) - length + 1, length):
            yield data[:start] + data[start + length :]
        length //= 2
