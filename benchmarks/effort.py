"""How much is measured. Values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.bench import Bench
from benchmarks.results import Results
from benchmarks.tables import Table


@dataclass(frozen=True)
class Effort:
    """The size of a run. The numbers are per round unless they say otherwise."""

    rounds: int = 5
    #: messages through an instant model
    messages: int = 2000
    #: requests sent one at a time
    latency_samples: int = 150
    #: messages of 10 MB
    big_messages: int = 25
    #: seconds of work at 100 ms and 64 slots
    busy_s: float = 5.0
    #: messages after which the memory is looked at, in all
    growth_messages: int = 50_000
    #: records of the metrics flush beside which latencies are measured
    flush_records: int = 10_000

    def smaller(self, factor: float) -> Effort:
        """Return the same with so much less in each round, for a look while developing."""
        return Effort(
            rounds=self.rounds,
            messages=max(200, int(self.messages * factor)),
            latency_samples=max(30, int(self.latency_samples * factor)),
            big_messages=max(3, int(self.big_messages * factor)),
            busy_s=max(1.5, self.busy_s * factor),
            growth_messages=max(2000, int(self.growth_messages * factor)),
            flush_records=max(500, int(self.flush_records * factor)),
        )


class Figure(Protocol):
    """A module of `benchmarks.figures`."""

    #: for `--only`, and the figure's key in the results
    NAME: str
    measure: Callable[[Bench, Results, Effort, Callable[[str], None]], None]
    tables: Callable[[Results], list[Table]]
