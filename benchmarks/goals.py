"""The numbers to reach, and what a run gave. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import contender as who
from benchmarks import tables as write
from benchmarks.figures import flush, latency, memory, sizes, slots, startup, throughput, workers
from benchmarks.results import Results
from benchmarks.stats import Spread, spread
from benchmarks.tables import NOTHING, Table

_WORKER = who.WORKER.name
_P1 = throughput.case_of(1)
_MB = 1e6


@dataclass(frozen=True)
class Goal:
    """One line. The median decides."""

    what: str
    bound: float
    measured: Spread | None
    write: Callable[[float], str]
    #: reached by a value that is not below the bound, instead of one that is not above it
    is_floor: bool = False

    @property
    def is_met(self) -> bool | None:
        """None: not measured."""
        if self.measured is None:
            return None
        return self.measured.median >= self.bound if self.is_floor else self.measured.median <= self.bound

    @property
    def missed_by(self) -> float:
        """How far beyond the bound, as a share of it; 0 when it is met or not measured."""
        if self.measured is None or self.is_met:
            return 0.0
        return abs(self.measured.median - self.bound) / self.bound

    def verdict(self) -> str:
        """Met, or by how much it is missed."""
        if self.is_met is None:
            return "not measured"
        return "met" if self.is_met else f"missed by {self.missed_by:.0%}"


def goals(results: Results) -> list[Goal]:
    """Return every line, measured or not."""
    grown = memory.growth(results)
    growth_of = f"over {grown[0]:,} messages" if grown else "over many messages"
    eight = workers.ratios_to_one(results, _WORKER, workers.INSTANT, 8)
    eight_paced = workers.ratios_to_one(results, _WORKER, workers.PACED, 8)
    instant = latency.case_of(latency.INSTANT, 1)
    million = 1e6

    def ms(value: float) -> str:
        return f"{write.milliseconds(value)} ms"

    def mb(value: float) -> str:
        return f"{write.megabytes(value)} MB"

    def s(value: float) -> str:
        return f"{write.seconds(value)} s"

    def wall_against(other: str) -> Spread | None:
        return results.ratio(throughput.NAME, _P1, "wall_s", _WORKER, other)

    def added(measure: str) -> Spread | None:
        return results.spread(latency.NAME, _WORKER, instant, measure)

    def busy(contender: str) -> Spread | None:
        return results.spread(slots.NAME, contender, slots.CASE, "share")

    return [
        Goal("time per message, prefetch 1, against the bare loop", 1.10, wall_against(who.BARE.name), write.ratio),
        Goal("the same against dramatiq", 0.80, wall_against(who.DRAMATIQ.name), write.ratio),
        Goal("the same against Celery", 0.55, wall_against(who.CELERY.name), write.ratio),
        Goal("added latency per request, p50", 0.0015, added("p50_s"), ms),
        Goal("added latency per request, p99", 0.005, added("p99_s"), ms),
        Goal("slots kept busy, 100 ms, prefetch 64", 0.90, busy(_WORKER), write.percent, True),
        Goal("the same with RABBITMQ_LOOKAHEAD=8", 0.97, busy(who.WORKER_AHEAD.name), write.percent, True),
        Goal(
            "CPU for a 10 MB payload, against the bare loop",
            0.25,
            results.ratio(sizes.NAME, sizes.BIG_PAYLOAD.name, "cpu_s", _WORKER, who.BARE.name),
            write.ratio,
        ),
        Goal("memory, idle", 60 * _MB, results.spread(memory.NAME, _WORKER, memory.IDLE, "rss_bytes"), mb),
        Goal("memory per slot", 0.25 * _MB, results.spread(memory.NAME, _WORKER, memory.SLOT, "rss_bytes"), mb),
        Goal(
            f"memory, growth {growth_of}" + ("" if grown and grown[0] >= million else " (the goal is for a million)"),
            5 * _MB,
            spread([grown[1]]) if grown else None,
            mb,
        ),
        Goal("start to consuming", 0.8, results.spread(startup.NAME, _WORKER, startup.CASE, "start_s"), s),
        Goal("CPU per message, 8 workers against 1", 1.10, spread(eight) if eight else None, write.ratio),
        Goal("the same with a model of 20 ms", 1.10, spread(eight_paced) if eight_paced else None, write.ratio),
        Goal(
            "added latency beside a metrics flush, p99",
            0.005,
            results.spread(flush.NAME, _WORKER, flush.FLUSHING, "p99_s"),
            ms,
        ),
    ]


def goals_table(results: Results) -> Table:
    """Show every line."""
    rows = [
        [
            goal.what,
            f"{'≥' if goal.is_floor else '≤'} {goal.write(goal.bound)}",
            write.with_spread(goal.measured, goal.write) if goal.measured else NOTHING,
            goal.verdict(),
        ]
        for goal in goals(results)
    ]
    how = (
        "A ratio is taken within one round, where whatever slowed the machine slowed both. The median of the rounds "
        "counts; behind it are the least and the greatest."
    )
    return Table("Numbers to reach", ("", "goal", "measured", ""), rows, how)
