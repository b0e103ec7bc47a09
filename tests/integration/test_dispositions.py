"""Every row of the table of dispositions: the result and its TTL, the message's end, the model's calls, and life after.

With the prefetch of 1 that all of these have, the next request is only delivered once the one before it was settled.
"""

from __future__ import annotations

import json
from typing import Any

import pika
import pika.exceptions
import pytest

from devstack.proxy import TcpProxy
from devstack.rabbitmq import RabbitMq
from devstack.stack import DeadLetter
from devstack.worker_process import WorkerProcess

from .support import (
    COMPLETED_KEYS,
    FAILED_KEYS,
    TTL_S,
    Deployment,
    broker_setting,
    completed_text,
    hold_names,
    said,
    settlements,
    until,
    wait_hold,
    wait_record,
)

pytestmark = pytest.mark.integration

PROMPT = "What is a disposition?"
CLASSIC_AND_QUORUM = pytest.mark.parametrize("queue_type", ["classic", "quorum"])
ABORTED = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Cut o"}, "finish_reason": "abort"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
}


@pytest.fixture
def queue_type() -> str:
    """Classic, unless a test is parametrised."""
    return "classic"


@pytest.fixture
def worker(deployment: Deployment, queue_type: str) -> WorkerProcess:
    return deployment.start_worker(RABBITMQ_QUEUE_TYPE=queue_type)


def check_ttl(deployment: Deployment, request_id: str) -> None:
    assert TTL_S - 100 < deployment.result_ttl_s(request_id) <= TTL_S


def check_failed(
    deployment: Deployment, request_id: str, *, status_code: int, error_type: str, model_error: object = None
) -> dict[str, Any]:
    """Wait for a failed result and check all of it but the sentence; return it."""
    result = deployment.wait_result(request_id)
    assert set(result) == FAILED_KEYS | ({"model_error"} if model_error is not None else set())
    assert (result["status"], result["status_code"], result["error_type"]) == ("failed", status_code, error_type)
    assert isinstance(result["error"], str)
    assert result["error"]
    assert result.get("model_error") == model_error
    check_ttl(deployment, request_id)
    return result


def check_completed(deployment: Deployment, request_id: str, prompt: str = PROMPT) -> None:
    """Wait for a completed result and check all of it."""
    result = deployment.wait_result(request_id)
    assert set(result) == COMPLETED_KEYS
    assert result["status_code"] == 200
    assert completed_text(result) == said(prompt)
    check_ttl(deployment, request_id)


def check_dead_letter(
    deployment: Deployment, body: bytes, *, retry_count: int | None = None, number: int = 1
) -> DeadLetter:
    """Wait for the nth dead letter, the last one so far: the same bytes, rejected by the worker."""
    letters = deployment.wait_dead_letters(number)
    assert len(letters) == number
    letter = letters[-1]
    assert letter.body == body
    (death,) = letter.headers["x-death"]
    assert (death["reason"], death["queue"], death["count"]) == ("rejected", deployment.queue, 1)
    assert letter.headers.get("x-retry-count") == retry_count
    return letter


def check_gone(deployment: Deployment, worker: WorkerProcess, *, calls: int, prompt: str = PROMPT) -> None:
    """The next request is served; the message is in no queue; nobody called the model more often than that."""
    deployment.serve_next()
    assert deployment.calls(prompt) == calls
    deployment.stop_empty(worker)
    assert deployment.dead_letters() == []


def check_buried(deployment: Deployment, worker: WorkerProcess, *, calls: int, prompt: str = PROMPT) -> None:
    """As `check_gone`, after the dead letter was looked at: there is no second one."""
    deployment.serve_next()
    assert deployment.calls(prompt) == calls
    deployment.stop_empty(worker)
    assert len(deployment.dead_letters()) == 1


# -- 2xx, a JSON object -----------------------------------------------------------------------------------------------


