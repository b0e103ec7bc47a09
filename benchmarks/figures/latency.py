"""Added latency: from sending to the sight of the result, less the model's own time."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import contender as who
from benchmarks import tables as write
from benchmarks.bench import Bench
from benchmarks.contender import Contender
from benchmarks.effort import Effort
from benchmarks.figures.attempts import attempt
from benchmarks.latency import measure_latencies, sights
from benchmarks.results import Results, in_turn
from benchmarks.servers.http_servers import HttpServerProcess, StandIn
from benchmarks.stats import percentile
from benchmarks.tables import Table

NAME = "latency"
#: requests before those that count
_WARM_COUNT = 30
INSTANT, SLOW = "instant model", "model of 100 ms"
_SLOW_S = 0.1
#: model, prefetch, who
_PLAN: tuple[tuple[str, int, tuple[Contender, ...]], ...] = (
    (INSTANT, 1, (who.BARE, who.WORKER, who.DRAMATIQ, who.CELERY, who.AIO)),
    (INSTANT, 8, (who.WORKER, who.DRAMATIQ, who.CELERY, who.AIO)),
    (INSTANT, 64, (who.WORKER, who.DRAMATIQ, who.CELERY, who.AIO)),
    (SLOW, 1, (who.BARE, who.WORKER, who.DRAMATIQ, who.CELERY, who.AIO)),
)


def case_of(model: str, prefetch: int) -> str:
    """Name the case."""
    return f"{model}, prefetch {prefetch}"


def measure(bench: Bench, results: Results, effort: Effort, say: Callable[[str], None]) -> None:
    """Send requests one at a time to each contender in turn."""
    with StandIn(delay_s=_SLOW_S) as slow:
        for number in range(effort.rounds):
            for model_name, prefetch, contenders in _PLAN:
                model = None if model_name == INSTANT else slow
                # 100 ms each: a fifth is enough for a median
                count = effort.latency_samples if model is None else effort.latency_samples // 5
                for contender in in_turn(contenders, number):
                    what = f"round {number + 1}, {case_of(model_name, prefetch)}, {contender.name}"
                    with attempt(results, say, what):
                        measures = measure_one(bench, contender, prefetch=prefetch, model=model, count=count)
                        results.add(NAME, contender.name, case_of(model_name, prefetch), number, **measures)
                        say(f"{what}: p50 {measures['p50_s'] * 1000:.2f} ms, p99 {measures['p99_s'] * 1000:.2f} ms")


def measure_one(
    bench: Bench, contender: Contender, *, prefetch: int, model: HttpServerProcess | None, count: int
) -> dict[str, float]:
    """Measure one contender; for our worker also what its own records say.

    Raises:  NotInTime
    """
    bench.redis.flushdb()
    bench.metric_server.documents()
    queue = bench.declare(contender)
    try:
        with bench.running(contender, queue, prefetch=prefetch, model=model) as running, sights(bench) as seen:
            bench.wait_consumer(running)
            measure_latencies(bench, running, seen, model=model, count=min(_WARM_COUNT, count))
            found = measure_latencies(bench, running, seen, model=model, count=count)
            added_s = found.added_s()
            measures = {"p50_s": percentile(added_s, 50), "p99_s": percentile(added_s, 99)}
            if contender.is_worker:
                running.stop()
                own_s = added_by_records(bench.metric_server.documents(), set(found.request_ids))
                if own_s:
                    measures |= {"own_p50_s": percentile(own_s, 50), "own_p99_s": percentile(own_s, 99)}
            return measures
    finally:
        bench.delete(queue)
        bench.redis.flushdb()


def added_by_records(documents: list[dict[str, object]], request_ids: set[str]) -> list[float]:
    """Return total less model latency of each of these requests, as the worker recorded them."""
    records = [record for document in documents for record in document["requests"]]  # type: ignore[attr-defined]
    return [
        record["total_latency_s"] - record["model_latency_s"]
        for record in records
        if record["request_id"] in request_ids and record["model_latency_s"] is not None
    ]


def tables(results: Results) -> list[Table]:
    """p50 and p99."""
    rows = [
        [
            case,
            name,
            *(
                write.with_spread(results.spread(NAME, name, case, measure), write.milliseconds)
                for measure in ("p50_s", "p99_s", "own_p50_s", "own_p99_s")
            ),
        ]
        for case in results.cases(NAME)
        for name in results.contenders(NAME, case)
    ]
    columns = ("", "", "p50, ms", "p99, ms", "p50 by its records, ms", "p99 by its records, ms")
    return [Table("Added latency per request", columns, rows, _HOW)] if rows else []


_HOW = (
    "Requests sent one at a time, one every 15 ms at most: from the sending of a request's bytes until the client has "
    "seen in Redis (keyspace notification) that the result is stored, less what the slow model took by its own clock; "
    "all of the instant one's counts. So the way through the broker and the client's are in it, for all alike. By its "
    "records: `total_latency_s` less `model_latency_s` as the worker reports them to MetricServer, from the start of a "
    "request in its slot to the decision on it; the HTTP client's way to the model counts there as the model's."
)
