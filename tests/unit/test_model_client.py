"""What an exchange with the model server means, over a real socket: rows of design section 5 as outcomes."""

from __future__ import annotations

import gzip
import re
import threading
from collections.abc import Callable, Iterator

import pytest
from fakes_http import Do, HttpServer, Step, answer
from timeouts import LONG_TIMEOUT_S, SHORT_TIMEOUT_S

from inference_worker.deadlines import Bounded, Deadlines
from inference_worker.disposition import (
    Answered,
    Cancelled,
    Expired,
    Interrupted,
    InvalidAnswer,
    ModelError,
    Unavailable,
)
from inference_worker.http_client import HttpClient
from inference_worker.messages import InferenceRequest
from inference_worker.model_answer import Timings, Usage
from inference_worker.model_client import ModelClient, ModelReply, ModelSettings, Sign

Capture = Callable[[str], bytes]
Infer = Callable[..., ModelReply]

MAX_BYTES = 100_000


@pytest.fixture
def server() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.stop()


def _client(
    deadlines: Deadlines, url: str, *, timeout_s: float = LONG_TIMEOUT_S, api_key: str = "", retry: frozenset[int]
) -> ModelClient:
    settings = ModelSettings(
        infer_url=url + "/v1/chat/completions",
        timeout_s=timeout_s,
        max_response_bytes=MAX_BYTES,
        api_key=api_key,
        retry_status_codes=retry,
        ttft_header="x-ttft-ms",
        tbt_header="x-time-per-token",
    )
    return ModelClient(settings, HttpClient(deadlines, Bounded.MODEL_CALL, max_response_bytes=MAX_BYTES))


@pytest.fixture
def infer(server: HttpServer, deadlines: Deadlines) -> Infer:
    """Return a caller of the model that answers as it is told."""

    def call(
        *steps: Step,
        request_id: str = "r-1",
        payload: bytes = b'{"model": "m"}',
        timeout_s: float = LONG_TIMEOUT_S,
        api_key: str = "",
        retry: frozenset[int] = frozenset(),
        trace: dict[str, str] | None = None,
    ) -> ModelReply:
        if steps:
            server.reply(*steps)
        client = _client(deadlines, server.url, timeout_s=timeout_s, api_key=api_key, retry=retry)
        return client.infer(InferenceRequest(request_id, 1.0, 60.0, payload), trace=trace or {})

    return call


# -- what goes out ----------------------------------------------------------------------------------------------------


def test_payload_goes_out_byte_for_byte_as_json(infer: Infer, server: HttpServer) -> None:
    payload = b'{ "temperature" : 1.0, "request_id":"theirs", "x":"\\ud83d", "n":1e999 }'
    infer(answer(b"{}"), payload=payload)
    (request,) = server.requests
    assert (request.method, request.target, request.body) == ("POST", "/v1/chat/completions", payload)
    assert request.headers["content-type"] == "application/json"


def test_r77_no_authorization_without_a_key(infer: Infer, server: HttpServer) -> None:
    infer(answer(b"{}"))
    assert "authorization" not in server.requests[0].headers


def test_key_is_sent_as_a_bearer_token(infer: Infer, server: HttpServer) -> None:
    infer(answer(b"{}"), api_key="k-1")
    assert server.requests[0].headers["authorization"] == "Bearer k-1"


def test_trace_context_goes_along(infer: Infer, server: HttpServer) -> None:
    infer(answer(b"{}"), trace={"traceparent": "00-a-b-01", "tracestate": "x=1"})
    headers = server.requests[0].headers
    assert (headers["traceparent"], headers["tracestate"]) == ("00-a-b-01", "x=1")


def test_r49_every_attempt_has_an_id_of_its_own(infer: Infer, server: HttpServer) -> None:
    for _ in range(3):
        infer(answer(b"{}"))
    ids = [request.headers["x-request-id"] for request in server.requests]
    assert all(re.fullmatch(r"r-1-[0-9a-f]{8}", attempt_id) for attempt_id in ids)
    assert len(set(ids)) == 3