@CLASSIC_AND_QUORUM
def test_an_answer_is_completed_and_acked(deployment: Deployment, worker: WorkerProcess) -> None:
    request_id = deployment.publish(deployment.request(PROMPT))
    check_completed(deployment, request_id)
    check_gone(deployment, worker, calls=1)


def test_a_completed_result_has_the_models_status_and_its_body_byte_for_byte(
    deployment: Deployment, worker: WorkerProcess
) -> None:
    body = '{ "choices":[ ],  "pi": 3.14000, "big": 12345678901234567890, "e": "\\u00e9 é \\ud83d", "a":1, "a":2 }'
    deployment.model.behave(status=201, body=body, match=PROMPT)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.wait_result(request_id)
    expected = b'{"status":"completed","status_code":201,"result":' + body.encode() + b"}"
    assert deployment.result_bytes(request_id) == expected
    check_ttl(deployment, request_id)
    check_gone(deployment, worker, calls=1)


# -- no valid request -------------------------------------------------------------------------------------------------


@CLASSIC_AND_QUORUM
def test_a_malformed_request_with_an_id_is_a_400_and_a_dead_letter(
    deployment: Deployment, worker: WorkerProcess
) -> None:
    body = json.dumps(deployment.request(PROMPT, timeout_s="sixty")).encode()
    request_id = json.loads(body)["request_id"]
    deployment.publish(body)
    result = check_failed(deployment, request_id, status_code=400, error_type="malformed_request")
    assert "timeout_s" in result["error"]
    check_dead_letter(deployment, body)
    check_buried(deployment, worker, calls=0)


def test_a_malformed_request_without_an_id_is_a_dead_letter_and_nothing_is_written(
    deployment: Deployment, worker: WorkerProcess
) -> None:
    body = json.dumps(deployment.request(PROMPT, request_id=None)).encode()
    with deployment.redis_server.client() as client:
        keys_before = set(client.scan_iter("infer_resp:*"))
        deployment.publish(body)
        check_dead_letter(deployment, body)
        assert set(client.scan_iter("infer_resp:*")) <= keys_before
    check_buried(deployment, worker, calls=0)


# -- expired ----------------------------------------------------------------------------------------------------------


@CLASSIC_AND_QUORUM
def test_an_expired_request_is_a_408_and_acked_without_a_call(deployment: Deployment, worker: WorkerProcess) -> None:
    request_id = deployment.publish(deployment.request(PROMPT, age_s=61.0, timeout_s=60.0))
    check_failed(deployment, request_id, status_code=408, error_type="expired")
    check_gone(deployment, worker, calls=0)


# -- the model says no ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status_code", [400, 500])
def test_an_error_of_the_model_is_passed_on_and_acked(
    deployment: Deployment, worker: WorkerProcess, status_code: int
) -> None:
    model_error = {"error": {"message": "I would rather not.", "type": "Reluctance", "code": status_code}}
    deployment.model.behave(match=PROMPT, status=status_code, body=json.dumps(model_error))
    request_id = deployment.publish(deployment.request(PROMPT))
    result = check_failed(
        deployment, request_id, status_code=status_code, error_type="model_error", model_error=model_error
    )
    assert result["error"] == "I would rather not."
    check_gone(deployment, worker, calls=1)


def test_r51_no_status_of_the_model_is_tried_again(
    deployment: Deployment, worker: WorkerProcess, subtests: pytest.Subtests
) -> None:
    for status_code in (401, 403, 404, 408, 413, 422, 429, 501, 502, 503, 504):
        with subtests.test(status_code=status_code):
            prompt = f"{PROMPT} {status_code}"
            deployment.model.behave(match=prompt, status=status_code, body="{}")
            request_id = deployment.publish(deployment.request(prompt))
            check_failed(deployment, request_id, status_code=status_code, error_type="model_error", model_error={})
            deployment.serve_next()
            assert deployment.calls(prompt) == 1
    check_gone(deployment, worker, calls=0)


