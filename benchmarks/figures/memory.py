"""The worker's resident memory: idle, for each slot, and its growth over many messages."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks import contender as who
from benchmarks import process_usage
from benchmarks import tables as write
from benchmarks.bench import Bench
from benchmarks.drain import wait_results
from benchmarks.effort import Effort
from benchmarks.figures.attempts import attempt
from benchmarks.results import Results
from benchmarks.servers.http_servers import HttpServerProcess, StandIn
from benchmarks.tables import Table

NAME = "memory"
IDLE, SLOT, GROWTH = "idle", "slot", "growth"
_MANY_SLOTS = 64
#: after the consumer is there, for what a worker does in its first moments
_SETTLE_S = 2.0
#: slow enough that every slot works
_DELAY_S = 0.05
_ROUNDS = 3
#: messages before the growth is counted: the buffers of records and of usage events fill and empty once
_WARM_MESSAGES = 10_000
_BATCH = 5_000
_TIMEOUT_S = 300.0


def measure(bench: Bench, results: Results, effort: Effort, say: Callable[[str], None]) -> None:
    """Idle and per slot a few times, the growth once."""
    for number in range(min(_ROUNDS, effort.rounds)):
        with attempt(results, say, f"round {number + 1}, memory"), StandIn(delay_s=_DELAY_S) as model:
            idle, one = _rss(bench, model, prefetch=1)
            _, many = _rss(bench, model, prefetch=_MANY_SLOTS)
            slot = (many - one) / (_MANY_SLOTS - 1)
            results.add(NAME, who.WORKER.name, IDLE, number, rss_bytes=idle)
            results.add(NAME, who.WORKER.name, SLOT, number, rss_bytes=slot)
            say(f"round {number + 1}, memory: {idle / 1e6:.1f} MB idle, {slot / 1e6:.3f} MB per slot")
    measure_growth(bench, results, effort.growth_messages, say)


def _rss(bench: Bench, model: HttpServerProcess, *, prefetch: int) -> tuple[float, float]:
    """Return the memory idle, and after every slot has worked."""
    bench.redis.flushdb()
    queue = bench.declare(who.WORKER)
    try:
        with bench.running(who.WORKER, queue, prefetch=prefetch, model=model) as running:
            bench.wait_consumer(running)
            time.sleep(_SETTLE_S)
            pids = running.pids()
            idle = process_usage.rss_bytes(pids)
            count = 20 * prefetch
            bench.fill_unwatched(who.WORKER, queue, count)
            wait_results(bench, [running], count, timeout_s=_TIMEOUT_S)
            return idle, process_usage.rss_bytes(pids)
    finally:
        bench.delete(queue)
        bench.redis.flushdb()


def measure_growth(bench: Bench, results: Results, messages: int, say: Callable[[str], None]) -> None:
    """Send batches, each after the last is through and Redis is empty again, and look at the memory after each."""
    with attempt(results, say, "memory growth"):
        _watch_growth(bench, results, messages, say)


def _watch_growth(bench: Bench, results: Results, messages: int, say: Callable[[str], None]) -> None:
    warm, batch = min(_WARM_MESSAGES, messages), min(_BATCH, messages)
    queue = bench.declare(who.WORKER)
    try:
        with bench.running(who.WORKER, queue, prefetch=1) as running:
            bench.wait_consumer(running)
            sent, before = 0, 0
            while sent < warm + messages:
                bench.redis.flushdb()
                bench.fill_unwatched(who.WORKER, queue, batch)
                wait_results(bench, [running], batch, timeout_s=_TIMEOUT_S)
                sent += batch
                rss = process_usage.rss_bytes(running.pids())
                if sent <= warm:
                    before = max(before, rss)
                    continue
                results.add(NAME, who.WORKER.name, GROWTH, sent - warm, rss_bytes=rss - before)
                if (sent - warm) % (batch * 10) == 0 or sent >= warm + messages:
                    say(f"memory growth after {sent - warm:,} messages: {(rss - before) / 1e6:.2f} MB")
    finally:
        bench.delete(queue)
        bench.redis.flushdb()


def take_growth(results: Results, longer: Results) -> None:
    """Let the growth that a longer run of its own saw stand for the one of the full run, and say so."""
    results.replace(longer, NAME, GROWTH)
    results.facts.update(longer.facts)


def growth(results: Results) -> tuple[int, float] | None:
    """Return after how many messages we last looked, and what had grown: the most of the last five looks."""
    looks = sorted(results.rounds(NAME, who.WORKER.name, GROWTH, "rss_bytes").items())
    return (looks[-1][0], max(value for _, value in looks[-5:])) if looks else None


def tables(results: Results) -> list[Table]:
    """The three numbers."""
    rows = []
    for case, label in (
        (IDLE, "idle, consuming"),
        (SLOT, "for each slot (prefetch 64 against 1, every slot has worked)"),
    ):
        found = results.spread(NAME, who.WORKER.name, case, "rss_bytes")
        if found:
            rows.append([label, write.with_spread(found, write.megabytes)])
    grown = growth(results)
    if grown:
        warm = f"{_WARM_MESSAGES:,}" if grown[0] >= _WARM_MESSAGES else "some"
        rows.append([f"growth over {grown[0]:,} messages, after the first {warm}", write.megabytes(grown[1])])
    return [Table("Memory of the worker", ("", "resident, MB"), rows, _HOW)] if rows else []


_HOW = "Resident set of the whole process, buffers of records and usage events included; MB are 10^6 bytes."
