"""CPU per message of 1, 2, 4 and 8 workers that compete for one queue, prefetch 1; the bare loop beside them."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import contender as who
from benchmarks import tables as write
from benchmarks.bench import Bench
from benchmarks.contender import Contender
from benchmarks.drain import measure_drain
from benchmarks.effort import Effort
from benchmarks.figures.attempts import attempt
from benchmarks.results import Results, in_turn
from benchmarks.servers.http_servers import StandIn
from benchmarks.stats import paired_ratios, spread
from benchmarks.tables import NOTHING, Table

NAME = "workers"
INSTANT, PACED = "instant model", "model of 20 ms"
_PACE_S = 0.02
#: model, contender, how many
_PLAN: tuple[tuple[str, Contender, int], ...] = (
    (INSTANT, who.WORKER, 1),
    (INSTANT, who.WORKER, 2),
    (INSTANT, who.WORKER, 4),
    (INSTANT, who.WORKER, 8),
    (INSTANT, who.BARE, 1),
    (INSTANT, who.BARE, 8),
    (PACED, who.WORKER, 1),
    (PACED, who.WORKER, 8),
)


def case_of(model: str, count: int) -> str:
    """Name the case."""
    return f"{model}, {count} competing" if count > 1 else f"{model}, one alone"


def measure(bench: Bench, results: Results, effort: Effort, say: Callable[[str], None]) -> None:
    """Drain a filled queue with that many."""
    with StandIn(delay_s=_PACE_S) as paced:
        for number in range(effort.rounds):
            for model_name, contender, count in in_turn(_PLAN, number):
                what = f"round {number + 1}, {case_of(model_name, count)}, {contender.name}"
                with attempt(results, say, what):
                    drain = measure_drain(
                        bench,
                        contender,
                        prefetch=1,
                        count=_message_count(model_name, count, effort),
                        warm_count=effort.messages // 50,
                        workers=count,
                        model=None if model_name == INSTANT else paced,
                    )
                    wall_s, cpu_s = drain.wall_per_message_s, drain.cpu_per_message_s
                    results.add(NAME, contender.name, case_of(model_name, count), number, wall_s=wall_s, cpu_s=cpu_s)
                    say(f"{what}: {wall_s * 1000:.3f} ms wall, {cpu_s * 1000:.3f} ms CPU, {drain.count} messages")


def _message_count(model_name: str, count: int, effort: Effort) -> int:
    """Return how many it takes: the first of several get through many before the last one is up."""
    if model_name == PACED:
        return (effort.messages // 15) * (1 if count == 1 else count * 2)
    return effort.messages * (1 if count == 1 else 3)


def ratios_to_one(results: Results, contender: str, model: str, count: int) -> list[float]:
    """Return the CPU per message of so many against that of one, round by round."""
    return paired_ratios(
        results.rounds(NAME, contender, case_of(model, count), "cpu_s"),
        results.rounds(NAME, contender, case_of(model, 1), "cpu_s"),
    )


def tables(results: Results) -> list[Table]:
    """Wall, CPU, and the CPU against one alone."""
    rows = []
    for model, contender, count in _PLAN:
        case = case_of(model, count)
        cpu = results.spread(NAME, contender.name, case, "cpu_s")
        if cpu:
            ratios = ratios_to_one(results, contender.name, model, count)
            rows.append(
                [
                    case,
                    contender.name,
                    write.with_spread(results.spread(NAME, contender.name, case, "wall_s"), write.milliseconds),
                    write.with_spread(cpu, write.milliseconds),
                    write.with_spread(spread(ratios), write.ratio) if ratios else NOTHING,
                ]
            )
    columns = ("", "", "wall per message, ms", "CPU per message, ms", "CPU, one alone = 1")
    return [Table("Workers that compete for one queue, prefetch 1", columns, rows, _HOW)] if rows else []


_HOW = (
    "Measured when all of them consume. With an instant model they fill every core, and where they are more than the "
    "cores they disturb each other's caches whatever they are: so the bare loop stands beside them. With a model of "
    "20 ms the cores are not full."
)
