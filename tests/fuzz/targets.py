"""What is fuzzed, and what must hold for every input at all.

Each target is given bytes, hands them to the package's own functions and asks a plain second opinion (`oracles`). A
law that does not hold is a `Violation`; any exception that a decoder does not document is a finding as well.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Any

import pika
import pika.exceptions

from inference_worker.amqp_headers import Nested
from inference_worker.config import VARIABLES, effective_values, load_config
from inference_worker.delivery import Delivery, Session, read_retry_count
from inference_worker.disposition import (
    Answered,
    Circumstances,
    InvalidAnswer,
    ModelError,
    Outcome,
    Unavailable,
    decide_disposition,
)
from inference_worker.errors import ConfigError, HttpTooLarge, MalformedRequest
from inference_worker.event_stream import EventStreamParser
from inference_worker.message_publisher import _copy_properties
from inference_worker.messages import (
    Completed,
    ErrorType,
    Failed,
    InferenceRequest,
    Result,
    decode_completed,
    decode_request,
    encode_result,
)
from inference_worker.model_answer import BodyKind, read_body
from inference_worker.model_client import ModelClient, ModelReply, ModelSettings
from inference_worker.stream_request import wants_stream, with_usage

from . import oracles
from .inputs import (
    ANSWER_TOKENS,
    PAYLOAD_TOKENS,
    REQUEST_TOKENS,
    STORED_TOKENS,
    STREAM_TOKENS,
    TableMaker,
    expand,
    pieces_of,
)


class Violation(AssertionError):
    """A law does not hold. The text is the law, and nothing of the input: it names the finding."""


def hold(law: str, holds: bool) -> None:
    if not holds:
        raise Violation(law)


@dataclass(frozen=True, slots=True)
class Target:
    """One entrance of the worker."""

    name: str
    check: Callable[[bytes], None]
    #: what a seed's bytes are put behind; its length is the number of steering bytes
    steering: bytes
    tokens: Sequence[bytes]
    #: this part of all runs: the cheap ones run more often
    share: float
    #: bytes of the longest input; a token makes many of one
    max_input_bytes: int
    #: what it reaches, for the coverage report
    modules: tuple[str, ...]


def _body(data: bytes, steering: int, tokens: Sequence[bytes]) -> bytes:
    """The body behind the steering bytes; the lowest bit of the first says whether it is written in tokens."""
    body = data[steering:]
    return expand(body, tokens) if data[:1] and data[0] & 1 else body


# -- results ----------------------------------------------------------------------------------------------------------


#: of JSON
_SPACE = b" \t\r\n"


def _check_result(result: Result) -> None:
    value = encode_result(result)
    try:
        said = oracles.strict_json(value)
    except ValueError as err:
        raise Violation("every result is strict JSON in UTF-8") from err
    match result:
        case Completed():
            hold("a completed result holds the body byte for byte", result.body in value)
            hold("a completed result says what the model said", _says(result.body, said["result"]))
            # white space around the body belongs to no value
            same = decode_completed(value) == Completed(result.status_code, result.body.strip(_SPACE))
            hold("a completed result is read back as it was", same)
        case Failed():
            has_body = result.model_error is not None
            hold("a failed result has the model's body where there is one", ("model_error" in said) is has_body)
            if result.model_error is not None:
                hold("a failed result says what the model said", _says(result.model_error, said["model_error"]))
            hold("a failed result is no completed one", decode_completed(value) is None)


def check_stored(data: bytes) -> None:
    """What lies under a result's key, whoever wrote it: `completed` when it says so, and never an exception."""
    value = _body(data, 1, STORED_TOKENS)
    found = decode_completed(value)
    hold("a stored value is a completed result or none", found is None or isinstance(found.body, bytes))
    if oracles.is_deep(value):
        return
    try:
        said = oracles.strict_json(value)
    except ValueError:
        return
    status = said.get("status") if type(said) is dict else None
    if status != "completed" or type(status) is oracles.Number:
        hold("what does not say completed is none", found is None)
    elif type(said.get("status_code")) is oracles.Number and re.fullmatch("[1-5][0-9]{2}", said["status_code"]):
        hold("what says completed is found", found is not None and found.status_code == int(said["status_code"]))
        if found is not None and "result" in said:
            hold("a stored result says what was stored", _says(found.body, said["result"]))


def _says(body: bytes, value: Any) -> bool:
    try:
        return bool(oracles.strict_json(body) == value)
    except ValueError:
        return False


# -- request ----------------------------------------------------------------------------------------------------------