@pytest.mark.parametrize(
    ("request_id", "sent"),
    [("ü", "%C3%BC"), ("请/求", "%E8%AF%B7/%E6%B1%82"), ("a%20b", "a%20b"), ("x" * 255, "x" * 255), ("😀" * 255, None)],
)
def test_id_that_is_not_plain_ascii_is_percent_encoded(
    infer: Infer, server: HttpServer, request_id: str, sent: str | None
) -> None:
    infer(answer(b"{}"), request_id=request_id)
    assert server.requests[0].headers["x-request-id"][:-9] == (sent or "%F0%9F%98%80" * 255)


# -- answers ----------------------------------------------------------------------------------------------------------


def test_captured_completion_is_answered_byte_for_byte(infer: Infer, capture: Capture) -> None:
    body = capture("vllm-chat-completion.json")
    reply = infer(answer(body, headers={"Content-Type": "application/json"}))
    assert reply.sign is Sign.WELL
    assert isinstance(reply.outcome, Answered)
    assert (reply.outcome.status_code, reply.outcome.body, reply.outcome.usage) == (200, body, Usage(4, 16))


def test_any_2xx_keeps_its_status_code(infer: Infer) -> None:
    reply = infer(answer(b"{}", status="202 Accepted"))
    assert isinstance(reply.outcome, Answered)
    assert reply.outcome.status_code == 202


@pytest.mark.parametrize("body", [b'{"choices":[]}', b'{"choices":null}', rb'{"choices":[{"text":"\ud83d"}]}'])
def test_r43_r45_strange_but_legal_objects_are_answers_without_usage(infer: Infer, body: bytes) -> None:
    assert infer(answer(body)).outcome == Answered(200, body, None, Timings())


def test_timings_come_from_the_headers_before_the_body(infer: Infer) -> None:
    body = b'{"metrics":{"queue_time_ms":1,"time_to_first_token_ms":1,"mean_itl_ms":8}}'
    outcome = infer(answer(body, headers={"X-TTFT-MS": "250"})).outcome
    assert isinstance(outcome, Answered)
    assert outcome.timings == Timings(0.25, 0.008)
    outcome = infer(answer(body, headers={"X-Time-Per-Token": "4", "X-TTFT-ms": "soon"})).outcome
    assert isinstance(outcome, Answered)
    assert outcome.timings == Timings(0.002, 0.004)


def test_answer_compressed_by_a_proxy_is_kept_decompressed(infer: Infer) -> None:
    reply = infer(answer(gzip.compress(b'{"a":1}'), headers={"Content-Encoding": "gzip"}))
    assert isinstance(reply.outcome, Answered)
    assert reply.outcome.body == b'{"a":1}'


# -- answers that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        answer(b'{"object":"error","message":"x","code":404}'),
        answer(b'{"error":{"message":"x"}}'),
        answer(b"null"),
        answer(b"[]"),
        answer(b'"ok"'),
        answer(b""),
        answer(b"<html></html>", headers={"Content-Type": "text/html"}),
        answer(b"<html></html>", length=False),
        answer(b'data: {"choices":[]}\n\ndata: [DONE]\n\n', headers={"Content-Type": "text/event-stream"}),
        answer(b'{"choices":[{"mess'),
        answer(b'{"a":NaN}'),
        answer(b"[" * 20_000 + b"]" * 20_000),
        answer(b'{"a":"\xff"}'),
        answer(b"x" * (MAX_BYTES + 1)),
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n",
        answer(b"{}", status="302 Found", headers={"Location": "http://127.0.0.1:1/login"}),
        answer(b"{}", status="307 Temporary Redirect", headers={"Location": "/v1/v1"}),
        answer(b"", status="304 Not Modified"),
        answer(b"{}", status="600 What"),
    ],
)
def test_r42_r43_r44_r46_whole_answer_that_is_none_is_invalid_and_asked_for_once(
    infer: Infer, server: HttpServer, said: bytes
) -> None:
    reply = infer(said, Do.CLOSE)
    assert isinstance(reply.outcome, InvalidAnswer)
    assert reply.sign is Sign.WELL
    assert len(server.requests) == 1


def test_error_in_a_2xx_is_told_in_the_models_words(infer: Infer) -> None:
    outcome = infer(answer(b'{"error":{"message":"out of memory"}}')).outcome
    assert isinstance(outcome, InvalidAnswer)
    assert "out of memory" in outcome.error