def test_an_error_of_the_model_that_is_no_json_has_no_model_error(
    deployment: Deployment, worker: WorkerProcess
) -> None:
    deployment.model.behave(match=PROMPT, status=502, body="<html>Bad Gateway</html>")
    request_id = deployment.publish(deployment.request(PROMPT))
    check_failed(deployment, request_id, status_code=502, error_type="model_error")
    check_gone(deployment, worker, calls=1)


# -- no answer: retried, then given up --------------------------------------------------------------------------------


FAILURES: dict[str, dict[str, Any]] = {
    "reset": {"fault": "reset"},
    "closed": {"fault": "drop"},
    "reset in the body": {"fault": "reset_body"},
    "cut off": {"fault": "cut_off"},
    "cut off in chunks": {"fault": "cut_off", "chunked": True},
    "cut off without a length": {
        "fault": "raw",
        "raw": 'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"choices":[{"mes',
    },
    "no HTTP": {"fault": "raw", "raw": "220 smtp.example.org ESMTP\r\n"},
    "not decompressible": {"headers": {"Content-Encoding": "gzip"}, "body": "this is no gzip"},
    "silent": {"delay_s": 30.0},
    "stalled in the body": {"fault": "stall", "stall_s": 30.0},
    "trickling": {"fault": "trickle", "trickle_s": 0.2},
    "aborted": {"body": json.dumps(ABORTED)},
    "told to come later": {"status": 503, "headers": {"Retry-After": "1"}, "body": "{}"},
}
#: so that the silent ones and the last one are failures, too
FAILURE_SETTINGS = {"MODEL_INFER_TIMEOUT_S": 0.7, "MODEL_RETRY_STATUS_CODES": "429,503"}


def test_a_call_without_an_answer_is_retried_by_a_copy(deployment: Deployment, subtests: pytest.Subtests) -> None:
    worker = deployment.start_worker(RABBITMQ_QUEUE_TYPE="classic", **FAILURE_SETTINGS)
    for name, behaviour in FAILURES.items():
        with subtests.test(name):
            prompt = f"{PROMPT} {name}"
            deployment.model.behave(match=prompt, times=1, **behaviour)
            deployment.model.end_connections()  # on a reused one, an end before the first byte is tried again for free
            request_id = deployment.publish(deployment.request(prompt))
            check_completed(deployment, request_id, prompt)
            deployment.serve_next()
            assert [what for what, _ in settlements(worker, request_id)] == ["republish", "ack"]
            lines = wait_record(worker, "request_settled", count=2, request_id=request_id)
            assert [line["retry_count"] for line in lines] == [0, 1]
            assert deployment.calls(prompt) == 2
    check_gone(deployment, worker, calls=0)


def test_a_call_without_an_answer_is_a_500_and_a_dead_letter_once_the_retries_are_used_up(
    deployment: Deployment, subtests: pytest.Subtests
) -> None:
    worker = deployment.start_worker(RABBITMQ_QUEUE_TYPE="classic", RABBITMQ_MAX_RETRIES=0, **FAILURE_SETTINGS)
    for count, (name, behaviour) in enumerate(FAILURES.items(), start=1):
        with subtests.test(name):
            prompt = f"{PROMPT} {name}"
            deployment.model.behave(match=prompt, **behaviour)
            deployment.model.end_connections()
            body = deployment.request(prompt)
            request_id = deployment.publish(body)
            check_failed(deployment, request_id, status_code=500, error_type="model_unavailable")
            check_dead_letter(deployment, json.dumps(body).encode(), number=count)
            deployment.serve_next()
            assert deployment.calls(prompt) == 1
    deployment.stop_empty(worker)
    assert len(deployment.dead_letters()) == len(FAILURES)


@pytest.mark.parametrize("fault", ["reset", "drop"])
def test_r38_a_kept_connection_that_ends_as_the_request_arrives_costs_no_retry(
    deployment: Deployment, worker: WorkerProcess, fault: str
) -> None:
    deployment.serve_next()  # so that there is a kept connection
    deployment.model.behave(match=PROMPT, times=1, fault=fault)
    request_id = deployment.publish(deployment.request(PROMPT))
    check_completed(deployment, request_id)
    deployment.serve_next()
    assert [what for what, _ in settlements(worker, request_id)] == ["ack"]
    check_gone(deployment, worker, calls=2)


