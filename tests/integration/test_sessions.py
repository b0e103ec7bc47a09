"""What happens to the connection, the consumer and the queue, and what must not happen to a message meanwhile."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from devstack.model_server import ModelServer
from devstack.proxy import Direction, TcpProxy
from devstack.rabbitmq import RabbitMq

from .support import (
    LONG_TIMEOUT_S,
    Deployment,
    broker_setting,
    completed_text,
    readyz,
    records,
    said,
    settlements,
    until,
    wait_hold,
    wait_record,
)

pytestmark = pytest.mark.integration

PROMPT = "Are you still there?"


def stamp_s(record: dict[str, Any]) -> float:
    """Return when a log line was written, in unix seconds."""
    return datetime.fromisoformat(record["timestamp"]).timestamp()


def frame(class_id: int, method_id: int) -> re.Pattern[bytes]:
    """Return what matches an AMQP method frame: its type, channel, size, class and method."""
    return re.compile(b"\x01.{6}" + re.escape(class_id.to_bytes(2, "big") + method_id.to_bytes(2, "big")), re.DOTALL)


CONNECTION_OPEN, BASIC_QOS, BASIC_CONSUME_OK = frame(10, 40), frame(60, 10), frame(60, 21)


# -- the link goes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_law_3_r05_a_settlement_of_a_lost_session_is_dropped_and_the_redelivery_finds_the_result(
    deployment: Deployment, queue_type: str
) -> None:
    worker = deployment.start_worker(RABBITMQ_QUEUE_TYPE=queue_type)
    deployment.model.behave(match=PROMPT, delay_s=3.0)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    deployment.rabbitmq.ctl("close_all_connections", "a test")
    wait_record(worker, "request_settled", count=2, request_id=request_id)
    assert settlements(worker, request_id) == [("stale", "completed"), ("ack", "already_completed")]
    assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)
    deployment.serve_next()
    assert deployment.calls(PROMPT) == 1
    assert "Traceback" not in worker.log()
    deployment.stop_empty(worker)


def test_law_3_r06_an_old_tag_settles_nothing_in_a_new_session(deployment: Deployment, broker_proxy: TcpProxy) -> None:
    first, second = "The first message.", "The second message."
    cut_worker = deployment.start_worker(RABBITMQ_PORT=broker_proxy.port, RABBITMQ_PREFETCH=2)
    deployment.model.behave(match=first, times=1, delay_s=8.0)
    first_id = deployment.publish(deployment.request(first))
    deployment.model.ledger.wait_for_calls(first)
    other_worker = deployment.start_worker(RABBITMQ_PREFETCH=1)
    deployment.model.behave(match=first, delay_s=15.0)
    broker_proxy.refuse()
    deployment.model.ledger.wait_for_calls(first, count=2)  # the other worker has the first message now
    deployment.model.behave(match=second, delay_s=12.0)
    second_id = deployment.publish(deployment.request(second))
    broker_proxy.start()
    deployment.model.ledger.wait_for_calls(second, timeout_s=LONG_TIMEOUT_S)
    wait_record(cut_worker, "request_settled", request_id=first_id)
    assert settlements(cut_worker, first_id) == [("stale", "completed")]
    assert settlements(cut_worker, second_id) == []
    assert deployment.queue_depth() == 0
    wait_record(cut_worker, "request_settled", request_id=second_id)
    wait_record(other_worker, "request_settled", request_id=first_id)
    assert settlements(cut_worker, second_id) == [("ack", "completed")]
    assert settlements(other_worker, first_id) == [("ack", "already_completed")]
    assert len(records(cut_worker, "connected")) == 2
    assert deployment.calls(second) == 1


def test_r13_the_result_stored_first_stays_and_is_what_is_billed(
    deployment: Deployment, broker_proxy: TcpProxy
) -> None:
    slow = deployment.start_worker(RABBITMQ_PORT=broker_proxy.port)
    deployment.model.behave(match=PROMPT, times=1, delay_s=4.0, completion_tokens=50)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    quick = deployment.start_worker()
    deployment.model.behave(match=PROMPT, completion_tokens=10)
    broker_proxy.refuse()
    stored = deployment.wait_result(request_id)
    assert stored["result"]["usage"]["completion_tokens"] == 10
    wait_record(quick, "request_settled", request_id=request_id, disposition="ack")
    broker_proxy.start()
    wait_record(slow, "request_settled", request_id=request_id, disposition="stale")
    assert deployment.result(request_id) == stored
    for worker in (quick, slow):
        assert worker.stop() == 0
    (event,) = deployment.croesus.events
    assert event["id"] == request_id
    assert event["data"]["completion_tokens"] == 10
    assert deployment.calls(PROMPT) == 2
    assert deployment.queue_depth() == 0


def test_r10_a_link_that_is_cut_three_times_ends_with_one_consumer(
    deployment: Deployment, broker_proxy: TcpProxy
) -> None:
    worker = deployment.start_worker(RABBITMQ_PORT=broker_proxy.port)
    cuts: list[str] = []
    plan = [
        ("while it connects", Direction.TO_SERVER, CONNECTION_OPEN),
        ("between declare and consume", Direction.TO_SERVER, BASIC_QOS),
        ("right after consume-ok", Direction.TO_CLIENT, BASIC_CONSUME_OK),
    ]

    def watch(direction: Direction, data: bytes) -> None:
        if len(cuts) < len(plan) and plan[len(cuts)][1] is direction and plan[len(cuts)][2].search(data):
            cuts.append(plan[len(cuts)][0])
            broker_proxy.cut()

    for direction in Direction:
        broker_proxy.observe(direction, lambda data, direction=direction: watch(direction, data))
    broker_proxy.cut()
    request_ids = [deployment.publish(deployment.request(f"{PROMPT} {number}")) for number in range(10)]
    for number, request_id in enumerate(request_ids):
        result = deployment.wait_result(request_id, timeout_s=35.0)
        assert completed_text(result) == said(f"{PROMPT} {number}")
    assert cuts == [when for when, _, _ in plan]
    assert deployment.consumer_count() == 1
    deployment.serve_next()
    deployment.stop_empty(worker)


def test_law_5_r02_a_link_that_goes_silent_is_given_up_and_so_is_a_broker_that_accepts_and_says_nothing(
    deployment: Deployment, broker_proxy: TcpProxy
) -> None:
    worker = deployment.start_worker(RABBITMQ_PORT=broker_proxy.port, RABBITMQ_HEARTBEAT_S=1)
    broker_proxy.stall()
    wait_record(worker, "session_ended", timeout_s=2 * (1 + 5) + 5.0)
    assert readyz(worker)["state"] == "connecting"
    wait_record(worker, "connect_failed")  # it connects, and hears nothing, for as long as it waits for a handshake
    assert not worker.ready()
    broker_proxy.resume()
    worker.wait_ready(timeout_s=LONG_TIMEOUT_S)
    deployment.serve_next()
    deployment.stop_empty(worker)


# -- the consumer goes ------------------------------------------------------------------------------------------------


def test_r09_a_deleted_queue_is_noticed_within_a_second_and_declared_again(deployment: Deployment) -> None:
    worker = deployment.start_worker()
    deployment.channel().exchange_delete(deployment.dlx)
    deployment.channel().queue_delete(deployment.dlq)
    deleted_at = time.time()
    deployment.channel().queue_delete(deployment.queue)
    (record,) = wait_record(worker, "session_ended")
    assert stamp_s(record) - deleted_at < 1.0
    until(deployment.queue_exists, "the queue is there again")
    worker.wait_ready()
    assert deployment.consumer_count() == 1
    deployment.publish(b"no JSON")
    assert deployment.wait_dead_letters(1)
    deployment.serve_next()
    deployment.stop_empty(worker)


def test_r12_what_no_slot_can_begin_waits_for_another_worker_and_what_has_begun_runs_on_over_a_hold(
    deployment: Deployment, broker_proxy: TcpProxy
) -> None:
    with ModelServer() as model_of_the_other:
        worker = deployment.start_worker(RABBITMQ_PORT=broker_proxy.port, RABBITMQ_PREFETCH=8)
        deployment.model.behave(delay_s=8.0)
        prompts = [f"Request {number}" for number in range(8)]
        request_ids = [deployment.publish(deployment.request(prompt)) for prompt in prompts[:5]]
        until(lambda: len(deployment.model.ledger.calls) == 5, "five calls run")
        broker_proxy.cut()
        wait_record(worker, "session_ended")
        request_ids += [deployment.publish(deployment.request(prompt)) for prompt in prompts[5:]]
        wait_record(worker, "consuming", count=2)
        # five slots are still at work for the lost session: of eight messages three are taken, and none waits here
        until(lambda: deployment.queue_depth() == 5, "five messages wait in the queue")
        deployment.model.behave_health(status=503)
        wait_hold(worker, "model_unhealthy")
        suspended = wait_record(worker, "consuming_suspended", session=2)[-1]
        raised = wait_record(worker, "hold_raised", hold="model_unhealthy", count=2)[-1]
        assert stamp_s(suspended) - stamp_s(raised) < 1.0
        assert deployment.queue_depth() == 5
        other = deployment.start_worker(RABBITMQ_PREFETCH=8, MODEL_CONTAINER_URL=model_of_the_other.url)
        until(lambda: len(records(other, "request_settled", disposition="ack")) == 5, "the other serves the five")
        for prompt, request_id in zip(prompts, request_ids, strict=True):
            assert completed_text(deployment.wait_result(request_id)) == said(prompt)
        assert worker.stop() == 0
        assert other.stop() == 0
    assert deployment.queue_depth() == 0
    assert deployment.dead_letters() == []


# -- the queue is not ours --------------------------------------------------------------------------------------------

FOREIGN_QUEUES = {
    "no-arguments": (None, "x-dead-letter-exchange"),
    "another-exchange": ({"x-dead-letter-exchange": "elsewhere"}, "x-dead-letter-exchange"),
    "priorities": ({"x-max-priority": 5}, "x-max-priority"),
    "quorum": ({"x-queue-type": "quorum"}, "x-queue-type"),
}


def check_dead_letter_by_copy(deployment: Deployment) -> None:
    """What would be a reject arrives as a copy, with a reason, and the original is gone."""
    deployment.publish(b"no JSON", headers={"tenant": "acme"})
    (letter,) = deployment.wait_dead_letters(1)
    assert letter.body == b"no JSON"
    assert letter.headers["x-dead-letter-reason"] == "malformed_request"
    assert letter.headers["tenant"] == "acme"
    assert "x-death" not in letter.headers
    deployment.serve_next()
    assert deployment.queue_depth() == 0


@pytest.mark.parametrize("kind", FOREIGN_QUEUES)
def test_r15_a_queue_with_other_arguments_is_taken_as_it_is(deployment: Deployment, kind: str) -> None:
    arguments, named = FOREIGN_QUEUES[kind]
    if arguments and "x-dead-letter-exchange" not in arguments:
        arguments = {
            "x-dead-letter-exchange": deployment.dlx,
            "x-dead-letter-routing-key": deployment.dlx_routing_key,
            **arguments,
        }
    deployment.channel().queue_declare(deployment.queue, durable=True, arguments=arguments)
    worker = deployment.start_worker()
    check_dead_letter_by_copy(deployment)
    (warning,) = records(worker, "topology_taken_as_is")
    assert warning["level"] == "WARNING"
    assert named in warning["message"]
    deployment.rabbitmq.ctl("close_all_connections", "a test")
    wait_record(worker, "consuming", count=2)
    deployment.serve_next()
    assert len(records(worker, "topology_taken_as_is")) == 1  # said once, not at every connect
    deployment.stop_empty(worker)
    assert len(deployment.dead_letters()) == 1


@pytest.fixture
def user_without_configure(rabbitmq: RabbitMq) -> Iterator[str]:
    """A user who may read and write everything, and declare nothing."""
    name = "consumer-only"
    rabbitmq.ctl("add_user", name, "secret")
    try:
        rabbitmq.ctl("set_permissions", name, "^$", ".*", ".*")
        yield name
    finally:
        rabbitmq.ctl("delete_user", name)


def test_r16_a_user_who_may_not_declare_takes_everything_as_it_is(
    deployment: Deployment, user_without_configure: str
) -> None:
    deployment.start_worker().stop()  # as an operator would have it declared
    worker = deployment.start_worker(RABBITMQ_USERNAME=user_without_configure, RABBITMQ_PASSWORD="secret")
    check_dead_letter_by_copy(deployment)
    warnings = records(worker, "topology_taken_as_is")
    assert warnings
    assert len(warnings) == len({warning["object"] for warning in warnings})
    assert len(records(worker, "connected")) == 1
    deployment.stop_empty(worker)


def test_r11_a_missing_exchange_costs_no_message_that_was_to_be_copied_there(deployment: Deployment) -> None:
    deployment.channel().queue_declare(deployment.queue, durable=True)
    worker = deployment.start_worker()
    deployment.channel().exchange_delete(deployment.dlx)
    deployment.publish(b"no JSON")
    wait_hold(worker, "publish_refused")
    assert records(worker, "request_settled") == []
    deployment.channel().exchange_declare(deployment.dlx, "direct", durable=True)
    deployment.channel().queue_bind(deployment.dlq, deployment.dlx, deployment.dlx_routing_key)
    (letter,) = deployment.wait_dead_letters(1)
    assert letter.body == b"no JSON"
    assert len(records(worker, "connected")) == 1
    deployment.serve_next()
    deployment.stop_empty(worker)


# -- the broker is short of something ---------------------------------------------------------------------------------


def test_r20_a_stop_waits_for_no_alarm_and_an_unconfirmed_copy_earns_no_ack(
    deployment: Deployment, rabbitmq: RabbitMq
) -> None:
    worker = deployment.start_worker(SHUTDOWN_GRACE_S=3)
    deployment.model.behave(match=PROMPT, times=1, delay_s=2.0, fault="reset_body")
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    with broker_setting(
        rabbitmq,
        on=["set_vm_memory_high_watermark", "0"],
        off=["set_vm_memory_high_watermark", "0.4"],
    ):
        wait_record(worker, "hold_raised", hold="model_suspect")
        until(lambda: "copies" in rabbitmq.ctl("list_connections", "client_properties"), "the copy is on its way")
        begun_at = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - begun_at < 3.0 + 5.0 + 3.0
        assert [what for what, _ in settlements(worker, request_id)] in ([], ["requeue"], ["stale"])
    deployment.start_worker()
    assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)
    deployment.serve_next()
    assert deployment.dead_letters() == []


def test_r21_a_missing_dead_letter_queue_has_no_depth_and_disturbs_nothing_else(deployment: Deployment) -> None:
    worker = deployment.start_worker()
    documents = deployment.metric_server

    def wait_depth(expected: int | None) -> None:
        seen = len(documents.documents)
        documents.wait_until(
            lambda: any(
                document["queue"] and document["queue"]["dead_letter_depth"] == expected
                for document in documents.documents[seen:]
            ),
            what=f"a dead_letter_depth of {expected}",
        )

    wait_depth(0)
    deployment.channel().queue_delete(deployment.dlq)
    wait_depth(None)
    queue = documents.documents[-1]["queue"]
    assert (queue["depth"], queue["consumers"]) == (0, 1)
    deployment.channel().queue_declare(deployment.dlq, durable=True)
    wait_depth(0)
    assert len(records(worker, "consuming")) == 1
    deployment.serve_next()
    deployment.stop_empty(worker)