def test_captured_abort_is_the_model_going_away_and_no_answer(infer: Infer, capture: Capture) -> None:
    reply = infer(answer(capture("vllm-aborted-200.json")))
    assert isinstance(reply.outcome, Unavailable)
    assert reply.sign is Sign.LEAVING


# -- errors of the model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "sign"),
    [
        ("vllm-error-400-context.json", 400, Sign.WELL),
        ("vllm-error-404-model.json", 404, Sign.WELL),
        ("vllm-error-503-busy.json", 503, Sign.SUSPECT),
    ],
)
def test_captured_errors_are_the_models_word_and_body(
    infer: Infer, capture: Capture, name: str, status: int, sign: Sign
) -> None:
    body = capture(name)
    reply = infer(answer(body, status=f"{status} x"))
    assert isinstance(reply.outcome, ModelError)
    assert (reply.outcome.status_code, reply.outcome.model_error, reply.sign) == (status, body.strip(), sign)
    assert reply.outcome.error.encode() in body


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429, 499])
def test_r51_permanent_error_is_asked_for_once(infer: Infer, server: HttpServer, status: int) -> None:
    reply = infer(answer(b'{"error":{"message":"no"}}', status=f"{status} x"))
    assert reply.outcome == ModelError(status, "no", b'{"error":{"message":"no"}}')
    assert reply.sign is Sign.WELL
    assert len(server.requests) == 1


@pytest.mark.parametrize("body", [b"", b"<html>Bad Gateway</html>", b'{"a":"\xff"}', b'{"a":NaN}', b'{"error":{"mess'])
def test_errors_body_that_is_no_json_is_left_out(infer: Infer, body: bytes) -> None:
    outcome = infer(answer(body, status="502 x")).outcome
    assert isinstance(outcome, ModelError)
    assert (outcome.model_error, outcome.status_code) == (None, 502)
    assert "502" in outcome.error


def test_errors_body_is_kept_without_white_space_around_it(infer: Infer) -> None:
    outcome = infer(answer(b' \r\n{"detail": "Not Found"}\n', status="404 x")).outcome
    assert outcome == ModelError(404, "Not Found", b'{"detail": "Not Found"}')


@pytest.mark.parametrize("status", [500, 502, 503, 504, 599])
def test_5xx_makes_the_model_suspect(infer: Infer, status: int) -> None:
    assert infer(answer(b"{}", status=f"{status} x")).sign is Sign.SUSPECT


_RETRY_AFTER = [("120", 120.0), ("0", 0.0), ("-1", None), ("abc", None), ("1e9", None), ("", None), ("1.5", None)]


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("value", "seconds"),
    [*_RETRY_AFTER, ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("9" * 400, None), ("٣", None), (None, None)],
)
def test_r50_status_that_is_retried_is_busy_and_names_its_pause(
    infer: Infer, status: int, value: str | None, seconds: float | None
) -> None:
    headers = {} if value is None else {"Retry-After": value.encode().decode("latin-1")}
    reply = infer(answer(b"{}", status=f"{status} x", headers=headers), retry=frozenset({429, 503}))
    assert isinstance(reply.outcome, Unavailable)
    assert (reply.sign, reply.retry_after_s) == (Sign.BUSY, seconds)


def test_r50_status_that_is_not_retried_is_an_error_whatever_its_pause(infer: Infer, server: HttpServer) -> None:
    reply = infer(answer(b"{}", status="429 x", headers={"Retry-After": "120"}))
    assert isinstance(reply.outcome, ModelError)
    assert len(server.requests) == 1


# -- no whole answer --------------------------------------------------------------------------------------------------


def test_refused_connection_is_unreachable(deadlines: Deadlines, closed_port: int) -> None:
    client = _client(deadlines, f"http://127.0.0.1:{closed_port}", retry=frozenset())
    reply = client.infer(InferenceRequest("r", 1.0, 60.0, b"{}"), trace={})
    assert isinstance(reply.outcome, Unavailable)
    assert reply.sign is Sign.UNREACHABLE