@CLASSIC_AND_QUORUM
def test_retries_are_counted_in_the_copies_until_they_are_used_up(deployment: Deployment, queue_type: str) -> None:
    worker = deployment.start_worker(RABBITMQ_QUEUE_TYPE=queue_type, RABBITMQ_MAX_RETRIES=2)
    deployment.model.behave(match=PROMPT, fault="reset_body")
    body = deployment.request(PROMPT)
    request_id = deployment.publish(body)
    check_failed(deployment, request_id, status_code=500, error_type="model_unavailable")
    check_dead_letter(deployment, json.dumps(body).encode(), retry_count=2)
    check_buried(deployment, worker, calls=3)


def test_a_refused_connection_is_retried_once_the_model_is_back(deployment: Deployment, worker: WorkerProcess) -> None:
    deployment.model.behave_health(delay_s=0.0)
    deployment.model.behave(match=PROMPT, delay_s=30.0)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    deployment.model.refuse()
    wait_hold(worker, "model_unhealthy")
    until(lambda: deployment.queue_depth() == 1, "the copy waits in the queue")
    assert deployment.result_bytes(request_id) is None
    assert deployment.consumer_count() == 0
    deployment.model.forget_behaviours()
    deployment.model.start()
    check_completed(deployment, request_id)
    check_gone(deployment, worker, calls=2)


@CLASSIC_AND_QUORUM
def test_r24_the_copy_keeps_every_property_and_header_but_those_that_would_lie(
    deployment: Deployment, worker: WorkerProcess
) -> None:
    properties = pika.BasicProperties(
        content_type="application/json",
        content_encoding="utf-8",
        headers={"tenant": "acme", "weight": 7, "x-retry-count": "0", "x-death": [], "nested": {"list": [1, "two"]}},
        delivery_mode=1,
        priority=3,
        correlation_id="correlation-1",
        reply_to="answers",
        expiration="60000",
        message_id="message-1",
        timestamp=1_772_000_000,
        type="inference",
        app_id="proxy",
    )
    deployment.model.behave(match=PROMPT, fault="reset_body")
    deployment.model.behave_health(status=503)  # noticed at once, since a failed call asks for a probe
    body = json.dumps(deployment.request(PROMPT)).encode()
    deployment.publish(body, properties=properties)
    until(lambda: deployment.queue_depth() == 1 and hold_names(worker), "the copy waits in the queue")
    method, copy, copied_body = deployment.channel().basic_get(deployment.queue)
    assert method is not None
    assert copy is not None
    assert copied_body == body
    headers = {name: value for name, value in copy.headers.items() if name != "x-delivery-count"}
    assert headers == {"tenant": "acme", "weight": 7, "x-retry-count": 1, "nested": {"list": [1, "two"]}}
    assert isinstance(copy.headers["x-retry-count"], int)
    assert copy.delivery_mode == 2
    assert copy.expiration is None
    kept = ("content_type", "content_encoding", "priority", "correlation_id", "reply_to", "message_id", "timestamp")
    for name in (*kept, "type", "app_id"):
        assert getattr(copy, name) == getattr(properties, name), name
    deployment.channel().basic_ack(method.delivery_tag)
    deployment.model.forget_behaviours()
    deployment.serve_next()


# -- an answer that is none -------------------------------------------------------------------------------------------

NO_ANSWERS: dict[str, dict[str, Any]] = {
    "redirect": {"status": 302, "headers": {"Location": "http://127.0.0.1:9/"}, "body": "{}"},
    "not-modified": {"status": 304, "body": ""},
    "no-json": {"body": "<html>It works!</html>", "headers": {"Content-Type": "text/html"}},
    "empty": {"body": ""},
    "no-content": {"status": 204, "body": ""},
    "null": {"body": "null"},
    "list": {"body": "[]"},
    "text": {"body": '"ok"'},
    "nan": {"body": '{"choices":[],"score":NaN}'},
    "error-object": {"body": '{"error":{"message":"no"}}'},
    "error-of-old": {"body": '{"object":"error","message":"no","code":404}'},
    "20000-brackets": {"body": "[" * 20_000 + "]" * 20_000},
}


