"""A producer that no longer waits: what it cancels is not begun, or is cut off, and is never billed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis

from devstack.follow import follow
from devstack.producer import cancel

from .support import LONG_TIMEOUT_S, Deployment, settlements

pytestmark = pytest.mark.integration

INTERVAL_S = 1.0


def cancel_now(deployment: Deployment, request_id: str) -> None:
    with redis.Redis.from_url(deployment.redis_server.url) as results:
        cancel(results, request_id)


def check_cancelled(deployment: Deployment, request_id: str) -> None:
    result = deployment.wait_result(request_id)
    assert (result["status"], result["status_code"], result["error_type"]) == ("failed", 499, "cancelled")
    assert deployment.result_ttl_s(request_id) > 0


def hanging(deployment: Deployment, match: str) -> None:
    """Have the model take a minute over these."""
    assert deployment.model is not None
    deployment.model.behave(match=match, delay_s=60.0)


def check_not_billed(deployment: Deployment, request_id: str) -> None:
    assert deployment.croesus.event_for(request_id) is None
    (record,) = deployment.metric_server.records_for(request_id)
    assert (record["status"], record["status_code"], record["error_type"]) == ("failed", 499, "cancelled")
    assert record["completion_tokens"] is None


def test_a_running_request_frees_its_slot_and_the_model_within_the_interval(deployment: Deployment) -> None:
    worker = deployment.start_worker()
    hanging(deployment, "endless")
    request_id = deployment.publish(deployment.request("an endless story"))
    assert deployment.model is not None
    deployment.model.ledger.wait_for_calls("an endless story")
    began_at = time.monotonic()
    cancel_now(deployment, request_id)
    check_cancelled(deployment, request_id)
    deployment.serve_next()
    assert time.monotonic() - began_at < INTERVAL_S + 0.5
    deployment.model.ledger.wait_for_hang_up("an endless story")
    deployment.stop_empty(worker)
    check_not_billed(deployment, request_id)
    assert settlements(worker, request_id) == [("ack", "cancelled")]


def test_a_queued_request_is_not_begun(deployment: Deployment) -> None:
    deployment.declare_queue()
    request_id = deployment.publish(deployment.request("never begun"))
    cancel_now(deployment, request_id)
    worker = deployment.start_worker()
    check_cancelled(deployment, request_id)
    deployment.serve_next()
    assert deployment.calls("never begun") == 0
    deployment.stop_empty(worker)
    check_not_billed(deployment, request_id)


def test_one_of_many_is_cancelled_and_the_others_run_on(deployment: Deployment) -> None:
    worker = deployment.start_worker(RABBITMQ_PREFETCH=8)
    assert deployment.model is not None
    deployment.model.behave(match="story", delay_s=2.5)
    ids = [deployment.publish(deployment.request(f"story {number}")) for number in range(8)]
    for number in range(8):
        deployment.model.ledger.wait_for_calls(f"story {number}")
    cancel_now(deployment, ids[3])
    results: list[dict[str, Any]] = [deployment.wait_result(request_id) for request_id in ids]
    assert [result["status_code"] for result in results] == [200, 200, 200, 499, 200, 200, 200, 200]
    assert len(deployment.model.ledger.calls) == 8
    deployment.stop_empty(worker)


def test_those_who_follow_a_cancelled_stream_are_told(deployment: Deployment) -> None:
    worker = deployment.start_worker()
    assert deployment.model is not None
    deployment.model.behave(match="slowly", token_delay_s=0.5)
    request = deployment.request("tell it slowly, word by word by word by word by word")
    request["payload"]["stream"] = True
    request_id = deployment.publish(request)
    kinds = []
    with redis.Redis.from_url(deployment.redis_server.url) as results:
        for entry in follow(results, request_id, give_up_after_s=LONG_TIMEOUT_S):
            if not kinds:
                cancel(results, request_id)
            kinds.append(entry.kind)
    assert kinds[0] == "chunk"
    assert kinds[-1] == "failed"
    check_cancelled(deployment, request_id)
    deployment.serve_next()
    deployment.stop_empty(worker)
    check_not_billed(deployment, request_id)


def test_an_acl_without_the_right_to_cancel_stops_nothing(deployment: Deployment) -> None:
    client = deployment.redis_server.client()
    client.execute_command(
        "ACL", "SETUSER", "narrow", "on", ">secret", "+@all", "~infer_resp:*", "~infer_starts:*", "~infer_stream:*"
    )
    url = deployment.redis_server.url.replace("redis://", "redis://narrow:secret@")
    worker = deployment.start_worker(REDIS_URL=url)
    for _ in range(2):
        deployment.serve_next()
    deployment.stop_empty(worker)
    assert worker.log().count("infer_cancel:*") == 1
    client.execute_command("ACL", "DELUSER", "narrow")
