"""A queue that counts how often a message comes back, and an outage in which messages come back (R18)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from devstack.install import Servers
from devstack.rabbitmq import RabbitMq
from devstack.redis_server import RedisServer

from .support import Deployment, completed_text, records, said, until
from .test_outages import wait_out

pytestmark = pytest.mark.integration

DELIVERY_LIMIT = 3
OUTAGE_S = 60.0
RETRY_DELAY_S = 2
WORKER_COUNT = 3
PREFETCH = 4
MESSAGE_COUNT = 30
CALL_S = 0.1
RESULTS_TIMEOUT_S = 60.0
PROMPT = "How often have you seen this?"


@pytest.fixture
def redis_server(servers: Servers) -> Iterator[RedisServer]:
    """A Redis of its own, which is killed."""
    with RedisServer(servers=servers) as server:
        yield server


def limit_queue(deployment: Deployment, rabbitmq: RabbitMq, limited_by: str) -> None:
    """Have the broker give up a message of the request queue after so many deliveries that failed."""
    if limited_by == "argument":
        # the worker declares without it, and takes the queue as it is
        deployment.declare_queue(**{"x-queue-type": "quorum", "x-delivery-limit": DELIVERY_LIMIT})
        return
    limit = json.dumps({"delivery-limit": DELIVERY_LIMIT})
    name = f"limit-{deployment.deployment_id}"
    rabbitmq.ctl("set_policy", "--apply-to", "queues", name, f"^{deployment.queue}$", limit)


@pytest.mark.parametrize("limited_by", ["policy", pytest.param("argument", marks=pytest.mark.slow)])
def test_r18_no_outage_of_redis_takes_a_message_over_the_delivery_limit(
    deployment: Deployment, rabbitmq: RabbitMq, redis_server: RedisServer, limited_by: str
) -> None:
    limit_queue(deployment, rabbitmq, limited_by)
    deployment.model.behave(delay_s=CALL_S)
    for _ in range(WORKER_COUNT):
        deployment.start_worker(
            ready=False,
            RABBITMQ_QUEUE_TYPE="quorum",
            RABBITMQ_PREFETCH=PREFETCH,
            REDIS_RETRY_DELAY_S=RETRY_DELAY_S,
        )
    workers = [worker.wait_ready() for worker in deployment.workers]
    redis_server.kill()
    prompts = [f"{PROMPT} {number}" for number in range(MESSAGE_COUNT)]
    request_ids = [deployment.publish(deployment.request(prompt, timeout_s=600.0)) for prompt in prompts]
    until(lambda: all(records(worker, "hold_raised", level="WARNING") for worker in workers), "every worker holds")
    wait_out(OUTAGE_S)
    # looked at while it lasts: what the broker has given up is there by now
    assert deployment.dead_letters() == []
    redis_server.start()
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        assert completed_text(deployment.wait_result(request_id, timeout_s=RESULTS_TIMEOUT_S)) == said(prompt)
    for worker in workers:
        assert worker.stop() == 0
    assert deployment.queue_depth() == 0
    assert deployment.dead_letters() == []
    lines = [line for worker in workers for line in records(worker, "request_settled", disposition="requeue")]
    given_back = Counter(line["request_id"] for line in lines if line["reason"] == "result_store_down")
    assert given_back
    assert all(count == 1 for count in given_back.values())
    # as many as were in work when they found out, and those that a worker had in hand beside
    assert len(given_back) <= WORKER_COUNT * PREFETCH
