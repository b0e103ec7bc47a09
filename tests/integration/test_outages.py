"""Five hundred requests while a neighbour is away: one right result each, no dead letter, no call beyond reason.

Which call has a reason is written down beside each test; the model server's ledger is what is counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from devstack.install import Servers
from devstack.ledger import Call
from devstack.rabbitmq import RabbitMq
from devstack.redis_server import RedisServer
from devstack.worker_process import WorkerProcess

from .support import (
    LONG_TIMEOUT_S,
    Deployment,
    Producer,
    Sent,
    completed_text,
    records,
    said,
    until,
    wait_results,
)

pytestmark = pytest.mark.integration

REQUEST_COUNT = 500
PER_SECOND = 20.0
PREFETCH = 8
#: requests that are through before the fault
BEFORE_THE_FAULT = 100
OUTAGE_S = 20.0
CALL_S = 0.15
#: seconds for all results once everything is back
RESULTS_TIMEOUT_S = 90.0

ONE_AND_THREE = pytest.mark.parametrize("worker_count", [1, 3])


@pytest.fixture
def redis_server(servers: Servers) -> Iterator[RedisServer]:
    """A Redis of its own that remembers its results when it is killed."""
    with RedisServer(servers=servers, arguments=("--appendonly", "yes")) as server:
        yield server


@pytest.fixture
def workers(deployment: Deployment, worker_count: int) -> list[WorkerProcess]:
    deployment.model.behave(delay_s=CALL_S)
    for _ in range(worker_count):
        deployment.start_worker(ready=False, RABBITMQ_PREFETCH=PREFETCH, RABBITMQ_MAX_RETRIES=1)
    return [worker.wait_ready() for worker in deployment.workers]


def wait_out(seconds: float) -> None:
    """Let an outage last. The one place where the time itself is what the test is about."""
    time.sleep(seconds)


def check_results(deployment: Deployment, sent: Sequence[Sent]) -> None:
    """Each request has the answer to its own prompt, and none is a dead letter."""
    results = wait_results(deployment, sent, timeout_s=RESULTS_TIMEOUT_S)
    wrong = [item for item in sent if completed_text(results[item.request_id]) != said(item.prompt)]
    assert not wrong
    assert deployment.dead_letters() == []


def check_stop(deployment: Deployment, workers: Sequence[WorkerProcess]) -> None:
    """Every worker lived through it and stops cleanly; nothing was left unacked."""
    for worker in workers:
        assert worker.stop() == 0
    assert deployment.queue_depth() == 0
    assert deployment.dead_letters() == []


def check_bills(deployment: Deployment, sent: Sequence[Sent]) -> None:
    """Each request is billed once; events that came twice were one event."""
    until(lambda: len(deployment.croesus.events) == len(sent), "an event for each request")
    assert {event["id"] for event in deployment.croesus.events} == {item.request_id for item in sent}


def calls_of(deployment: Deployment, sent: Sequence[Sent]) -> dict[str, list[Call]]:
    """Return each request's calls by the ledger, by request_id."""
    return {item.request_id: deployment.model.ledger.calls_for(item.prompt) for item in sent}


def fates(workers: Sequence[WorkerProcess]) -> Counter[tuple[str, str, str]]:
    """Count what the workers say became of the deliveries: (request_id, disposition, reason)."""
    lines = [line for worker in workers for line in records(worker, "request_settled")]
    return Counter((line["request_id"], line["disposition"], line["reason"]) for line in lines)