def test_a_complete_answer_that_is_none_is_a_502_and_acked(
    deployment: Deployment, worker: WorkerProcess, subtests: pytest.Subtests
) -> None:
    request_ids = []
    for name, behaviour in NO_ANSWERS.items():
        with subtests.test(name):
            prompt = f"{PROMPT} {name}"
            deployment.model.behave(match=prompt, **behaviour)
            request_ids.append(deployment.publish(deployment.request(prompt)))
            check_failed(deployment, request_ids[-1], status_code=502, error_type="invalid_model_answer")
            deployment.serve_next()
            assert deployment.calls(prompt) == 1
    check_gone(deployment, worker, calls=0)
    assert not [request_id for request_id in request_ids if deployment.croesus.event_for(request_id)]


@pytest.mark.parametrize(
    "behaviour", [{"fault": "gzip_bomb"}, {"body": json.dumps({"text": "x" * 100_000})}], ids=["gzip-bomb", "long"]
)
def test_an_answer_over_the_size_cap_is_a_502_and_acked(deployment: Deployment, behaviour: dict[str, Any]) -> None:
    worker = deployment.start_worker(RABBITMQ_QUEUE_TYPE="classic", MODEL_MAX_RESPONSE_BYTES=50_000)
    deployment.model.behave(match=PROMPT, **behaviour)
    request_id = deployment.publish(deployment.request(PROMPT))
    check_failed(deployment, request_id, status_code=502, error_type="invalid_model_answer")
    check_gone(deployment, worker, calls=1)


# -- the key is taken -------------------------------------------------------------------------------------------------

STORED = b'{"status":"completed","status_code":200,"result":{"by":"another worker"}}'


def store(deployment: Deployment, request_id: str, value: bytes) -> None:
    with deployment.redis_server.client() as client:
        client.set(f"infer_resp:{request_id}", value, ex=TTL_S)


@pytest.mark.parametrize(
    ("request_fields", "behaviour", "calls"),
    [
        ({}, {"status": 400}, 1),
        ({}, {"body": "null"}, 1),
        ({}, {"fault": "reset_body"}, 1),
        ({"age_s": 100.0}, {}, 0),
        ({"received_at": "now"}, {}, 0),
    ],
    ids=["model-error", "no-answer", "retries-used-up", "expired", "malformed"],
)
def test_no_failure_overwrites_a_completed_result(
    deployment: Deployment, request_fields: dict[str, Any], behaviour: dict[str, Any], calls: int
) -> None:
    worker = deployment.start_worker(RABBITMQ_QUEUE_TYPE="classic", RABBITMQ_MAX_RETRIES=0)
    deployment.model.behave(match=PROMPT, **behaviour)
    request = deployment.request(PROMPT, **request_fields)
    store(deployment, request["request_id"], STORED)
    deployment.publish(request)
    wait_record(worker, "request_settled", request_id=request["request_id"], disposition="ack")
    deployment.serve_next()
    assert deployment.result_bytes(request["request_id"]) == STORED
    check_gone(deployment, worker, calls=calls)


def test_an_answer_does_not_overwrite_a_completed_result(deployment: Deployment, worker: WorkerProcess) -> None:
    request = deployment.request(PROMPT)
    store(deployment, request["request_id"], STORED)
    deployment.publish(request)
    wait_record(worker, "request_settled", request_id=request["request_id"], disposition="ack")
    assert deployment.result_bytes(request["request_id"]) == STORED
    check_gone(deployment, worker, calls=1)


