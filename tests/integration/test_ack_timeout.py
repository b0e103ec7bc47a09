"""Calls that take longer than the broker waits for an ack (R17): the channel goes, the work does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from devstack.install import Servers
from devstack.rabbitmq import RabbitMq
from devstack.redis_server import RedisServer

from .support import LONG_TIMEOUT_S, Deployment, completed_text, records, said, settlements, until

# four minutes: the broker looks for late acks once a minute
pytestmark = [pytest.mark.integration, pytest.mark.slow]

ACK_TIMEOUT_S = 60
CALL_S = 150.0
PREFETCH = 4
PROMPT = "Take your time."


@pytest.fixture(scope="module")
def impatient_broker(servers: Servers) -> Iterator[RabbitMq]:
    with RabbitMq(servers=servers, extra_config=f"consumer_timeout = {ACK_TIMEOUT_S * 1000}") as broker:
        yield broker


@pytest.fixture
def deployment(impatient_broker: RabbitMq, redis_server: RedisServer) -> Iterator[Deployment]:
    with Deployment(rabbitmq=impatient_broker, redis_server=redis_server) as running:
        yield running


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_r17_a_call_that_outlives_the_ack_timeout_is_made_once_and_its_result_is_stored(
    deployment: Deployment, impatient_broker: RabbitMq, queue_type: str
) -> None:
    """The calls run on without their channel, and occupy their slots; the redeliveries come when these are free."""
    worker = deployment.start_worker(RABBITMQ_PREFETCH=PREFETCH, RABBITMQ_QUEUE_TYPE=queue_type)
    deployment.model.behave(match=PROMPT, delay_s=CALL_S)
    prompts = [f"{PROMPT} {number}" for number in range(PREFETCH)]
    request_ids = [deployment.publish(deployment.request(prompt, timeout_s=600.0)) for prompt in prompts]
    for prompt in prompts:
        deployment.model.ledger.wait_for_calls(prompt)
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        assert completed_text(deployment.wait_result(request_id, timeout_s=CALL_S + LONG_TIMEOUT_S)) == said(prompt)
    until(lambda: deployment.rabbitmq.queue_info(deployment.queue)["unacked"] == 0, "all is acked")
    deployment.serve_next()
    ended = records(worker, "session_ended")
    print(f"{queue_type} on {impatient_broker.version}: {[line['reason'] for line in ended]}")
    # RabbitMQ 4.3 waits for ever on a classic queue
    is_patient = queue_type == "classic" and not impatient_broker.version.startswith("3.")
    assert len(ended) == (0 if is_patient else 1)
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        assert deployment.calls(prompt) == 1
        assert settlements(worker, request_id)[:-1] == ([] if is_patient else [("stale", "completed")])
        assert settlements(worker, request_id)[-1][0] == "ack"
    deployment.stop_empty(worker)
    assert deployment.dead_letters() == []
