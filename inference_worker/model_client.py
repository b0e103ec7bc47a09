"""One request to the model server, and what its answer means as an outcome.

Runs on slot threads. Knows how OpenAI-compatible servers answer; does not know HTTP libraries, Redis or RabbitMQ.
Source: design section 8.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http.client import responses
from typing import Protocol, assert_never
from urllib.parse import quote

from inference_worker.disposition import (
    Answered,
    Cancelled,
    Expired,
    Interrupted,
    InvalidAnswer,
    ModelError,
    Outcome,
    Unavailable,
)
from inference_worker.errors import (
    HttpCancelled,
    HttpCutOff,
    HttpError,
    HttpIncomplete,
    HttpTimeout,
    HttpTooLarge,
    HttpUnreachable,
)
from inference_worker.messages import InferenceRequest
from inference_worker.model_answer import BodyFacts, BodyKind, Timings, read_body, to_seconds
from inference_worker.model_stream import StreamEnd
from inference_worker.stream_reader import ChunkSink, StreamReader
from inference_worker.stream_request import with_usage

_ABORTED = "the model broke the answer off (finish_reason abort): it is going away"
_CUT_OFF = "the answer was cut off"


class Sign(StrEnum):
    """What a call tells about the model's health; the health checker decides what follows."""

    #: it answered
    WELL = "well"
    #: refused, reset, unknown host
    UNREACHABLE = "unreachable"
    #: it broke an answer off because it is told to stop; its /health may say 200 for a moment longer
    LEAVING = "leaving"
    #: a 5xx, a timeout, an answer cut off: perhaps an engine that died
    SUSPECT = "suspect"
    #: a status that asks for a pause
    BUSY = "busy"
    #: nothing: we ended the call ourselves
    NONE = "none"


@dataclass(frozen=True, slots=True)
class ModelReply:
    """How one call ended."""

    outcome: Outcome
    sign: Sign
    #: for people
    detail: str = ""
    #: of a busy model's Retry-After; None when it named none
    retry_after_s: float | None = None


