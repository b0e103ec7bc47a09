"""The list of scenarios, in the order in which they are written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.vllm.rig import Rig

#: what a scenario does; it returns what it has seen, in a few words, and raises when that is not as it must be
Run = Callable[[Rig], str]

#: most scenarios: timings in the answers, and tools
FULL_OPTIONS = ("--enable-per-request-metrics", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
#: one request at a time and four that wait; no timings in the answers
BOUNDED_OPTIONS = ("--max-num-seqs", "1", "--max-num-queued-reqs", "4")


@dataclass(frozen=True)
class Scenario:
    """One promise, and how it is tried."""

    title: str
    options: tuple[str, ...]
    run: Run


SCENARIOS: list[Scenario] = []


def scenario(title: str, *, options: tuple[str, ...] = FULL_OPTIONS) -> Callable[[Run], Run]:
    """Put a function on the list, to be run against a vLLM with these options."""

    def register(run: Run) -> Run:
        SCENARIOS.append(Scenario(title, options, run))
        return run

    return register
