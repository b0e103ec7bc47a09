"""How busy a model of 100 ms is kept by 64 slots: the share of the 640 requests a second that it could take."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import contender as who
from benchmarks import tables as write
from benchmarks.bench import Bench
from benchmarks.drain import measure_drain
from benchmarks.effort import Effort
from benchmarks.figures.attempts import attempt
from benchmarks.results import Results, in_turn
from benchmarks.servers.http_servers import StandIn
from benchmarks.tables import Table
from inference_worker.config import VARIABLES

NAME = "slots"
CASE = "100 ms, prefetch 64"
SLOTS = 64
DELAY_S = 0.1
FULL_RATE = SLOTS / DELAY_S
_CONTENDERS = (who.WORKER, who.WORKER_AHEAD, who.DRAMATIQ, who.CELERY, who.AIO)


def measure(bench: Bench, results: Results, effort: Effort, say: Callable[[str], None]) -> None:
    """Drain a filled queue; its first two seconds and its last fifth of a second are not measured."""
    contenders = list(_CONTENDERS)
    if not any(variable.name == "RABBITMQ_LOOKAHEAD" for variable in VARIABLES):
        contenders.remove(who.WORKER_AHEAD)
        results.notes.append("this worker has no RABBITMQ_LOOKAHEAD")
    # whole waves of 64, since results come in waves
    warm_count, tail_count = SLOTS * int(min(2.0, effort.busy_s / 3) / DELAY_S), 2 * SLOTS
    with StandIn(delay_s=DELAY_S) as model:
        for number in range(effort.rounds):
            for contender in in_turn(contenders, number):
                what = f"round {number + 1}, 64 slots, {contender.name}"
                with attempt(results, say, what):
                    drain = measure_drain(
                        bench,
                        contender,
                        prefetch=SLOTS,
                        count=SLOTS * int(effort.busy_s / DELAY_S),
                        warm_count=warm_count,
                        tail_count=tail_count,
                        model=model,
                    )
                    rate = 1 / drain.wall_per_message_s
                    share, cpu_s = rate / FULL_RATE, drain.cpu_per_message_s
                    results.add(NAME, contender.name, CASE, number, rate=rate, share=share, cpu_s=cpu_s)
                    say(f"{what}: {rate:.0f} req/s, {share:.1%} of {FULL_RATE:.0f}, {cpu_s * 1000:.2f} ms CPU")


def tables(results: Results) -> list[Table]:
    """Rate, share and CPU."""
    rows = [
        [
            name,
            write.with_spread(results.spread(NAME, name, CASE, "rate"), write.whole),
            write.with_spread(results.spread(NAME, name, CASE, "share"), write.percent),
            write.with_spread(results.spread(NAME, name, CASE, "cpu_s"), write.milliseconds),
        ]
        for name in results.contenders(NAME, CASE)
    ]
    columns = ("", "requests a second", "of 640", "CPU per message, ms")
    return [Table("Slots kept busy: a model of 100 ms, prefetch 64", columns, rows, _HOW)] if rows else []


_HOW = (
    "Dramatiq fetches twice as many messages as it has threads, so a freed thread has its next one at hand; the worker "
    "fetches as many as it has slots, and `RABBITMQ_LOOKAHEAD` more."
)
