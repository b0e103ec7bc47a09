"""What the body of a model server's answer says: is it an answer, an error, an abort; its tokens and its timings.

Pure: any thread, no I/O. Knows how OpenAI, vLLM and their like write their bodies. Nothing here re-serialises a body.
Sources: design sections 5 and 8; facts on vLLM 0.32; field reports R41-R46, R73.
"""

from __future__ import annotations

import codecs
import re
from enum import StrEnum
from typing import Any

import msgspec

from inference_worker.json_text import has_surrogate_escape, is_json, split_object, to_value

#: values of `error` in an answer that has none
NO_ERROR = frozenset({b"", b"null", b"false", b'""'})


class BodyKind(StrEnum):
    """What a complete body is."""

    #: a JSON object that is no error
    ANSWER = "answer"
    #: a JSON object that says that it is an error
    ERROR = "error"
    #: a JSON object whose generation the server broke off (`finish_reason: "abort"`): the model is going away
    ABORTED = "aborted"
    #: JSON, but no object
    OTHER_JSON = "other_json"
    #: no JSON, and more bytes would not make it JSON
    NO_JSON = "no_json"
    #: JSON that stops short
    TRUNCATED = "truncated"


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one answer: non-negative integers. The total is our own sum, since a server's may be wrong (R73)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Timings(msgspec.Struct, frozen=True):
    """Seconds; None is unknown."""

    #: time to first token
    ttft_s: float | None = None
    #: mean time between tokens
    tbt_s: float | None = None


class BodyFacts(msgspec.Struct, frozen=True):
    """All that is read from a body, in one pass."""

    kind: BodyKind
    #: the server's own words, when kind is ERROR or the status was 4xx or 5xx
    error_message: str | None = None
    usage: Usage | None = None
    timings: Timings = Timings()


class _Body(msgspec.Struct):
    """Kept raw, each read leniently: a strange `usage` must not cost the answer (R73)."""

    object: msgspec.Raw = msgspec.Raw(b"")
    error: msgspec.Raw = msgspec.Raw(b"")
    message: msgspec.Raw = msgspec.Raw(b"")
    detail: msgspec.Raw = msgspec.Raw(b"")
    choices: msgspec.Raw = msgspec.Raw(b"")
    usage: msgspec.Raw = msgspec.Raw(b"")
    metrics: msgspec.Raw = msgspec.Raw(b"")


class _Choice(msgspec.Struct):
    finish_reason: msgspec.Raw = msgspec.Raw(b"")


_BODY_DECODER = msgspec.json.Decoder(_Body)
_CHOICES_DECODER = msgspec.json.Decoder(list[_Choice])
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def read_body(body: bytes) -> BodyFacts:
    """Check a complete body (UTF-8, JSON grammar) and read what it says, in one pass and without a copy of it."""
    text = _decode_utf8(body)
    if text is None:
        return BodyFacts(_classify_no_json(body))
    try:
        fields = _BODY_DECODER.decode(body)
    except RecursionError:
        return BodyFacts(BodyKind.NO_JSON)
    except msgspec.ValidationError:
        return BodyFacts(_classify_no_object(body, text))
    except msgspec.DecodeError:
        has_surrogates = has_surrogate_escape(text)
        members = split_object(text) if has_surrogates else None
        if members is None:
            # a string with a lone surrogate is refused before it is seen that it is no object
            is_other = has_surrogates and is_json(text)
            return BodyFacts(BodyKind.OTHER_JSON if is_other else _classify_no_json(body))
        names = _Body.__struct_fields__
        fields = _Body(**{n: msgspec.Raw(members[n].encode()) for n in names if n in members})
    return BodyFacts(_classify(fields), _error_message(fields), _usage(fields.usage), _timings(fields.metrics))