class Answer(Protocol):
    """A whole HTTP answer."""

    @property
    def status_code(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def body(self) -> bytes: ...
    @property
    def is_length_known(self) -> bool: ...


class Exchange(Protocol):
    """One bounded HTTP exchange; raises a subclass of HttpError when there is no whole answer."""

    def exchange(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str | bytes],
        body: bytes | None,
        timeout_s: float,
        listen: Callable[[int, Mapping[str, str]], Callable[[bytes], None] | None] | None = None,
        name: str | None = None,
    ) -> Answer: ...


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What the client has to know of the configuration."""

    infer_url: str
    timeout_s: float
    api_key: str
    max_response_bytes: int
    retry_status_codes: frozenset[int]
    #: headers with milliseconds, in lower case
    ttft_header: str
    tbt_header: str


class ModelClient:
    """Asks the model. Safe from any thread."""

    def __init__(self, settings: ModelSettings, http: Exchange) -> None:
        self._settings = settings
        self._http = http
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json", "Accept": "application/json"}
        if settings.api_key:
            self._headers["Authorization"] = f"Bearer {settings.api_key}"

    def infer(
        self,
        request: InferenceRequest,
        *,
        trace: Mapping[str, str],
        sink: ChunkSink | None = None,
        time_left_s: float | None = None,
    ) -> ModelReply:
        """Send one request to the model and read the whole answer.

        Runs on a slot thread; can be cut off from any thread, and cancelled by the request_id.

        Units:   time_left_s seconds, where the request's own deadline is respected: what runs out is the request's time
        Shapes:  the payload goes out byte for byte, but for `include_usage` in a stream; trace holds `traceparent` and
                 `tracestate`, where there are any; a sink is given when the request asks for a stream
        Source:  design section 8; the outcomes are rows of section 5
        """
        attempt = sink.attempt if sink else secrets.token_hex(4)
        headers = {**self._headers, **trace, "X-Request-Id": _attempt_id(request.request_id, attempt)}
        if sink is None:
            reader, body = None, request.payload
        else:
            reader, body = (
                StreamReader(sink, max_body_bytes=self._settings.max_response_bytes),
                with_usage(request.payload),
            )
        timeout_s = self._settings.timeout_s
        is_own_deadline = time_left_s is not None and time_left_s < timeout_s
        if time_left_s is not None:
            timeout_s = min(timeout_s, time_left_s)
        try:
            answer = self._http.exchange(
                "POST",
                self._settings.infer_url,
                headers=headers,
                body=body,
                timeout_s=timeout_s,
                listen=reader.listen if reader else None,
                name=request.request_id,
            )
        except HttpError as err:
            if is_own_deadline and isinstance(err, HttpTimeout):
                # says nothing of the model: it was given less time than it may take
                return ModelReply(Expired(request.timeout_s, request.timeout_s), Sign.NONE, str(err))
            # what follows `[DONE]` is of no interest, be it a cut
            if reader is None or not reader.is_done or isinstance(err, HttpCutOff):
                return _reply_without_answer(err)
            return self._read_stream(reader)
        return self._read_stream(reader) if reader and reader.is_streaming else self._read(answer)

    def _read(self, answer: Answer) -> ModelReply:
        status = answer.status_code
        if status in self._settings.retry_status_codes:
            detail = f"the model answered {status}"
            return ModelReply(Unavailable(detail), Sign.BUSY, detail, _retry_after_s(answer.headers.get("retry-after")))
        facts = read_body(answer.body)
        if 200 <= status <= 299:
            return self._read_success(answer, facts)
        if 400 <= status <= 599:
            return _read_error(answer, facts)
        return ModelReply(InvalidAnswer(f"the model answered {status}, which is no answer"), Sign.WELL)

    def _read_success(self, answer: Answer, facts: BodyFacts) -> ModelReply:
        match facts.kind:
            case BodyKind.ANSWER:
                timings = self._timings(answer.headers, facts.timings)
                return ModelReply(Answered(answer.status_code, answer.body, facts.usage, timings), Sign.WELL)
            case BodyKind.ABORTED:
                # a vLLM told to stop answers what runs with 200 and a cut-off text; it refuses connections next
                return ModelReply(Unavailable(_ABORTED), Sign.LEAVING, _ABORTED)
            case BodyKind.TRUNCATED if not answer.is_length_known or "content-encoding" in answer.headers:
                # a compressed body that stops short has the right length and inflates without an error
                return ModelReply(Unavailable(_CUT_OFF), Sign.SUSPECT, _CUT_OFF)
            case BodyKind.ERROR:
                said = f": {facts.error_message}" if facts.error_message else ""
                error = f"the model answered {answer.status_code} with an error{said}"
            case BodyKind.OTHER_JSON:
                error = f"the model answered {answer.status_code} with JSON that is no object"
            case BodyKind.NO_JSON | BodyKind.TRUNCATED:
                error = f"the model answered {answer.status_code} with a body that is no JSON"
        return ModelReply(InvalidAnswer(error), Sign.WELL)

    def _read_stream(self, reader: StreamReader) -> ModelReply:
        """Take the assembled answer for what an unstreamed one would be."""
        assembled = reader.assembly.finish()
        match assembled.end:
            case StreamEnd.COMPLETE:
                assert assembled.body is not None
                facts = read_body(assembled.body)
                timings = self._timings(reader.headers, facts.timings)
                timings = Timings(
                    reader.ttft_s if timings.ttft_s is None else timings.ttft_s,
                    reader.tbt_s if timings.tbt_s is None else timings.tbt_s,
                )
                return ModelReply(Answered(reader.status_code, assembled.body, facts.usage, timings), Sign.WELL)
            case StreamEnd.ABORTED:
                return ModelReply(Unavailable(_ABORTED), Sign.LEAVING, _ABORTED)
            case StreamEnd.CUT_OFF:
                return ModelReply(Unavailable(_CUT_OFF), Sign.SUSPECT, _CUT_OFF)
            case StreamEnd.ERROR:
                assert assembled.error is not None
                status = assembled.error.status_code
                if status in self._settings.retry_status_codes:
                    # a vLLM that is full says so to most streams only after its 200
                    detail = f"the model's stream said {status}"
                    return ModelReply(Unavailable(detail), Sign.BUSY, detail)
                error = assembled.error.message or f"the model's stream ended with the error {status}"
                sign = Sign.SUSPECT if status >= 500 else Sign.WELL
                return ModelReply(ModelError(status, error, assembled.error.body), sign, f"the stream said {status}")
            case StreamEnd.EMPTY:
                return ModelReply(InvalidAnswer("the model's stream held nothing"), Sign.WELL)
            case StreamEnd.INVALID:
                return ModelReply(InvalidAnswer(f"the model's stream is none: {assembled.problem}"), Sign.WELL)
            case _ as unreachable:
                assert_never(unreachable)

    def _timings(self, headers: Mapping[str, str], from_body: Timings) -> Timings:
        ttft_s = to_seconds(headers.get(self._settings.ttft_header))
        tbt_s = to_seconds(headers.get(self._settings.tbt_header))
        return Timings(
            from_body.ttft_s if ttft_s is None else ttft_s,
            from_body.tbt_s if tbt_s is None else tbt_s,
        )


def _read_error(answer: Answer, facts: BodyFacts) -> ModelReply:
    status = answer.status_code
    is_json = facts.kind not in (BodyKind.NO_JSON, BodyKind.TRUNCATED)
    error = facts.error_message or f"the model answered {status} ({responses.get(status, 'an error')})"
    outcome = ModelError(status, error, answer.body.strip() if is_json else None)
    detail = f"the model answered {status}"
    return ModelReply(outcome, Sign.SUSPECT if status >= 500 else Sign.WELL, detail)


def _reply_without_answer(err: HttpError) -> ModelReply:
    detail = str(err)
    match err:
        case HttpCutOff():
            return ModelReply(Interrupted("cut_off"), Sign.NONE, detail)
        case HttpCancelled():
            return ModelReply(Cancelled(), Sign.NONE, detail)
        case HttpTooLarge():
            return ModelReply(InvalidAnswer(detail), Sign.WELL, detail)
        case HttpUnreachable():
            return ModelReply(Unavailable(detail), Sign.UNREACHABLE, detail)
        case HttpTimeout() | HttpIncomplete():
            return ModelReply(Unavailable(detail), Sign.SUSPECT, detail)
        case _:
            raise err


def _attempt_id(request_id: str, attempt: str) -> bytes:
    """Make the id unique to this attempt: a server that still runs the first one refuses the same id twice (R49)."""
    plain = request_id if request_id.isascii() else quote(request_id)
    return f"{plain}-{attempt}".encode("ascii")


def _retry_after_s(value: str | None) -> float | None:
    """Read a Retry-After in seconds; a date or junk counts as none (R50)."""
    text = (value or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
