"""The wire format of a request and of its result, and nothing of what is done with them.

Pure: any thread, no I/O. Sources: specification ("Message Processing"), design section 5.
"""

from __future__ import annotations

import math
import re
from enum import StrEnum

import msgspec

from inference_worker.errors import MalformedRequest
from inference_worker.json_text import check_utf8, has_surrogate_escape, salvage_string, split_object

#: a request_id is part of a Redis key and of an HTTP header (design section 5)
MAX_REQUEST_ID_CHARS = 255
#: seconds since 1970 reach this in the year 5138; milliseconds passed it in 1973 (field report R55)
MILLISECONDS_FROM = 1e11

_SPACE_OR_CONTROL = re.compile(r"[\s\x00-\x1f\x7f-\x9f]")


class ErrorType(StrEnum):
    """`error_type` of a failed result: the closed list that producers may switch on (design section 5)."""

    MALFORMED_REQUEST = "malformed_request"
    EXPIRED = "expired"
    MODEL_ERROR = "model_error"
    MODEL_UNAVAILABLE = "model_unavailable"
    INVALID_MODEL_ANSWER = "invalid_model_answer"
    CANCELLED = "cancelled"
    TOO_MANY_REDELIVERIES = "too_many_redeliveries"
    INTERNAL_ERROR = "internal_error"


# -- requests ---------------------------------------------------------------------------------------------------------


class InferenceRequest(msgspec.Struct, frozen=True):
    """One valid request. `payload` is the JSON object as it came, byte for byte."""

    request_id: str
    #: unix seconds by the proxy's clock
    received_at: float
    timeout_s: float
    payload: bytes


class _RequestOnTheWire(msgspec.Struct):
    """Every field kept raw: each is checked on its own, so that the error names it and the id is found all the same."""

    request_id: msgspec.Raw = msgspec.Raw(b"")
    received_at: msgspec.Raw = msgspec.Raw(b"")
    timeout_s: msgspec.Raw = msgspec.Raw(b"")
    payload: msgspec.Raw = msgspec.Raw(b"")


_REQUEST_DECODER = msgspec.json.Decoder(_RequestOnTheWire)
_STR_DECODER = msgspec.json.Decoder(str)
_FLOAT_DECODER = msgspec.json.Decoder(float)


def decode_request(body: bytes) -> InferenceRequest:
    """Check one message body and take it apart.

    Shapes:  the payload of the result is the body's bytes, not re-serialised
    Raises:  MalformedRequest, with the request_id where one could be read
    Source:  design section 5 "Validation"; field reports R45, R46, R55-R57
    """
    wire = _decode_wire(body)
    request_id = _read_request_id(bytes(wire.request_id))
    if request_id is None:
        rule = f"request_id must be a string of 1 to {MAX_REQUEST_ID_CHARS} characters without white space"
        raise MalformedRequest(rule, field="request_id", request_id=None)
    return InferenceRequest(
        request_id=request_id,
        received_at=_read_received_at(wire.received_at, request_id),
        timeout_s=_read_number(wire.timeout_s, "timeout_s", request_id),
        payload=_read_payload(wire.payload, request_id),
    )


def _decode_wire(body: bytes) -> _RequestOnTheWire:
    try:
        # msgspec does not look at the bytes of what it skips or keeps raw; they would reach the model as they are
        check_utf8(body)
        return _REQUEST_DECODER.decode(body)
    except UnicodeDecodeError as err:
        problem = f"the request is not UTF-8 (byte {err.start})"
    except RecursionError:
        problem = "the request is nested too deeply"
    except msgspec.DecodeError as err:
        text = body.decode()
        fields = split_object(text) if has_surrogate_escape(text) else None
        if fields is not None:
            names = _RequestOnTheWire.__struct_fields__
            return _RequestOnTheWire(**{n: msgspec.Raw(fields[n].encode()) for n in names if n in fields})
        # msgspec's complaint names types and positions, never a value
        problem = f"the request is not a JSON object: {err}"
    found = salvage_string(body.decode(errors="replace"), "request_id")
    # what was no UTF-8 has been replaced, and is not what the producer waits for
    request_id = None if "\ufffd" in found else _read_request_id(found.encode())
    raise MalformedRequest(problem, field=None, request_id=request_id)


def _read_request_id(raw: bytes) -> str | None:
    try:
        value = _STR_DECODER.decode(raw)
    except msgspec.DecodeError:
        return None
    usable = 0 < len(value) <= MAX_REQUEST_ID_CHARS and not _SPACE_OR_CONTROL.search(value)
    return value if usable else None