def _classify_no_object(body: bytes, text: str) -> BodyKind:
    """Look at the rest of a body that begins like JSON but not like an object: msgspec stopped at its first byte."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except RecursionError:
        return BodyKind.NO_JSON
    except msgspec.DecodeError:
        return BodyKind.OTHER_JSON if has_surrogate_escape(text) and is_json(text) else BodyKind.NO_JSON
    return BodyKind.OTHER_JSON


def _classify_no_json(body: bytes) -> BodyKind:
    """Tell JSON that stops short, wherever it was cut, from what no further byte would make JSON (R41)."""
    try:
        # not final: a letter may be cut in its middle
        _, length = codecs.utf_8_decode(body, "strict", False)
    except UnicodeDecodeError:
        return BodyKind.NO_JSON
    # lone surrogates are no end of the text, though msgspec complains of them, and in the same words
    body = _SURROGATE_ESCAPE.sub(rb"\\u0041", body[:length])
    # the second look: a number may stop short where it must not end, as in `-`, `1.` and `1e+`
    return BodyKind.TRUNCATED if _stops_short(body) or _stops_short(body + b"0") else BodyKind.NO_JSON


def _stops_short(body: bytes) -> bool:
    try:
        _BODY_DECODER.decode(body)
    except msgspec.ValidationError:
        return False
    except msgspec.DecodeError as err:
        return "truncated" in str(err)
    except RecursionError:
        return False
    return False


def _decode_utf8(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _lenient(raw: msgspec.Raw) -> Any:
    """Read a small member; None for what cannot be read or is not there."""
    if not bytes(raw):
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        # legal all the same: a lone surrogate, or a number that fits no float, beside what we look for
        return to_value(bytes(raw).decode())


def _classify(fields: _Body) -> BodyKind:
    if bytes(fields.error) not in NO_ERROR or _lenient(fields.object) == "error":
        return BodyKind.ERROR
    try:
        choices = _CHOICES_DECODER.decode(fields.choices)
        aborted = any(bytes(choice.finish_reason) == b'"abort"' for choice in choices)
    except (msgspec.DecodeError, RecursionError):
        # a text that was cut off may well end in half a surrogate pair
        found = _lenient(fields.choices)
        choices_found = found if isinstance(found, list) else []
        aborted = any(isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices_found)
    return BodyKind.ABORTED if aborted else BodyKind.ANSWER


def _error_message(fields: _Body) -> str | None:
    """OpenAI and vLLM: {"error":{"message"}}; older: {"message"}; FastAPI: {"detail"}; no key: {"error":"..."}."""
    error = _lenient(fields.error)
    found = error.get("message") if isinstance(error, dict) else error
    for candidate in (found, _lenient(fields.message), _lenient(fields.detail)):
        if isinstance(candidate, str) and candidate.strip():
            return candidate
    return None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _usage(raw: msgspec.Raw) -> Usage | None:
    usage = _lenient(raw)
    if not isinstance(usage, dict):
        return None
    prompt, completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if prompt is None or completion is None:
        return None
    details = usage.get("prompt_tokens_details")
    return Usage(prompt, completion, _count(details.get("cached_tokens")) if isinstance(details, dict) else None)


def _timings(raw: msgspec.Raw) -> Timings:
    """vLLM's `metrics` (--enable-per-request-metrics). Its time to first token counts from scheduling, not arrival."""
    metrics = _lenient(raw)
    if not isinstance(metrics, dict):
        return Timings()
    queued = to_seconds(metrics.get("queue_time_ms"))
    first = to_seconds(metrics.get("time_to_first_token_ms"))
    ttft = None if queued is None or first is None else queued + first
    return Timings(ttft, to_seconds(metrics.get("mean_itl_ms")))


def to_seconds(milliseconds: Any) -> float | None:
    """Convert milliseconds as a number or as text (a header's); None for anything that is not a finite time."""
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, (int, float, str)):
        return None
    try:
        value = float(milliseconds) / 1000
    except (ValueError, OverflowError):
        return None
    return value if 0 <= value < float("inf") else None
