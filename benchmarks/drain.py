"""How long a filled queue takes: wall and CPU time from one count of results to another. One thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import process_usage
from benchmarks.bench import Bench, Running
from benchmarks.contender import Contender
from benchmarks.servers.http_servers import HttpServerProcess
from devstack import processes

#: seconds between two looks at the number of results: Redis is asked for it, which costs it some microseconds
_LOOK_MAX_S = 0.02
_LOOK_MIN_S = 0.0005
#: picked at random, after each measurement
_RESULTS_CHECKED = 10
#: of each worker that has just begun to consume, before it is measured
_FIRST_CALLS = 10
#: for the last ack to leave, when the last result is there
_LAST_ACK_S = 0.1
#: what is left in the queue when all results are there is an ack on its way
_EMPTY_TIMEOUT_S = 5.0


class WrongResults(Exception):
    """A contender was quick, but did not do the job. Raised by `check_results`; what it took does not count."""


@dataclass(frozen=True)
class Drain:
    """What was measured between two counts of results."""

    count: int
    wall_s: float
    cpu_s: float

    @property
    def wall_per_message_s(self) -> float:
        return self.wall_s / self.count

    @property
    def cpu_per_message_s(self) -> float:
        return self.cpu_s / self.count


def measure_drain(
    bench: Bench,
    contender: Contender,
    *,
    prefetch: int,
    count: int,
    warm_count: int,
    tail_count: int = 0,
    workers: int = 1,
    model: HttpServerProcess | None = None,
    make_request: Callable[[], dict[str, Any]] | None = None,
    worker_env: Mapping[str, str] | None = None,
    keys_per_result: int = 1,
    timeout_s: float = 120.0,
) -> Drain:
    """Fill a queue with `count` requests, start the contender and measure until `tail_count` are left.

    The first `warm_count` results are not measured: they hold the start and the first connections. Of several workers,
    none is measured before all of them consume.

    Raises:  NotInTime, also when messages are left behind; WrongResults
    """
    bench.redis.flushdb()
    queue = bench.declare(contender)
    try:
        bench.fill(contender, queue, count, make_request=make_request)
        with contextlib.ExitStack() as running:
            all_running = [
                running.enter_context(
                    bench.running(
                        contender, queue, prefetch=prefetch, model=model, worker_env=worker_env, replica=number + 1
                    )
                )
                for number in range(workers)
            ]
            first = warm_count
            if workers > 1:
                bench.wait_consumer(all_running[0], count=workers)
                first = max(first, int(bench.redis.dbsize()) + _FIRST_CALLS * workers)
            # a streamed answer leaves two keys
            first, last = first * keys_per_result, (count - tail_count) * keys_per_result
            drain = watch(bench, all_running, first, last, timeout_s=timeout_s)
            drain = replace(drain, count=drain.count // keys_per_result)
            if tail_count:
                wait_results(bench, all_running, count * keys_per_result, timeout_s=timeout_s)
            time.sleep(_LAST_ACK_S)
            if not contender.is_worker:
                # Celery sends its last acks when it ends; our worker would first send all its records
                for running_one in all_running:
                    running_one.stop()
        processes.wait_until(
            lambda: bench.depth(queue) == 0, timeout_s=_EMPTY_TIMEOUT_S, what=f"{contender.name} leaves nothing behind"
        )
        check_results(bench, contender)
        return drain
    finally:
        bench.delete(queue)
        bench.redis.flushdb()


def check_results(bench: Bench, contender: Contender) -> None:
    """Look at some of the results.

    Raises:  WrongResults when one is not a completed one
    """
    for _ in range(_RESULTS_CHECKED):
        key = bench.redis.randomkey()
        if key is not None and key.startswith(b"infer_stream:"):
            key = key.replace(b"infer_stream:", b"infer_resp:")
        # a result may be 10 MB long; its status comes first
        if key is None or b'"completed"' not in bench.redis.getrange(key, 0, 63):
            raise WrongResults(f"{contender.name} stored a result that is not completed")


def watch(bench: Bench, all_running: list[Running], first: int, last: int, *, timeout_s: float) -> Drain:
    """Measure from `first` results to `last`.

    Raises:  NotInTime
    """
    began_count = wait_results(bench, all_running, first, timeout_s=timeout_s)
    pids = [pid for running in all_running for pid in running.pids()]
    began_cpu_s, began_at = process_usage.cpu_s(pids), time.perf_counter()
    # the look at /proc took a while; count again at the same moment as the clocks
    began_count = max(began_count, int(bench.redis.dbsize()))
    if began_count >= last:
        raise processes.NotInTime(f"{all_running[0].contender.name} was through before it could be measured")
    ended_count = wait_results(bench, all_running, last, timeout_s=timeout_s)
    ended_at, ended_cpu_s = time.perf_counter(), process_usage.cpu_s(pids)
    return Drain(ended_count - began_count, ended_at - began_at, ended_cpu_s - began_cpu_s)


def wait_results(bench: Bench, all_running: list[Running], count: int, *, timeout_s: float) -> int:
    """Wait for so many results, looking more often the nearer they are; return how many there are.

    Raises:  NotInTime, with the end of the contender's log
    """
    began_at = time.perf_counter()
    began_count = -1
    while True:
        now, found = time.perf_counter(), int(bench.redis.dbsize())
        if found >= count:
            return found
        if began_count < 0:
            began_count = found
        name, log = all_running[0].contender.name, all_running[0].log
        if now - began_at > timeout_s:
            raise processes.NotInTime(f"{name}: {found} of {count} results in {timeout_s:g} s\n{log()[-2000:]}")
        if not all(running.is_running() for running in all_running):
            raise processes.NotInTime(f"{name} ended by itself\n{log()[-2000:]}")
        gained = found - began_count
        per_result_s = (now - began_at) / gained if gained else _LOOK_MAX_S
        time.sleep(min(_LOOK_MAX_S, max(_LOOK_MIN_S, (count - found) * per_result_s / 2)))