@pytest.mark.parametrize("how", [Do.CLOSE, Do.RESET])
def test_r38_connection_closed_before_the_answer_is_unreachable(infer: Infer, server: HttpServer, how: Do) -> None:
    reply = infer(how)
    assert isinstance(reply.outcome, Unavailable)
    assert reply.sign is Sign.UNREACHABLE
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n" + b'{"choices":[{}',
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
        b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"choices":[{"mes',
        b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"choices":[{"message":{"content":"\xe8\xaf',
        b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"usage":{"prompt_tokens":1.',
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        answer(b"no gzip", headers={"Content-Encoding": "gzip"}),
    ],
    ids=[
        "shorter than its length",
        "no last chunk",
        "JSON stops short",
        "a letter stops short",
        "a number stops short",
        "nothing came",
        "half a head",
        "not decompressible",
    ],
)
def test_r41_answer_cut_off_is_a_failed_attempt_and_never_completed(infer: Infer, said: bytes) -> None:
    reply = infer(said, Do.CLOSE)
    assert isinstance(reply.outcome, Unavailable)
    assert reply.sign is Sign.SUSPECT


@pytest.mark.parametrize(
    "steps",
    [
        (Do.STALL,),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", Do.STALL),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{", Do.TRICKLE),
        (b"HTTP/1.1 200 OK\r\n\r\n{", Do.TRICKLE),
    ],
    ids=["before the headers", "in the body", "trickling", "trickling without length"],
)
def test_r40_r53_timeouts_end_alike_and_close_the_socket(
    infer: Infer, server: HttpServer, steps: tuple[Step, ...]
) -> None:
    reply = infer(*steps, timeout_s=SHORT_TIMEOUT_S)
    assert isinstance(reply.outcome, Unavailable)
    assert reply.sign is Sign.SUSPECT
    server.wait_for(lambda it: it.ended_count == 1)


@pytest.mark.parametrize(
    "steps",
    [
        (Do.STALL,),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", Do.STALL),
        (b"HTTP/1.1 200 OK\r\n\r\n{", Do.STALL),
    ],
    ids=["before the headers", "in the body", "in a body without length"],
)
def test_call_that_we_cut_off_says_nothing_of_the_model(
    infer: Infer, server: HttpServer, deadlines: Deadlines, steps: tuple[Step, ...]
) -> None:
    def cut() -> None:
        server.wait_for(lambda it: it.stalled_count == 1)
        deadlines.end(Bounded.MODEL_CALL)

    cutter = threading.Thread(target=cut)
    cutter.start()
    reply = infer(*steps)
    cutter.join(LONG_TIMEOUT_S)
    assert (reply.outcome, reply.sign) == (Interrupted("cut_off"), Sign.NONE)


def test_call_that_its_producer_cancelled_says_nothing_of_the_model(
    infer: Infer, server: HttpServer, deadlines: Deadlines
) -> None:
    def cancel() -> None:
        server.wait_for(lambda it: it.stalled_count == 1)
        (name,) = deadlines.running_names()
        deadlines.cancel({name})

    canceller = threading.Thread(target=cancel)
    canceller.start()
    reply = infer(Do.STALL)
    canceller.join(LONG_TIMEOUT_S)
    assert (reply.outcome, reply.sign) == (Cancelled(), Sign.NONE)


# -- the request's own deadline ---------------------------------------------------------------------------------------


def _infer_within(server: HttpServer, deadlines: Deadlines, *, timeout_s: float, time_left_s: float) -> ModelReply:
    server.reply(Do.STALL)
    client = _client(deadlines, server.url, timeout_s=timeout_s, retry=frozenset())
    request = InferenceRequest("r-1", 1.0, 4.0, b"{}")
    return client.infer(request, trace={}, time_left_s=time_left_s)


def test_r53_a_respected_deadline_that_runs_out_is_an_expired_request_and_no_sign_of_ill_health(
    server: HttpServer, deadlines: Deadlines
) -> None:
    reply = _infer_within(server, deadlines, timeout_s=LONG_TIMEOUT_S, time_left_s=SHORT_TIMEOUT_S)
    assert reply.outcome == Expired(4.0, 4.0)
    assert reply.sign is Sign.NONE


def test_r53_a_deadline_after_the_models_own_bound_changes_nothing(server: HttpServer, deadlines: Deadlines) -> None:
    reply = _infer_within(server, deadlines, timeout_s=SHORT_TIMEOUT_S, time_left_s=LONG_TIMEOUT_S)
    assert isinstance(reply.outcome, Unavailable)
    assert reply.sign is Sign.SUSPECT
