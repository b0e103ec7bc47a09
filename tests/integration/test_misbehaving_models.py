"""Whatever a model server does: the slot is free within the bound, the result is the right one, the next is served."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from .support import NEXT_PROMPT, Deployment

pytestmark = pytest.mark.integration

BOUND_S = 2.0
#: what one more request, a probe after a failure, and a busy machine take beside the bound and its second
SLACK_S = 1.0

UNAVAILABLE, INVALID = (500, "model_unavailable"), (502, "invalid_model_answer")
SSE = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n'


@dataclass(frozen=True)
class Misdeed:
    """What a model server does, and what the result must be."""

    name: str
    expected: tuple[int, str]
    behaviour: dict[str, Any] = field(default_factory=dict)
    #: the attempt fails only when its time is over
    takes_the_bound: bool = False


def raw(head: str, body: bytes) -> dict[str, Any]:
    return {"fault": "raw", "raw": (f"HTTP/1.1 {head}\r\n\r\n").encode().decode("latin-1") + body.decode("latin-1")}


def whole(body: bytes, *, kind: str = "application/json") -> dict[str, Any]:
    return raw(f"200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}", body)


MISDEEDS = [
    Misdeed("no headers", UNAVAILABLE, {"delay_s": 60.0}, takes_the_bound=True),
    Misdeed("a stall in the body", UNAVAILABLE, {"fault": "stall", "stall_s": 60.0}, takes_the_bound=True),
    Misdeed("one byte every 0.7 s", UNAVAILABLE, {"fault": "trickle", "trickle_s": 0.7}, takes_the_bound=True),
    Misdeed("a body of 2 GiB", INVALID, {"fault": "endless", "bomb_bytes": 2**31}),
    Misdeed("2 GiB in chunks", INVALID, {"fault": "endless", "bomb_bytes": 2**31, "chunked": True}),
    Misdeed("a gzip bomb", INVALID, {"fault": "gzip_bomb"}),
    Misdeed("a cut chunk", UNAVAILABLE, {"fault": "cut_off", "chunked": True}),
    Misdeed("a body shorter than its length", UNAVAILABLE, {"fault": "cut_off"}),
    Misdeed("a body longer than its length", INVALID, raw("200 OK\r\nContent-Length: 5", b'{"a": 1, "b": 2}')),
    Misdeed("302", INVALID, {"status": 302, "headers": {"Location": "/v1/elsewhere"}}),
    Misdeed("204", INVALID, raw("204 No Content", b"")),
    Misdeed("HTML", INVALID, whole(b"<html><body>Welcome</body></html>", kind="text/html")),
    Misdeed("null", INVALID, whole(b"null")),
    Misdeed("NaN", INVALID, whole(b'{"choices": [], "score": NaN}')),
    Misdeed("0xFF", INVALID, whole(b'{"choices": ["\xff"]}')),
    Misdeed("100,000 brackets", INVALID, whole(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")),
    Misdeed("a stream that nobody asked for", INVALID, whole(SSE, kind="text/event-stream")),
]


def test_no_misdeed_of_a_model_holds_a_slot_or_becomes_a_wrong_answer(
    deployment: Deployment, subtests: pytest.Subtests
) -> None:
    worker = deployment.start_worker(
        MODEL_INFER_TIMEOUT_S=BOUND_S, RABBITMQ_MAX_RETRIES=0, MODEL_MAX_RESPONSE_BYTES=16 * 2**20
    )
    for misdeed in MISDEEDS:
        with subtests.test(misdeed.name):
            prompt = f"Do this: {misdeed.name}."
            deployment.model.behave(match=prompt, **misdeed.behaviour)
            began_at = time.monotonic()
            request_id = deployment.publish(deployment.request(prompt))
            result = deployment.wait_result(request_id)
            assert (result["status_code"], result["error_type"]) == misdeed.expected
            next_id = deployment.publish(deployment.request(NEXT_PROMPT))
            assert deployment.wait_result(next_id)["status"] == "completed"
            limit_s = (BOUND_S if misdeed.takes_the_bound else 0.0) + 1.0 + SLACK_S
            assert time.monotonic() - began_at < limit_s
            assert deployment.calls(prompt) == 1
    deployment.stop_empty(worker)


def test_half_a_surrogate_pair_is_legal_and_stored_as_it_came(deployment: Deployment) -> None:
    """The grammar of JSON allows it, so a completed result may hold it (field report R45)."""
    worker = deployment.start_worker()
    body = b'{"choices": ["\\ud83d"], "n": 1.0}'
    deployment.model.behave(match="half", **whole(body))
    request_id = deployment.publish(deployment.request("half a pair"))
    deployment.wait_result(request_id)
    assert deployment.result_bytes(request_id) == b'{"status":"completed","status_code":200,"result":' + body + b"}"
    deployment.serve_next()
    deployment.stop_empty(worker)
