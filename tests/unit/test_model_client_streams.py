"""A streamed call: what goes out, what reaches the sink, and what outcome each end of a stream is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from fakes_http import Do, HttpServer, Step, answer

from inference_worker.deadlines import Bounded, Deadlines
from inference_worker.disposition import Answered, InvalidAnswer, ModelError, Unavailable
from inference_worker.http_client import HttpClient
from inference_worker.messages import InferenceRequest
from inference_worker.model_answer import Usage
from inference_worker.model_client import ModelClient, ModelReply, ModelSettings, Sign
from tests.timeouts import LONG_TIMEOUT_S, SHORT_TIMEOUT_S

MAX_BYTES = 100_000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"

Stream = Callable[..., ModelReply]


class RecordingSink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.attempt = "0a1b2c3d"
        self.chunks: list[bytes] = []

    def append(self, chunk: bytes) -> None:
        self.chunks.append(chunk)


def piece(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str = "", finish: str | None = None, **more: object) -> bytes:
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5})


@pytest.fixture
def server() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.stop()


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture
def stream(server: HttpServer, deadlines: Deadlines, sink: RecordingSink) -> Stream:
    """Return a caller of the model, which streams as it is told."""

    def call(
        *steps: Step,
        timeout_s: float = LONG_TIMEOUT_S,
        payload: bytes = b'{"stream":true}',
        retry_status_codes: frozenset[int] = frozenset(),
    ) -> ModelReply:
        server.reply(*steps)
        settings = ModelSettings(
            infer_url=server.url + "/v1/chat/completions",
            timeout_s=timeout_s,
            max_response_bytes=MAX_BYTES,
            api_key="",
            retry_status_codes=retry_status_codes,
            ttft_header="x-ttft-ms",
            tbt_header="x-time-per-token",
        )
        client = ModelClient(settings, HttpClient(deadlines, Bounded.MODEL_CALL, max_response_bytes=MAX_BYTES))
        return client.infer(InferenceRequest("r-1", 1.0, 60.0, payload), trace={}, sink=sink)

    return call


def test_usage_is_asked_for_and_no_other_byte_of_the_payload_changes(stream: Stream, server: HttpServer) -> None:
    stream(HEAD, piece(event("a", "stop") + DONE), END, payload=b'{ "stream" : true,"t":1.0 }')
    (request,) = server.requests
    assert request.body == b'{ "stream" : true,"t":1.0,"stream_options":{"include_usage":true} }'
    assert request.headers["x-request-id"] == "r-1-0a1b2c3d"


def test_a_whole_stream_is_the_completion_that_it_would_have_been_unstreamed(
    stream: Stream, sink: RecordingSink
) -> None:
    reply = stream(HEAD, piece(event("hel")), piece(event("lo", "stop")), piece(USAGE + DONE), END)
    assert isinstance(reply.outcome, Answered)
    body = json.loads(reply.outcome.body)
    assert (body["object"], body["choices"][0]["message"]["content"]) == ("chat.completion", "hello")
    assert body["choices"][0]["finish_reason"] == "stop"
    assert reply.outcome.usage == Usage(3, 2)
    assert reply.outcome.timings.ttft_s is not None
    assert reply.sign is Sign.WELL
    assert len(sink.chunks) == 3


def test_a_chunk_reaches_the_sink_before_the_next_one_is_sent(
    stream: Stream, server: HttpServer, sink: RecordingSink
) -> None:
    reply = stream(HEAD, piece(event("a")), Do.STALL, timeout_s=SHORT_TIMEOUT_S)
    assert len(sink.chunks) == 1
    assert isinstance(reply.outcome, Unavailable)
    assert reply.sign is Sign.SUSPECT


def test_a_stream_that_stops_in_the_middle_is_a_failed_attempt(stream: Stream) -> None:
    assert isinstance(stream(HEAD, piece(event("a")), Do.CLOSE).outcome, Unavailable)


def test_a_stream_that_ends_in_order_before_its_finish_reason_is_a_failed_attempt(stream: Stream) -> None:
    assert isinstance(stream(HEAD, piece(event("a")), END).outcome, Unavailable)


def test_a_cut_behind_done_costs_nothing(stream: Stream) -> None:
    reply = stream(HEAD, piece(event("a", "stop") + DONE), Do.RESET)
    assert isinstance(reply.outcome, Answered)


def test_a_stream_without_done_is_whole_when_every_choice_has_ended(stream: Stream) -> None:
    assert isinstance(stream(HEAD, piece(event("a", "stop")), END).outcome, Answered)


def test_an_abort_in_a_stream_is_the_model_going_away(stream: Stream) -> None:
    reply = stream(HEAD, piece(event("a", "abort") + DONE), END)
    assert isinstance(reply.outcome, Unavailable)
    assert reply.sign is Sign.LEAVING


def test_an_error_event_is_the_error_that_it_says(stream: Stream) -> None:
    error = b'{"error":{"message":"out of memory","code":503}}'
    reply = stream(HEAD, piece(event("a")), piece(b"data: " + error + b"\n\n" + DONE), END)
    assert reply.outcome == ModelError(503, "out of memory", error)
    assert reply.sign is Sign.SUSPECT


@pytest.mark.parametrize(
    ("name", "status"), [("vllm-stream-error-503-busy.sse", 503), ("vllm-stream-error-500-engine.sse", 500)]
)
def test_an_error_event_whose_status_is_retried_is_a_busy_model(
    stream: Stream, capture: Callable[[str], bytes], name: str, status: int
) -> None:
    said = capture(name)
    reply = stream(HEAD, piece(said), END, retry_status_codes=frozenset({status}))
    assert (type(reply.outcome), reply.sign) == (Unavailable, Sign.BUSY)
    reply = stream(HEAD, piece(said), END)
    assert isinstance(reply.outcome, ModelError)
    assert reply.outcome.status_code == status


def test_an_error_event_without_a_code_is_a_500(stream: Stream) -> None:
    reply = stream(HEAD, piece(b'data: {"error":{"message":"m"}}\n\n'), END)
    assert isinstance(reply.outcome, ModelError)
    assert reply.outcome.status_code == 500


@pytest.mark.parametrize("data", [b"data: NaN\n\n", b"data: [1]\n\n", b"data: \xff\n\n", b"data: {]\n\n"])
def test_a_stream_of_what_is_no_chunk_is_no_answer(stream: Stream, data: bytes) -> None:
    assert isinstance(stream(HEAD, piece(data + DONE), END).outcome, InvalidAnswer)


def test_a_stream_of_nothing_is_no_answer(stream: Stream) -> None:
    assert isinstance(stream(HEAD, piece(DONE), END).outcome, InvalidAnswer)


def test_a_stream_over_the_cap_is_no_answer(stream: Stream) -> None:
    assert isinstance(stream(HEAD, piece(event("a" * (MAX_BYTES + 1))), END).outcome, InvalidAnswer)


def test_an_error_status_is_read_as_unstreamed(stream: Stream, sink: RecordingSink) -> None:
    error = b'{"error":{"message":"too long"}}'
    reply = stream(answer(error, status="400 Bad Request", headers={"Content-Type": "application/json"}))
    assert reply.outcome == ModelError(400, "too long", error)
    assert sink.chunks == []


def test_an_unstreamed_answer_to_a_request_for_a_stream_is_an_answer(stream: Stream) -> None:
    reply = stream(answer(b'{"choices":[]}', headers={"Content-Type": "application/json"}))
    assert isinstance(reply.outcome, Answered)
    assert reply.outcome.body == b'{"choices":[]}'
