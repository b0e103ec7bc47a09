"""Wall and CPU time per message with an instant model: all contenders, prefetch 1, 8 and 64."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import contender as who
from benchmarks import tables as write
from benchmarks.bench import Bench
from benchmarks.drain import measure_drain
from benchmarks.effort import Effort
from benchmarks.figures.attempts import attempt
from benchmarks.results import Results, in_turn
from benchmarks.tables import Table

NAME = "throughput"
PREFETCHES = (1, 8, 64)
CONTENDERS = (
    who.BARE,
    who.BARE_URLLIB3,
    who.WORKER,
    who.WORKER_FLUSHING,
    who.DRAMATIQ,
    who.CELERY,
    who.AIO,
)


def case_of(prefetch: int) -> str:
    """Name the case."""
    return f"prefetch {prefetch}"


def measure(bench: Bench, results: Results, effort: Effort, say: Callable[[str], None]) -> None:
    """Drain a filled queue with each contender in turn."""
    for number in range(effort.rounds):
        for prefetch in PREFETCHES:
            for contender in in_turn(CONTENDERS, number):
                what = f"round {number + 1}, prefetch {prefetch}, {contender.name}"
                with attempt(results, say, what):
                    drain = measure_drain(
                        bench, contender, prefetch=prefetch, count=effort.messages, warm_count=effort.messages // 5
                    )
                    wall_s, cpu_s = drain.wall_per_message_s, drain.cpu_per_message_s
                    results.add(NAME, contender.name, case_of(prefetch), number, wall_s=wall_s, cpu_s=cpu_s)
                    say(f"{what}: {wall_s * 1000:.3f} ms wall, {cpu_s * 1000:.3f} ms CPU")


def tables(results: Results) -> list[Table]:
    """Wall and CPU, and both against the bare loop within the same round."""
    made = []
    for prefetch in PREFETCHES:
        case = case_of(prefetch)
        rows = [
            [
                name,
                write.with_spread(results.spread(NAME, name, case, "wall_s"), write.milliseconds),
                write.with_spread(results.spread(NAME, name, case, "cpu_s"), write.milliseconds),
                write.with_spread(results.ratio(NAME, case, "wall_s", name, who.BARE.name), write.ratio),
                write.with_spread(results.ratio(NAME, case, "cpu_s", name, who.BARE.name), write.ratio),
            ]
            for name in results.contenders(NAME, case)
        ]
        if rows:
            columns = ("", "wall, ms", "CPU, ms", "wall, bare loop = 1", "CPU, bare loop = 1")
            made.append(Table(f"Time per message, instant model, prefetch {prefetch}", columns, rows, _HOW[prefetch]))
    return made


_HOW = {
    1: "A queue filled beforehand, from one fifth of the results to the last. CPU is user and system time of the "
    "contender's processes, not of broker, Redis and model. By default the worker flushes every 30 s or when its "
    "buffer is half full (5,000 records), so hardly a flush falls into these seconds; `flush every 1 s` has them "
    "in it, with one POST a request to the billing.",
    8: "The bare loops work on one message at a time whatever the prefetch. Celery runs its threads pool; at prefetch "
    "1 its default, one process.",
    64: "An instant model gives 64 slots nothing to wait for: what is shown here is the price of the threads.",
}