def check_request(data: bytes) -> None:
    """`decode_request` takes what the rules allow, by the standard library's parser, and nothing else."""
    body = _body(data, 1, REQUEST_TOKENS)
    is_deep = oracles.is_deep(body)
    request_id, valid = (None, None) if is_deep else oracles.valid_request(body)
    try:
        request = decode_request(body)
    except MalformedRequest as err:
        hold("a refused request breaks a rule", is_deep or valid is None)
        hold("a refusal's request_id is usable", oracles.usable_id(err.request_id) == err.request_id)
        hold("a refusal finds the request_id of a JSON object", request_id is None or err.request_id == request_id)
        _check_result(Failed(400, str(err), ErrorType.MALFORMED_REQUEST))
        return
    hold("the payload is the body's own bytes", request.payload in body)
    if is_deep:
        return
    found = (request.request_id, request.received_at, request.timeout_s)
    hold("an accepted request keeps every rule", found == valid)
    payload = oracles.strict_json(request.payload)
    hold("the payload says what the body says", payload == oracles.strict_json(body)["payload"])
    _check_payload(request.payload)


# -- payload ----------------------------------------------------------------------------------------------------------


def check_payload(data: bytes) -> None:
    """`wants_stream` and `with_usage` on any bytes; on a JSON object, nothing but include_usage changes."""
    payload = _body(data, 1, PAYLOAD_TOKENS)
    if oracles.is_deep(payload):
        wants_stream(payload)
        with_usage(payload)
        return
    try:
        is_object = type(oracles.strict_json(payload)) is dict
    except ValueError:
        is_object = False
    if is_object:
        # as `decode_request` hands it on: from its first brace to its last
        _check_payload(payload.strip(_SPACE))
    else:
        hold("what is no object comes back as bytes", isinstance(with_usage(payload), bytes))
        wants_stream(payload)


def _check_payload(payload: bytes) -> None:
    asked = oracles.strict_json(payload)
    hold("a stream is wanted when stream is true", wants_stream(payload) is (asked.get("stream") is True))
    edited = with_usage(payload)
    try:
        said = oracles.ordered_json(edited)
    except ValueError as err:
        raise Violation("an edited payload is strict JSON in UTF-8") from err
    expected = oracles.with_usage(oracles.ordered_json(payload))
    hold("an edited payload says the same but for stream_options.include_usage", said == expected)
    hold("an edited payload is edited once", with_usage(edited) is edited)
    if edited is payload:
        return
    options = asked.get("stream_options")
    if "stream_options" not in asked or (type(options) is dict and "include_usage" not in options):
        hold("what is only added to leaves every byte in its place", _is_inserted(payload, edited))


def _is_inserted(before: bytes, after: bytes) -> bool:
    head = next((at for at in range(len(before)) if before[at] != after[at]), len(before))
    tail = len(before) - head
    return tail == 0 or after.endswith(before[head:])


# -- answer -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP answer."""

    status_code: int
    headers: Mapping[str, str]
    body: bytes
    is_length_known: bool


class FixedExchange:
    """An HTTP client that answers with what it is told to."""

    def __init__(self, answer: Answer, pieces: Sequence[bytes] = ()) -> None:
        self._answer = answer
        self._pieces = pieces

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
    ) -> Answer:
        take = listen(self._answer.status_code, self._answer.headers) if listen else None
        if take is not None:
            for piece in self._pieces:
                take(piece)
        return self._answer


_REQUEST = InferenceRequest("r-1", 1.0, 60.0, b"{}")
_STATUSES = (200, 201, 204, 299, 300, 302, 399, 400, 404, 418, 422, 429, 499, 500, 503, 599, 100, 199)
_BUSY = frozenset({429})
_TIMES = (None, "", "1", "12.5", " 7 ", "-1", "nan", "inf", "1e999", "x", "1_0", "٣", "0", "9" * 400)
_HEADER_SETS = tuple(
    {name: value for name, value in {"retry-after": at, "x-ttft-ms": at, "x-time-per-token": at}.items() if value}
    for at in _TIMES
)


def model_settings(max_response_bytes: int) -> ModelSettings:
    return ModelSettings(
        infer_url="http://model.invalid/v1/chat/completions",
        timeout_s=60.0,
        api_key="",
        max_response_bytes=max_response_bytes,
        retry_status_codes=_BUSY,
        ttft_header="x-ttft-ms",
        tbt_header="x-time-per-token",
    )


_SETTINGS = model_settings(1 << 20)
_CIRCUMSTANCES = tuple(
    Circumstances(retry_count=count, max_retries=1, redelivered=False, draining=False) for count in (0, 1)
)


