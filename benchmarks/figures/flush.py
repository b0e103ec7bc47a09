"""Added latency while a metrics flush of 10,000 records and their billing runs beside the requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks import contender as who
from benchmarks import tables as write
from benchmarks.bench import Bench
from benchmarks.drain import wait_results
from benchmarks.effort import Effort
from benchmarks.figures.attempts import attempt
from benchmarks.latency import Latencies, measure_latencies, sights
from benchmarks.results import Results
from benchmarks.stats import percentile
from benchmarks.tables import Table

NAME = "flush"
CALM, FLUSHING = "no flush", "during the flush"
_TIMEOUT_S = 120.0


def measure(bench: Bench, results: Results, effort: Effort, say: Callable[[str], None]) -> None:
    """Fill the worker's buffer, measure in the calm, set the flush off, and measure again."""
    for number in range(effort.rounds):
        with attempt(results, say, f"round {number + 1}, flush"):
            calm, flushing, records = _measure_one(bench, effort)
            for case, found in ((CALM, calm), (FLUSHING, flushing)):
                p50_s, p99_s = percentile(found.added_s(), 50), percentile(found.added_s(), 99)
                most_s = max(found.added_s())
                results.add(NAME, who.WORKER.name, case, number, p50_s=p50_s, p99_s=p99_s, max_s=most_s)
                results.add(NAME, who.WORKER.name, case, number, records=records if case == FLUSHING else None)
                say(f"round {number + 1}, {case}: p50 {p50_s * 1000:.2f} ms, p99 {p99_s * 1000:.2f} ms")


def _measure_one(bench: Bench, effort: Effort) -> tuple[Latencies, Latencies, int]:
    records, samples = effort.flush_records, effort.latency_samples
    # half full before the first timed flush is due, at the default interval: a round is paced by that
    env = {"METRICS_BUFFER_SIZE": str(2 * records)}
    bench.redis.flushdb()
    bench.metric_server.documents()
    queue = bench.declare(who.WORKER)
    try:
        with (
            bench.running(who.WORKER, queue, prefetch=1, worker_env=env) as running,
            sights(bench) as seen,
        ):
            bench.wait_consumer(running)
            # so many that the flush begins among the first samples of the second half
            filled = records - samples - 5
            bench.fill_unwatched(who.WORKER, queue, filled)
            wait_results(bench, [running], filled, timeout_s=_TIMEOUT_S)
            time.sleep(0.5)
            calm = measure_latencies(bench, running, seen, model=None, count=samples)
            flushing = measure_latencies(bench, running, seen, model=None, count=samples)
            sizes = [len(document["requests"]) for document in bench.metric_server.documents()]  # type: ignore[arg-type]
            return calm, flushing, max(sizes, default=0)
    finally:
        bench.delete(queue)
        bench.redis.flushdb()


def tables(results: Results) -> list[Table]:
    """Calm and flushing."""
    rows = [
        [
            case,
            *(
                write.with_spread(results.spread(NAME, who.WORKER.name, case, measure), write.milliseconds)
                for measure in ("p50_s", "p99_s", "max_s")
            ),
        ]
        for case in results.cases(NAME)
    ]
    sent = results.spread(NAME, who.WORKER.name, FLUSHING, "records")
    title = f"Added latency beside a metrics flush of {sent.median:,.0f} records" if sent else "Beside a metrics flush"
    return [Table(title, ("", "p50, ms", "p99, ms", "longest, ms"), rows, _HOW)] if rows else []


_HOW = (
    "The same worker before and during the flush: the document is encoded and posted, and each record's usage event is "
    "posted to Croesus, one POST each, on threads beside the slot, with a rest between two events as long as the flush "
    "interval of 30 s allows it."
)
