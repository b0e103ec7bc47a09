"""How soon workers are back after the broker is: at once after a moment, and never later than 35 s."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from devstack.processes import wait_until
from devstack.proxy import TcpProxy
from devstack.worker_process import WorkerProcess

from .support import LONG_TIMEOUT_S, Deployment, completed_text, records, said, until
from .test_outages import wait_out

pytestmark = pytest.mark.integration

WORKER_COUNT = 3
#: the longest pause between two tries, and what a worker needs to connect and to consume
NEVER_LATER_S = 30.0 + 5.0
PROMPT = "Back so soon?"
ROUND = "A round for everybody."


@pytest.fixture
def workers(deployment: Deployment, broker_proxy: TcpProxy) -> list[WorkerProcess]:
    for _ in range(WORKER_COUNT):
        deployment.start_worker(ready=False, RABBITMQ_PORT=broker_proxy.port)
    return [worker.wait_ready() for worker in deployment.workers]


def until_all(workers: list[WorkerProcess], condition: Callable[[WorkerProcess], bool], what: str) -> float:
    """Wait until it holds of every worker; return how long that took."""
    begun_at = time.monotonic()
    wait_until(lambda: all(map(condition, workers)), timeout_s=NEVER_LATER_S, what=what)
    return time.monotonic() - begun_at


@pytest.mark.parametrize(
    ("outage_s", "back_within_s"),
    [
        # over before the first try, which comes a second after the loss
        (0.3, 2.0),
        # tries after 1, 3 and 7 s, or up to a fifth sooner
        (4.0, 4.0),
        # after 15 and 31 s, then every 30 s: the worst that can be met
        pytest.param(31.5, NEVER_LATER_S, marks=pytest.mark.slow),
    ],
)
def test_workers_are_back_as_soon_as_the_backoff_lets_them(
    deployment: Deployment,
    broker_proxy: TcpProxy,
    workers: list[WorkerProcess],
    outage_s: float,
    back_within_s: float,
) -> None:
    broker_proxy.refuse()
    wait_out(outage_s)
    broker_proxy.start()
    until_all(workers, lambda worker: bool(records(worker, "session_ended")), "the loss is noticed")
    took_s = until_all(workers, lambda worker: worker.ready(), "all consume again")
    print(f"away for {outage_s:g} s, back after {took_s:.2f} s")
    assert took_s < back_within_s
    check_one_consumer_each(deployment, workers)


def test_r10_three_drops_within_two_seconds_leave_one_consumer_for_each_worker(
    deployment: Deployment, broker_proxy: TcpProxy, workers: list[WorkerProcess]
) -> None:
    """Whatever each of them was at when it was cut: consuming, waiting, connecting, declaring."""
    request_ids = []
    begun_at = time.monotonic()
    for number in range(3):
        broker_proxy.cut()
        request_ids += [deployment.publish(deployment.request(f"{PROMPT} {number}")) for _ in range(4)]
        wait_out(max(0.0, begun_at + 0.95 * (number + 1) - time.monotonic()) if number < 2 else 0.0)
    assert time.monotonic() - begun_at < 2.5
    until_all(workers, lambda worker: bool(records(worker, "session_ended")), "the loss is noticed")
    took_s = until_all(workers, lambda worker: worker.ready(), "all consume again")
    print(f"back {took_s:.2f} s after the third drop")
    for request_id in request_ids:
        assert deployment.wait_result(request_id, timeout_s=NEVER_LATER_S)["status"] == "completed"
    check_one_consumer_each(deployment, workers)


def check_one_consumer_each(deployment: Deployment, workers: list[WorkerProcess]) -> None:
    """As many consumers as workers, every one of them at work, and nothing left behind."""
    until(lambda: deployment.consumer_count() == WORKER_COUNT, "one consumer for each worker")
    deployment.model.behave(match=ROUND, delay_s=0.5)
    until(lambda: serves_round(deployment, workers), "every worker serves")
    until(lambda: deployment.consumer_count() == WORKER_COUNT, "still one consumer for each worker")
    for worker in workers:
        assert worker.stop() == 0
    assert deployment.queue_depth() == 0
    assert deployment.dead_letters() == []


def serves_round(deployment: Deployment, workers: list[WorkerProcess]) -> bool:
    """Have as many requests served as there are workers; tell whether each worker has had one by now."""
    prompts = [f"{ROUND} {number}" for number in range(WORKER_COUNT)]
    request_ids = [deployment.publish(deployment.request(prompt)) for prompt in prompts]
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        assert completed_text(deployment.wait_result(request_id, timeout_s=LONG_TIMEOUT_S)) == said(prompt)
    # a call of its own, which a redelivery that found its result has not had
    return all(
        any(line["session"] > 1 and line.get("model_latency_s") for line in records(worker, "request_settled"))
        for worker in workers
    )
