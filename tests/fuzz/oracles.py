"""Plain second opinions on what the package decodes: slow, obvious, and none of its code.

JSON by the standard library's parser, event streams by the letter of the HTML standard, header tables by the grammar
that RabbitMQ's own parser takes.
"""

from __future__ import annotations

import json
import math
import re
import struct
from datetime import UTC, datetime
from typing import Any


class Number(str):
    """A JSON number as its text: nothing is rounded, and 1 is not true."""

    __slots__ = ()


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_int=Number, parse_float=Number)
_ORDERED = json.JSONDecoder(
    parse_constant=_refuse,
    parse_int=Number,
    parse_float=Number,
    object_pairs_hook=lambda pairs: ("object", tuple(pairs)),
)
#: brackets from which on parsers may give up, each at a depth of its own
_DEEP = 150


def is_deep(body: bytes) -> bool:
    """Whether the nesting may be near anybody's recursion limit."""
    return body.count(b"[") + body.count(b"{") > _DEEP


def strict_json(body: bytes) -> Any:
    """Parse JSON by the letter of RFC 8259 in strict UTF-8, numbers kept as text.

    Raises:  ValueError (it is none)
    """
    return _DECODER.decode(body.decode("utf-8"))


def ordered_json(body: bytes) -> Any:
    """The same with every member of an object, also those given twice: ("object", ((name, value), ...))."""
    return _ORDERED.decode(body.decode("utf-8"))


# -- requests ---------------------------------------------------------------------------------------------------------


def usable_id(value: Any) -> str | None:
    """Apply the rule on request ids."""
    if type(value) is not str or not 0 < len(value) <= 255:
        return None
    if any(sign.isspace() or sign < " " or "\x7f" <= sign <= "\x9f" or "\ud800" <= sign <= "\udfff" for sign in value):
        return None
    return value


def valid_request(body: bytes) -> tuple[str | None, tuple[str, float, float] | None]:
    """Apply the rules on requests: (the id that a result goes to, the valid request); None: there is none."""
    try:
        fields = strict_json(body)
    except ValueError:
        return None, None
    if type(fields) is not dict:
        return None, None
    request_id = usable_id(fields.get("request_id"))
    numbers = [fields.get("received_at"), fields.get("timeout_s")]
    if request_id is None or not all(type(number) is Number and math.isfinite(float(number)) for number in numbers):
        return request_id, None
    received_at, timeout_s = map(float, numbers)
    if received_at >= 1e11 or type(fields.get("payload")) is not dict:
        return request_id, None
    return request_id, (request_id, received_at, timeout_s)


def with_usage(value: Any) -> Any:
    """What an ordered payload must say once usage is asked for."""
    return _replaced(value, "stream_options", lambda options: _replaced(options, "include_usage", lambda _: True))


def _replaced(value: Any, name: str, change: Any) -> Any:
    members = list(value[1]) if isinstance(value, tuple) else []
    at = max((at for at, (known, _) in enumerate(members) if known == name), default=None)
    if at is None:
        members.append((name, change(("object", ()))))
    else:
        members[at] = (name, change(members[at][1]))
    return ("object", tuple(members))


# -- bodies -----------------------------------------------------------------------------------------------------------


def body_kind(body: bytes) -> str:
    """What a complete body is: "none", "other", "error", "aborted" or "answer"."""
    try:
        value = strict_json(body)
    except ValueError:
        return "none"
    if type(value) is not dict:
        return "other"
    if value.get("error") is not None or value.get("object") == "error":
        return "error"
    choices = value.get("choices")
    if type(choices) is list:
        reasons = [choice.get("finish_reason") for choice in choices if type(choice) is dict]
        if "abort" in [reason for reason in reasons if type(reason) is str]:
            return "aborted"
    return "answer"


def tokens(usage: Any) -> tuple[int, int] | None:
    """The two counts that a bill is made of, or None: both are non-negative integers below 2**53."""
    if type(usage) is not dict:
        return None
    counts = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
    if not all(type(count) is Number and re.fullmatch("[0-9]{1,16}", count) for count in counts):
        return None
    prompt, completion = map(int, counts)
    return (prompt, completion) if max(prompt, completion) < 2**53 else None


# -- event streams ----------------------------------------------------------------------------------------------------


def events_of(stream: bytes, max_event_bytes: int) -> tuple[list[bytes], bool]:
    """The events of a whole stream, and whether a line or an event in it is too long (what follows is not read)."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    *lines, rest = text.split(b"\n")
    events: list[bytes] = []
    data: list[bytes] = []
    for line in lines:
        if len(line) > max_event_bytes:
            return events, True
        if line == b"":
            if data:
                events.append(b"\n".join(data))
            data = []
            continue
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value[1:] if value[:1] == b" " else value)
            if len(b"\n".join(data)) > max_event_bytes:
                return events, True
    return events, len(rest) > max_event_bytes


# -- header tables ----------------------------------------------------------------------------------------------------

_FIXED = {
    b"t": ">B",
    b"b": ">b",
    b"B": ">B",
    b"s": ">h",
    b"u": ">H",
    b"I": ">i",
    b"i": ">I",
    b"l": ">q",
    b"f": ">f",
    b"d": ">d",
    b"T": ">Q",
}


class BadTable(ValueError):
    """RabbitMQ would end the connection of whoever publishes this."""


def table_of(encoded: bytes) -> dict[Any, Any]:
    """Decode the content of a header table as RabbitMQ's parser does: every length must fit exactly.

    Raises:  BadTable
    """
    table, at = {}, 0
    while at < len(encoded):
        end = at + 1 + encoded[at]
        if end >= len(encoded):
            raise BadTable
        name = _text(encoded[at + 1 : end])
        table[name], at = _value(encoded, end)
    return table


def _value(encoded: bytes, at: int) -> tuple[Any, int]:
    kind, at = encoded[at : at + 1], at + 1
    if kind == b"V":
        return None, at
    if kind in (b"S", b"x", b"A", b"F"):
        if at + 4 > len(encoded):
            raise BadTable
        start = at + 4
        end = start + int.from_bytes(encoded[at:start], "big")
        if end > len(encoded):
            raise BadTable
        content = encoded[start:end]
        if kind == b"S":
            return _text(content), end
        if kind == b"x":
            return content, end
        return (table_of(content) if kind == b"F" else _array(content)), end
    try:
        if kind == b"D":
            struct.unpack_from(">BI", encoded, at)
            return ..., at + 5
        (value,) = struct.unpack_from(_FIXED[kind], encoded, at)
    except (KeyError, struct.error) as err:
        raise BadTable from err
    if isinstance(value, float) and not math.isfinite(value):
        raise BadTable
    if kind == b"T":
        # a date where Python has one, for values that compare
        value = datetime.fromtimestamp(value, UTC) if value < 253_402_300_800 else value
    return (bool(value) if kind == b"t" else value), at + struct.calcsize(_FIXED[kind])


def _array(encoded: bytes) -> list[Any]:
    values, at = [], 0
    while at < len(encoded):
        value, at = _value(encoded, at)
        values.append(value)
    return values


def _text(encoded: bytes) -> str | bytes:
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return encoded
