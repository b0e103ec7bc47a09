"""A minute without Redis and a thousand messages in the queue (R19): no loop of deliveries, calls or log lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from devstack.install import Servers
from devstack.redis_server import RedisServer
from devstack.worker_process import WorkerProcess

from .support import Deployment, completed_text, records, said, until
from .test_outages import wait_out

pytestmark = pytest.mark.integration

OUTAGE_S = 60.0
SETTLING_S = 5.0
WORKER_COUNT = 3
PREFETCH = 4
MESSAGE_COUNT = 1000
#: results that are there when Redis goes
BEFORE_THE_OUTAGE = 50
CALL_S = 0.05
RESULTS_TIMEOUT_S = 90.0
#: lines of all workers together, from start to stop, beside the one line of each message
LINE_LIMIT = 100
PROMPT = "Where was I?"


@pytest.fixture
def redis_server(servers: Servers) -> Iterator[RedisServer]:
    """A Redis of its own that remembers its results when it is killed."""
    with RedisServer(servers=servers, arguments=("--appendonly", "yes")) as server:
        yield server


def test_r19_a_minute_without_redis_is_no_loop_of_deliveries_calls_or_log_lines(
    deployment: Deployment, redis_server: RedisServer
) -> None:
    deployment.model.behave(delay_s=CALL_S)
    deployment.declare_queue()
    prompts = [f"{PROMPT} {number}" for number in range(MESSAGE_COUNT)]
    request_ids = [deployment.publish(deployment.request(prompt, timeout_s=600.0)) for prompt in prompts]
    for _ in range(WORKER_COUNT):
        deployment.start_worker(ready=False, RABBITMQ_PREFETCH=PREFETCH, REDIS_RETRY_DELAY_S=2)
    workers = [worker.wait_ready() for worker in deployment.workers]
    until(lambda: len(deployment.model.ledger.calls) >= BEFORE_THE_OUTAGE, "some are through")
    redis_server.kill()
    ledger = deployment.model.ledger
    until(lambda: deployment.consumer_count() == 0, "nobody consumes")
    until(lambda: all(call.answered_at for call in ledger.calls), "nothing runs")
    wait_out(SETTLING_S)  # what was given back last is on its way into the queue
    call_count, depth = len(ledger.calls), deployment.queue_depth()
    wait_out(OUTAGE_S - SETTLING_S)
    # nothing has moved: what is in no queue is a redelivery, which its slot keeps
    assert len(ledger.calls) == call_count
    assert deployment.queue_depth() == depth
    assert deployment.dead_letters() == []
    redis_server.start()
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        assert completed_text(deployment.wait_result(request_id, timeout_s=RESULTS_TIMEOUT_S)) == said(prompt)
    for worker in workers:
        assert worker.stop() == 0
    assert deployment.queue_depth() == 0
    assert deployment.dead_letters() == []

    fates = [settled_by(worker) for worker in workers]
    given_back = Counter(who for fate in fates for who, what in fate.elements() if what == "requeue")
    assert 0 < len(given_back) <= WORKER_COUNT * PREFETCH
    assert all(count == 1 for count in given_back.values())
    calls = {who: len(ledger.calls_for(prompt)) for who, prompt in zip(request_ids, prompts, strict=True)}
    # a second call has one reason alone: the message came back to another worker than the one that keeps its answer
    moved = {who for who in given_back if not any(fate[who, "requeue"] and fate[who, "ack"] for fate in fates)}
    assert {who: count for who, count in calls.items() if count > 1 + (who in moved)} == {}

    beside = [line for worker in workers for line in records(worker) if line["event"] != "request_settled"]
    line_count = sum(len(worker.log().splitlines()) for worker in workers)
    settled_count = sum(len(records(worker, "request_settled")) for worker in workers)
    print(f"{len(given_back)} given back, {sum(calls.values())} calls, {len(beside)} lines beside {settled_count}")
    assert line_count - settled_count == len(beside) < LINE_LIMIT, Counter(line["event"] for line in beside)
    assert settled_count <= MESSAGE_COUNT + len(given_back)


def settled_by(worker: WorkerProcess) -> Counter[tuple[str, str]]:
    """Count what a worker says became of the deliveries: (request_id, disposition)."""
    return Counter((line["request_id"], line["disposition"]) for line in records(worker, "request_settled"))