def test_an_answer_replaces_a_failed_result(deployment: Deployment, worker: WorkerProcess) -> None:
    request = deployment.request(PROMPT)
    store(deployment, request["request_id"], b'{"status":"failed","status_code":500,"error":"x","error_type":"y"}')
    deployment.publish(request)
    wait_record(worker, "request_settled", request_id=request["request_id"], disposition="ack")
    check_completed(deployment, request["request_id"])
    check_gone(deployment, worker, calls=1)


@CLASSIC_AND_QUORUM
def test_a_redelivery_that_finds_its_result_costs_no_call(deployment: Deployment, queue_type: str) -> None:
    worker = deployment.start_worker(RABBITMQ_QUEUE_TYPE=queue_type)
    worker.stop()
    request = deployment.request(PROMPT)
    store(deployment, request["request_id"], STORED)
    deployment.publish(request)
    deployment.hand_out_once()
    worker = deployment.start_worker(RABBITMQ_QUEUE_TYPE=queue_type)
    wait_record(worker, "request_settled", request_id=request["request_id"], disposition="ack")
    assert deployment.result_bytes(request["request_id"]) == STORED
    check_gone(deployment, worker, calls=0)


@CLASSIC_AND_QUORUM
def test_a_second_delivery_of_a_request_that_runs_here_waits_for_the_first_and_takes_its_outcome(
    deployment: Deployment, queue_type: str
) -> None:
    worker = deployment.start_worker(RABBITMQ_QUEUE_TYPE=queue_type, RABBITMQ_PREFETCH=2)
    deployment.model.behave(match=PROMPT, delay_s=1.0)
    request = deployment.request(PROMPT)
    for _ in range(2):
        deployment.publish(request)
    check_completed(deployment, request["request_id"])
    wait_record(worker, "request_settled", count=2, request_id=request["request_id"], disposition="ack")
    check_gone(deployment, worker, calls=1)
    assert len(deployment.croesus.events) == 2  # this one's, and that of the next request


# -- Redis is down ----------------------------------------------------------------------------------------------------


@CLASSIC_AND_QUORUM
def test_without_redis_a_first_delivery_goes_back_once_and_its_answer_is_kept(
    deployment: Deployment, redis_proxy: TcpProxy, queue_type: str
) -> None:
    url = f"redis://127.0.0.1:{redis_proxy.port}"
    worker = deployment.start_worker(REDIS_URL=url, RABBITMQ_QUEUE_TYPE=queue_type)
    deployment.model.behave(match=PROMPT, delay_s=1.0)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    redis_proxy.refuse()
    wait_hold(worker, "result_store_down")
    until(lambda: deployment.queue_depth() == 1, "the message is back in the queue")
    assert deployment.consumer_count() == 0
    wait_record(worker, "request_settled", request_id=request_id)
    redis_proxy.start()
    check_completed(deployment, request_id)
    deployment.serve_next()
    assert [what for what, _ in settlements(worker, request_id)] == ["requeue", "ack"]
    check_gone(deployment, worker, calls=1)


@CLASSIC_AND_QUORUM
def test_without_redis_a_redelivery_stays_in_its_slot_until_redis_is_back(
    deployment: Deployment, redis_proxy: TcpProxy, queue_type: str
) -> None:
    url = f"redis://127.0.0.1:{redis_proxy.port}"
    deployment.start_worker(REDIS_URL=url, RABBITMQ_QUEUE_TYPE=queue_type).stop()
    deployment.model.behave(match=PROMPT, delay_s=1.0)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.hand_out_once()
    worker = deployment.start_worker(REDIS_URL=url, RABBITMQ_QUEUE_TYPE=queue_type)
    deployment.model.ledger.wait_for_calls(PROMPT)
    redis_proxy.refuse()
    wait_hold(worker, "result_store_down")
    wait_record(worker, "consuming_suspended")
    assert deployment.queue_depth() == 0
    assert settlements(worker, request_id) == []
    redis_proxy.start()
    check_completed(deployment, request_id)
    deployment.serve_next()
    assert [what for what, _ in settlements(worker, request_id)] == ["ack"]
    check_gone(deployment, worker, calls=1)


