"""Messages with header values that pika reads wrongly, on a real broker: served, and sent on as they came."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from inference_worker.amqp_headers import Timestamp, decode_value

from .support import Deployment, records, said

pytestmark = pytest.mark.integration


def lists_in_lists(depth: int) -> Any:
    """Make what pika alone can neither read nor send: lists so deep in each other."""
    value = b"I\x00\x00\x00\x07"
    for _ in range(depth):
        value = b"A" + struct.pack(">I", len(value)) + value
    return decode_value(value, 0)[0]


HEADERS = {
    "milliseconds": Timestamp(1_772_000_000_000),
    "negative": Timestamp(18_446_744_073_695_295_616),
    "score": 3.5,
    "list": [0.25, {"deep": 1e300}],
    "deep": lists_in_lists(1000),
}


def test_r29_r30_a_message_with_odd_headers_is_served_and_its_retry_copy_keeps_them(deployment: Deployment) -> None:
    worker = deployment.start_worker()
    assert deployment.model is not None
    deployment.model.behave(match="odd", times=1, fault="reset_body")
    request_id = deployment.publish(deployment.request("odd headers"), headers=HEADERS)
    result = deployment.wait_result(request_id)
    assert result["result"]["choices"][0]["message"]["content"] == said("odd headers")
    assert deployment.calls("odd headers") == 2
    assert len(records(worker, "connected")) == 1
    deployment.stop_empty(worker)


def test_r29_r30_a_dead_letter_keeps_odd_headers(deployment: Deployment) -> None:
    worker = deployment.start_worker(RABBITMQ_MAX_RETRIES=1)
    assert deployment.model is not None
    deployment.model.behave(match="never", fault="reset_body")
    deployment.publish(deployment.request("never answered"), headers=HEADERS)
    (dead,) = deployment.wait_dead_letters(1)
    assert {name: dead.headers[name] for name in HEADERS} == HEADERS
    assert dead.headers["x-retry-count"] == 1
    deployment.stop_empty(worker)
