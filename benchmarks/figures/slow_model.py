"""Time per message with a model of 100 ms, prefetch 1 and 8."""

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
from benchmarks.tables import Table

NAME = "slow-model"
DELAY_S = 0.1
#: the bare loop never has more than one request in work
_PLAN: tuple[tuple[int, tuple[Contender, ...]], ...] = (
    (1, (who.BARE, who.WORKER, who.DRAMATIQ, who.CELERY, who.AIO)),
    (8, (who.WORKER, who.DRAMATIQ, who.CELERY, who.AIO)),
)


def measure(bench: Bench, results: Results, effort: Effort, say: Callable[[str], None]) -> None:
    """Drain a short queue with each contender in turn."""
    with StandIn(delay_s=DELAY_S) as model:
        for number in range(effort.rounds):
            for prefetch, contenders in _PLAN:
                measured = max(10, int(effort.busy_s / 4 / DELAY_S)) * prefetch
                for contender in in_turn(contenders, number):
                    what = f"round {number + 1}, 100 ms, prefetch {prefetch}, {contender.name}"
                    with attempt(results, say, what):
                        # as many results before and after it as there are slots: no slot idles while it is measured
                        drain = measure_drain(
                            bench,
                            contender,
                            prefetch=prefetch,
                            count=measured + 5 * prefetch,
                            warm_count=3 * prefetch,
                            tail_count=2 * prefetch,
                            model=model,
                        )
                        added_s = drain.wall_per_message_s * prefetch - DELAY_S
                        cpu_s = drain.cpu_per_message_s
                        results.add(NAME, contender.name, f"prefetch {prefetch}", number, added_s=added_s, cpu_s=cpu_s)
                        say(f"{what}: {added_s * 1000:.2f} ms between two calls, {cpu_s * 1000:.2f} ms CPU")


def tables(results: Results) -> list[Table]:
    """What comes on top of the model."""
    rows = [
        [
            case,
            name,
            write.with_spread(results.spread(NAME, name, case, "added_s"), write.milliseconds),
            write.with_spread(results.spread(NAME, name, case, "cpu_s"), write.milliseconds),
        ]
        for case in results.cases(NAME)
        for name in results.contenders(NAME, case)
    ]
    columns = ("", "", "a slot without a call, ms", "CPU per message, ms")
    return [Table("A model of 100 ms: what a slot waits between two calls", columns, rows, _HOW)] if rows else []


_HOW = "Time per message and slot, less 100 ms; a timer's lateness at the model is in it, for all alike."