def _read_number(raw: msgspec.Raw, field: str, request_id: str) -> float:
    try:
        value = _FLOAT_DECODER.decode(raw)
    except msgspec.DecodeError:
        value = math.nan
    if not math.isfinite(value):
        problem = "must be a finite JSON number of seconds" if bytes(raw) else "is missing"
        raise MalformedRequest(f"{field} {problem}", field=field, request_id=request_id)
    return value


def _read_received_at(raw: msgspec.Raw, request_id: str) -> float:
    value = _read_number(raw, "received_at", request_id)
    if value >= MILLISECONDS_FROM:
        error = f"received_at {value:.0f} is no time in unix seconds: milliseconds?"
        raise MalformedRequest(error, field="received_at", request_id=request_id)
    return value


def _read_payload(raw: msgspec.Raw, request_id: str) -> bytes:
    payload = bytes(raw)
    if not payload.startswith(b"{"):
        problem = "must be a JSON object" if payload else "is missing"
        raise MalformedRequest(f"payload {problem}", field="payload", request_id=request_id)
    return payload


# -- results ----------------------------------------------------------------------------------------------------------


class Completed(msgspec.Struct, frozen=True):
    """A result that the model gave: `body` goes into the value byte for byte."""

    status_code: int
    body: bytes


class Failed(msgspec.Struct, frozen=True):
    """A result that says why there is no answer."""

    status_code: int
    #: one sentence for people; the model's own message where it has one
    error: str
    error_type: ErrorType
    #: the model's JSON body, byte for byte, when it answered with JSON
    model_error: bytes | None = None


Result = Completed | Failed


class _ResultOnTheWire(msgspec.Struct):
    status: str
    status_code: int
    result: msgspec.Raw = msgspec.Raw(b"")


_RESULT_DECODER = msgspec.json.Decoder(_ResultOnTheWire)
_COMPLETED_HEAD = re.compile(
    rb'\s*\{\s*"status"\s*:\s*"completed"\s*,\s*"status_code"\s*:\s*([1-5][0-9]{2})\s*,\s*"result"\s*:\s*'
)


def encode_result(result: Result) -> bytes:
    """Write the value of `infer_resp:<request_id>`: strict UTF-8 JSON around the model's own bytes."""
    match result:
        case Completed():
            return b'{"status":"completed","status_code":%d,"result":%b}' % (result.status_code, result.body)
        case Failed():
            value = b'{"status":"failed","status_code":%d,"error":%b,"error_type":%b' % (
                result.status_code,
                msgspec.json.encode(result.error.encode(errors="replace").decode()),
                msgspec.json.encode(result.error_type.value),
            )
            return value + (b',"model_error":%b}' % result.model_error if result.model_error is not None else b"}")


def decode_completed(value: bytes) -> Completed | None:
    """Read a stored value back; None when it is not a `completed` result (another writer's junk included)."""
    try:
        wire = _RESULT_DECODER.decode(value)
    except (msgspec.DecodeError, RecursionError):
        # a completed result may hold what msgspec refuses (lone surrogates)
        return _decode_completed_slowly(value)
    # another version of this worker may write white space, or its members in another order
    return Completed(wire.status_code, bytes(wire.result)) if wire.status == "completed" else None


def _decode_completed_slowly(value: bytes) -> Completed | None:
    members = split_object(value.decode(errors="replace"))
    if members is None:
        # what nests too deeply for any parser is ours by its first bytes; then the result is all but the last brace
        match = _COMPLETED_HEAD.match(value)
        return Completed(int(match[1]), value[match.end() :].rstrip()[:-1].rstrip()) if match else None
    code = members.get("status_code", "")
    if members.get("status") != '"completed"' or not code.isdigit():
        return None
    return Completed(int(code[:3]), members.get("result", "").encode())


# -- what became of saving a result ----------------------------------------------------------------------------------


class Saved(msgspec.Struct, frozen=True):
    """Our value is under the key."""


class AlreadyCompleted(msgspec.Struct, frozen=True):
    """A `completed` result was there first and stays, byte for byte."""

    completed: Completed


class NotOurs(msgspec.Struct, frozen=True):
    """The key holds another attempt's `failed` result, and ours may not replace it: its session has ended."""


SaveOutcome = Saved | AlreadyCompleted | NotOurs
