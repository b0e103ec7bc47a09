"""From the start of the process until the broker sees its consumer."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks import contender as who
from benchmarks import tables as write
from benchmarks.bench import Bench
from benchmarks.effort import Effort
from benchmarks.figures.attempts import attempt
from benchmarks.results import Results, in_turn
from benchmarks.tables import Table

NAME = "start-up"
CASE = "prefetch 1"
_CONTENDERS = (who.BARE, who.WORKER, who.DRAMATIQ, who.CELERY, who.AIO)


def measure(bench: Bench, results: Results, effort: Effort, say: Callable[[str], None]) -> None:
    """Start each contender in turn on an empty queue."""
    for number in range(effort.rounds):
        for contender in in_turn(_CONTENDERS, number):
            what = f"round {number + 1}, start of {contender.name}"
            queue = bench.declare(contender)
            with attempt(results, say, what):
                began_at = time.perf_counter()
                with bench.running(contender, queue, prefetch=1) as running:
                    bench.wait_consumer(running)
                    start_s = time.perf_counter() - began_at
                results.add(NAME, contender.name, CASE, number, start_s=start_s)
                say(f"{what}: {start_s:.2f} s")
            bench.delete(queue)


def tables(results: Results) -> list[Table]:
    """One column."""
    rows = [
        [name, write.with_spread(results.spread(NAME, name, CASE, "start_s"), write.seconds)]
        for name in results.contenders(NAME, CASE)
    ]
    return [Table("Start to consuming", ("", "s"), rows, _HOW)] if rows else []


_HOW = "Everything else is up; looked for every 4 ms. Byte code is cached, as on a host after the first start."