def check_answer(data: bytes) -> None:
    """What a model's whole answer becomes, for any status and body, down to the bytes under the result's key."""
    mode, status, flags, cut = (*data[:4], 0, 0, 0, 0)[:4]
    body = _body(data, 4, ANSWER_TOKENS)
    status_code = _STATUSES[status % len(_STATUSES)]
    headers: dict[str, str] = dict(_HEADER_SETS[(flags >> 2) % len(_HEADER_SETS)])
    if flags & 1:
        headers["content-encoding"] = "gzip"
    answer = Answer(status_code, headers, body, bool(flags & 2))
    reply = ModelClient(_SETTINGS, FixedExchange(answer)).infer(_REQUEST, trace={})
    decision = decide_disposition(reply.outcome, _CIRCUMSTANCES[mode >> 7])
    if oracles.is_deep(body):
        return
    if decision.result is not None:
        _check_result(decision.result)
    kind = oracles.body_kind(body)
    _check_outcome(answer, kind, reply.outcome)
    facts = read_body(body)
    if kind == "none":
        hold("what is no JSON is seen as none", facts.kind in (BodyKind.NO_JSON, BodyKind.TRUNCATED))
        return
    is_seen = {"other": "other_json"}.get(kind, kind) == facts.kind.value
    hold("a body is what the standard library's parser says that it is", is_seen)
    if kind != "other":
        usage = oracles.strict_json(body).get("usage")
        counts = (facts.usage.prompt_tokens, facts.usage.completion_tokens) if facts.usage else None
        hold("tokens are two non-negative integers or unknown", counts == oracles.tokens(usage))
        whole = body.rstrip(_SPACE)
        cut_off = whole[: len(whole) * cut // 256]
        hold("an object that stops short is seen as cut off", read_body(cut_off).kind is BodyKind.TRUNCATED)


def _check_outcome(answer: Answer, kind: str, outcome: Outcome) -> None:
    """The rows of the README's tables."""
    status = answer.status_code
    if status in _BUSY:
        hold("a retried status is no answer", isinstance(outcome, Unavailable))
    elif 200 <= status <= 299:
        if kind == "answer":
            hold("2xx with an object is answered", isinstance(outcome, Answered) and outcome.body == answer.body)
        elif kind == "aborted":
            hold("an abort is no answer", isinstance(outcome, Unavailable))
        elif kind == "none":
            hold("2xx without JSON is invalid or cut off", isinstance(outcome, InvalidAnswer | Unavailable))
        else:
            hold("2xx with an error or no object is invalid", isinstance(outcome, InvalidAnswer))
    elif 400 <= status <= 599:
        hold("an error status is the answer", isinstance(outcome, ModelError) and outcome.status_code == status)
        if isinstance(outcome, ModelError):
            hold("an error's JSON body is kept", (outcome.model_error is not None) == (kind != "none"))
    else:
        hold("1xx and 3xx are no answer", isinstance(outcome, InvalidAnswer))


# -- events -----------------------------------------------------------------------------------------------------------

_CAPS = (8, 16, 40, 200, 1 << 20)


def check_events(data: bytes) -> None:
    """Any split of an event stream gives the events of the whole, and memory stays within the cap."""
    mode, cap, seed = (*data[:3], 0, 0, 0)[:3]
    stream = _body(data, 3, STREAM_TOKENS)
    max_event_bytes = _CAPS[cap % len(_CAPS)]
    events, is_too_large = oracles.events_of(stream, max_event_bytes)
    every_byte = [stream[at : at + 1] for at in range(len(stream))] if len(stream) <= 32 else []
    halves = [stream[: seed * len(stream) // 256], stream[seed * len(stream) // 256 :]]
    for pieces in ([stream], every_byte or halves, list(pieces_of(stream, seed, 1 + (mode >> 4)))):
        parser = EventStreamParser(max_event_bytes=max_event_bytes)
        found: list[bytes] = []
        is_refused = False
        try:
            for piece in pieces:
                found += parser.feed(piece)
                kept = len(parser._line) + len(parser._data or b"")
                hold("no more is kept than a line and an event", kept <= 2 * max_event_bytes)
        except HttpTooLarge:
            is_refused = True
        hold("what is too long is refused, whatever the split", is_refused == is_too_large)
        if is_refused:
            hold("events before one that is too long are those of the whole", found == events[: len(found)])
        else:
            hold("any split gives the events of the whole", found == events)


# -- stream -----------------------------------------------------------------------------------------------------------

_STREAM_SETTINGS = tuple(model_settings(cap) for cap in (1024, 4096, 1 << 20))


class _Sink:
    """Keeps what it is given."""

    attempt = "0a1b2c3d"

    def __init__(self) -> None:
        self.chunks: list[bytes] = []

    def append(self, chunk: bytes) -> None:
        self.chunks.append(chunk)


_HEAD = Answer(200, {"content-type": "text/event-stream"}, b"", True)


def _stream(settings: ModelSettings, pieces: Sequence[bytes]) -> tuple[ModelReply, list[bytes]]:
    sink = _Sink()
    reply = ModelClient(settings, FixedExchange(_HEAD, pieces)).infer(_REQUEST, trace={}, sink=sink)
    return reply, sink.chunks


def check_stream(data: bytes) -> None:
    """Any split of a streamed answer becomes the same result; it is strict JSON, and says what the chunks said."""
    mode, cap, seed = (*data[:3], 0, 0, 0)[:3]
    stream = _body(data, 3, STREAM_TOKENS)
    settings = _STREAM_SETTINGS[cap % len(_STREAM_SETTINGS)]
    max_bytes = settings.max_response_bytes
    whole, chunks = _stream(settings, [stream])
    split, split_chunks = _stream(settings, list(pieces_of(stream, seed, 1 + (mode >> 4))))
    # a reader that had seen the end before what is too long has a whole answer; that may come with the split alone
    if len(stream) <= max_bytes:
        hold("any split gives the same chunks", chunks == split_chunks)
        hold("any split gives the same answer", _without_times(whole.outcome) == _without_times(split.outcome))
    if oracles.is_deep(stream):
        return
    for reply in (whole, split):
        result = decide_disposition(reply.outcome, _CIRCUMSTANCES[1]).result
        if result is not None:
            _check_result(result)
    if isinstance(whole.outcome, Answered):
        hold("an assembled answer is within the cap", len(whole.outcome.body) <= max_bytes)
        hold("an assembled answer is an answer", oracles.body_kind(whole.outcome.body) == "answer")
        _check_assembled(whole.outcome, chunks)


def _without_times(outcome: Outcome) -> Any:
    """The timings are the clock's."""
    if isinstance(outcome, Answered):
        return (outcome.status_code, outcome.body, outcome.usage)
    return outcome


def _check_assembled(outcome: Answered, chunks: list[bytes]) -> None:
    """Ask again, on plain values, for what people read and what is billed."""
    said = oracles.strict_json(outcome.body)
    values = [oracles.strict_json(chunk) for chunk in chunks]
    usages = [value["usage"] for value in values if value.get("usage") is not None]
    if usages:
        hold("the usage of the last chunk that has any counts", said["usage"] == usages[-1])
        counts = (outcome.usage.prompt_tokens, outcome.usage.completion_tokens) if outcome.usage else None
        hold("the tokens of that usage are billed", counts == oracles.tokens(usages[-1]))
    texts: dict[int, str] = {}
    for value in values:
        for choice in value.get("choices") or []:
            index = int(choice.get("index", 0))
            texts.setdefault(index, "")
            delta = choice.get("delta")
            text = delta.get("content") if type(delta) is dict else None
            if "message" in choice or (text is not None and type(text) is not str):
                return
            texts[index] += text or ""
    for choice in said["choices"]:
        message = choice.get("message")
        if type(message) is dict:
            hold("the text is the chunks' texts in their order", (message["content"] or "") == _paired(texts, choice))


def _paired(texts: dict[int, str], choice: dict[str, Any]) -> str:
    """Join halves of a pair that came in two chunks."""
    return texts[int(choice["index"])].encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


# -- headers ----------------------------------------------------------------------------------------------------------

#: values nested no deeper are read
_READ_DEPTH = 8
#: what pika's decoder is known to raise for a table that no broker would hand on
_REFUSALS = (struct.error, pika.exceptions.AMQPError, RecursionError, ValueError, OverflowError)


def check_headers(data: bytes) -> None:
    """Every header table that RabbitMQ takes is read, and goes on with a copy as it came."""
    is_made = bool(data[:1]) and data[0] & 1
    maker = TableMaker(data[1:])
    table = maker.make() if is_made else data[1:]
    # flags: headers alone
    encoded = b"\x20\x00" + struct.pack(">I", len(table)) + table
    # the oracle recurses, which the decoder must not; what the maker has made is a table all the same
    is_beyond_oracle = is_made and maker.is_deep
    try:
        expected = {} if is_beyond_oracle else oracles.table_of(table)
    except oracles.BadTable:
        _decode_bad(encoded)
        return
    properties = pika.BasicProperties().decode(encoded)
    if not is_beyond_oracle:
        hold("a header table is read as the broker reads it", _is_same(properties.headers, expected))
    delivery = Delivery(Session(1), 1, False, b"", properties, properties.headers, monotonic())
    _check_retry_counts(delivery)
    copy = pika.BasicProperties().decode(b"".join(_copy_properties(delivery, {"x-retry-count": 1}).encode()))
    kept = {name: value for name, value in properties.headers.items() if not _is_brokers(name)}
    hold("a copy keeps every header", copy.headers == {**kept, "x-retry-count": 1})


def _decode_bad(encoded: bytes) -> None:
    try:
        headers = pika.BasicProperties().decode(encoded).headers
    except _REFUSALS:
        return
    for value in headers.values():
        hold("a retry count is a number from 0 on", 0 <= read_retry_count(value) <= 10**9)


def _is_brokers(name: Any) -> bool:
    return name in ("x-death", "CC", "x-retry-count")


def _is_same(found: Any, expected: Any, depth: int = 0) -> bool:
    if expected is ...:
        return True
    if isinstance(found, Nested):
        # kept as it came; that it goes on so is held by the copy
        return depth > _READ_DEPTH and isinstance(expected, dict | list)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(_is_same(found[at], expected[at], depth + 1) for at in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(
            _is_same(*pair, depth + 1) for pair in zip(found, expected, strict=True)
        )
    return bool(found == expected) and isinstance(found, bool) == isinstance(expected, bool)


def _check_retry_counts(delivery: Delivery) -> None:
    for value in delivery.headers.values():
        count = read_retry_count(value)
        hold("a retry count is a number from 0 on", type(count) is int and 0 <= count <= 10**9)
        if type(value) is int and 0 <= value < 10**9:
            hold("a plain retry count is itself", count == value)
            hold("a retry count may be written as text", read_retry_count(f" {value}") == value)
    if isinstance(delivery.headers.get("x-retry-count"), bool | list | dict | datetime | None):
        hold("junk is a retry count of 0", delivery.retry_count == 0)


# -- config -----------------------------------------------------------------------------------------------------------

_VALID = {
    "METRIC_SERVER_URL": "http://x.invalid",
    "METRIC_SERVER_SERVICE_TOKEN": "t",
    "CROESUS_HOST": "http://x.invalid",
    "DEPLOYMENT_ID": "d",
    "REPLICA_ID": "r",
    "USER_ID": "u",
    "HF_MODEL_ID": "m",
}
#: those that name a file look at the disk
_FUZZED = tuple(
    variable for variable in VARIABLES if "FILE" not in variable.name and variable.name != "USAGE_OUTBOX_PATH"
)


def check_config(data: bytes) -> None:
    """Any text of a variable is a value or a fault of that variable, and no secret is shown."""
    variable = _FUZZED[(data[:1] or b"\0")[0] % len(_FUZZED)]
    text = data[1:].decode("utf-8", "surrogateescape")
    try:
        config = load_config(_VALID | {variable.name: text})
    except ConfigError as err:
        hold("a fault names its variable", [fault.variable for fault in err.faults] == [variable.name])
        str(err).encode("utf-8")
        hold("a secret is not shown", not variable.secret or err.faults[0].value is None)
        return
    shown = {known.name: value for known, value in effective_values(config)}
    shown[variable.name].encode("utf-8")
    hold("a secret is not shown", not variable.secret or shown[variable.name] in ("(set)", "(not set)"))


# -- all of them ------------------------------------------------------------------------------------------------------

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("request", check_request, b"\0", REQUEST_TOKENS, 0.15, 250, ("messages", "json_text")),
        Target("payload", check_payload, b"\0", PAYLOAD_TOKENS, 0.30, 150, ("stream_request", "json_spans")),
        Target(
            "answer",
            check_answer,
            b"\0\0\0\x80",
            ANSWER_TOKENS,
            0.19,
            250,
            ("model_answer", "model_client", "disposition", "messages"),
        ),
        Target("stored", check_stored, b"\0", STORED_TOKENS, 0.28, 200, ("messages", "json_text")),
        Target("events", check_events, b"\0\x04\x55", STREAM_TOKENS, 0.055, 48, ("event_stream",)),
        Target(
            "stream",
            check_stream,
            b"\x20\x02\x55",
            STREAM_TOKENS,
            0.012,
            100,
            ("model_stream", "stream_reader", "json_spans", "event_stream"),
        ),
        Target("headers", check_headers, b"\0", (), 0.01, 100, ("amqp_headers", "delivery")),
        Target("config", check_config, b"\0", (), 0.003, 100, ("config",)),
    )
}