def test_a_redelivery_that_waits_for_redis_goes_back_when_we_stop(
    deployment: Deployment, redis_proxy: TcpProxy
) -> None:
    url = f"redis://127.0.0.1:{redis_proxy.port}"
    deployment.start_worker(REDIS_URL=url).stop()
    deployment.model.behave(match=PROMPT, delay_s=1.0)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.hand_out_once()
    worker = deployment.start_worker(REDIS_URL=url)
    deployment.model.ledger.wait_for_calls(PROMPT)
    redis_proxy.refuse()
    wait_hold(worker, "result_store_down")
    assert worker.stop() == 0
    assert deployment.queue_depth() == 1
    assert deployment.result_bytes(request_id) is None
    assert deployment.dead_letters() == []


# -- the copy is refused ----------------------------------------------------------------------------------------------


def test_a_copy_that_the_broker_refuses_for_good_is_a_500_and_a_dead_letter(
    deployment: Deployment, queue_type: str, rabbitmq: RabbitMq
) -> None:
    deployment.model.behave(match=PROMPT, times=1, fault="reset_body")
    body = deployment.request(PROMPT, padding="x" * 5000)
    deployment.declare_queue(**{"x-queue-type": queue_type})
    deployment.publish(body)
    # RabbitMQ 3 looks at the first at every message, RabbitMQ 4 at the second, which it sets when it boots
    limit = "application:set_env(rabbit, max_message_size, {0}), persistent_term:put(max_message_size, {0})."
    before = rabbitmq.ctl("eval", "application:get_env(rabbit, max_message_size).")
    limit_before = before.strip().removeprefix("{ok,").removesuffix("}")
    with broker_setting(rabbitmq, on=["eval", limit.format(4000)], off=["eval", limit.format(limit_before)]):
        worker = deployment.start_worker(RABBITMQ_QUEUE_TYPE=queue_type)
        check_failed(deployment, body["request_id"], status_code=500, error_type="model_unavailable")
        check_dead_letter(deployment, json.dumps(body).encode())
    check_buried(deployment, worker, calls=1)


def test_a_copy_without_a_confirm_is_tried_again_under_a_hold_and_then_the_original_goes_back(
    deployment: Deployment, worker: WorkerProcess, rabbitmq: RabbitMq
) -> None:
    policy, pattern = f"full-{deployment.deployment_id}", f"^{deployment.queue}$"
    full = json.dumps({"max-length": 1, "overflow": "reject-publish"})
    deployment.model.behave(match=PROMPT, times=1, delay_s=4.0, fault="reset_body")
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    with broker_setting(
        rabbitmq,
        on=["set_policy", "--apply-to", "queues", policy, pattern, full],
        off=["clear_policy", policy],
    ):
        deployment.model.behave_health(status=503)  # so that nothing is taken out of the queue meanwhile
        until(lambda: deployment.consumer_count() == 0, "no consumer")
        waiting_ids = fill(deployment)
        wait_hold(worker, "publish_refused")
        assert deployment.queue_depth() == len(waiting_ids)  # the original is still unacked, and there is no copy
        (line,) = wait_record(worker, "request_settled", request_id=request_id)
        assert (line["disposition"], line["reason"]) == ("requeue", "publish_refused")
        assert deployment.result_bytes(request_id) is None
    deployment.model.forget_behaviours()
    for waiting_id in waiting_ids:
        check_completed(deployment, waiting_id, FILLER)
    check_completed(deployment, request_id)
    check_gone(deployment, worker, calls=2)


FILLER = "I fill the queue."


def fill(deployment: Deployment) -> list[str]:
    """Publish until the queue takes no more; return the request_ids of what it took."""
    taken: list[str] = []
    while len(taken) < 10:
        try:
            taken.append(deployment.publish(deployment.request(FILLER)))
        except pika.exceptions.NackError:
            return taken
    raise AssertionError("the queue is never full")