@ONE_AND_THREE
def test_a_restart_of_the_broker_costs_no_request_and_no_call(
    deployment: Deployment, rabbitmq: RabbitMq, workers: list[WorkerProcess]
) -> None:
    """Rule: one call each. What runs when the broker goes ends within a moment and is stored; the broker is away for
    longer, so each redelivery finds its result. A second call has one reason alone: the producer lost a confirm, did
    not know better, and sent the request twice.
    """
    producer = Producer(deployment, REQUEST_COUNT, PER_SECOND, "Restart").start()
    producer.wait_sent(REQUEST_COUNT // 2, timeout_s=60.0)
    rabbitmq.restart()
    sent = producer.join(timeout_s=120.0)
    check_results(deployment, sent)
    check_bills(deployment, sent)
    check_stop(deployment, workers)

    calls = calls_of(deployment, sent)
    assert {item.request_id: len(calls[item.request_id]) for item in sent if item.publish_count == 1} == {
        item.request_id: 1 for item in sent if item.publish_count == 1
    }
    assert all(len(calls[item.request_id]) <= item.publish_count for item in sent)
    assert all(len(records(worker, "connected")) == 2 for worker in workers)


@ONE_AND_THREE
def test_an_outage_of_redis_costs_no_request_and_no_call_but_for_answers_that_another_worker_could_not_know(
    deployment: Deployment, redis_server: RedisServer, workers: list[WorkerProcess]
) -> None:
    """Rule: one call each, and one more for every time that an answer went back to the queue with its message because
    Redis was down, which happens to a message once at the most, and to no more messages than there are slots. With one
    worker not even these: it keeps the answer.
    """
    producer = Producer(deployment, REQUEST_COUNT, PER_SECOND, "Redis").start()
    producer.wait_sent(BEFORE_THE_FAULT, timeout_s=60.0)
    redis_server.kill()
    wait_out(OUTAGE_S)
    redis_server.start()
    sent = producer.join(timeout_s=60.0)
    check_results(deployment, sent)
    check_bills(deployment, sent)
    check_stop(deployment, workers)

    given_back = Counter(
        {
            who: count
            for (who, what, why), count in fates(workers).items()
            if (what, why) == ("requeue", "result_store_down")
        }
    )
    assert all(count == 1 for count in given_back.values())
    assert 0 < len(given_back) <= PREFETCH * len(workers)
    calls = calls_of(deployment, sent)
    allowed = {item.request_id: 1 + (given_back[item.request_id] if len(workers) > 1 else 0) for item in sent}
    beyond = {who: len(of_one) for who, of_one in calls.items() if len(of_one) > allowed[who]}
    assert not beyond


@ONE_AND_THREE
def test_an_outage_of_the_model_costs_no_request_and_no_call_but_those_that_it_broke_off(
    deployment: Deployment, workers: list[WorkerProcess]
) -> None:
    """Rule: one whole call each. Any other call was broken off by the outage: it had begun before, and its client never
    got the end of the answer. So nobody has more than two, and at most one for each slot was broken off.
    """
    producer = Producer(deployment, REQUEST_COUNT, PER_SECOND, "Model").start()
    producer.wait_sent(BEFORE_THE_FAULT, timeout_s=60.0)
    fault_at = time.time()
    deployment.model.refuse()
    wait_out(OUTAGE_S)
    back_at = time.time()
    deployment.model.start()
    sent = producer.join(timeout_s=60.0)
    check_results(deployment, sent)
    check_bills(deployment, sent)
    check_stop(deployment, workers)

    # a retry was spent by what was at work when the model went, and by nothing that came later
    retried = Counter({who: count for (who, what, _), count in fates(workers).items() if what == "republish"})
    assert all(count == 1 for count in retried.values())
    assert len(retried) <= PREFETCH * len(workers)
    broken_off = 0
    for of_one in calls_of(deployment, sent).values():
        *before, last = of_one
        assert last.completed
        assert len(before) <= 1
        for call in before:
            broken_off += 1
            # answered at the very moment of the fault: the bytes were out, and the reset overtook them
            assert not call.completed or call.answered_at >= fault_at - CALL_S
            assert call.begun_at <= fault_at + LONG_TIMEOUT_S / 10
            assert last.begun_at >= back_at - 0.5
    assert broken_off <= PREFETCH * len(workers)
