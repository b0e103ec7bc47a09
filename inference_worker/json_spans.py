"""Where the values of a JSON text begin and end, in bytes: to edit or join them without parsing and dumping again.

Pure: any thread, no I/O. So a number is never rounded, and an escape or the order of members never changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import msgspec

from inference_worker.json_text import check_utf8, has_surrogate_escape, is_json

_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^\s,:\[\]{}\"]++")
#: the next bracket inside a value, with all before it, strings whole: depth is counted and not recursed into (R46)
_NESTED = re.compile(rb'(?:[^"{}\[\]]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+[{}\[\]]', re.DOTALL)


class NotJson(Exception):
    """Raised where bytes that were taken for JSON make no sense. Caught by whoever looks into them."""


def space_end(text: bytes, at: int) -> int:
    """Skip white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _value_end(text: bytes, start: int) -> int:
    sign = text[start : start + 1]
    if sign not in (b"{", b"["):
        match = (_STRING if sign == b'"' else _SCALAR).match(text, start)
        if match is None:
            raise NotJson
        return match.end()
    depth = 0
    while match := _NESTED.match(text, start):
        start = match.end()
        depth += 1 if text[start - 1] in b"{[" else -1
        if depth == 0:
            return start
    raise NotJson


def spans(text: bytes, start: int, closing: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Walk the members of the object, or the elements of the array, at `start`: (name, start of the value, its end).

    Shapes:  the text has been checked to be JSON; of an element the name is b""
    Raises:  NotJson, where a text that was not checked makes no sense
    """
    at = space_end(text, start + 1)
    while text[at : at + 1] != closing:
        name = b""
        if closing == b"}":
            match = _STRING.match(text, at)
            if match is None:
                raise NotJson
            name, at = match.group(), space_end(text, match.end())
            if text[at : at + 1] != b":":
                raise NotJson
            at = space_end(text, at + 1)
        end = _value_end(text, at)
        yield name, at, end
        at = space_end(text, end)
        if text[at : at + 1] == b",":
            at = space_end(text, at + 1)
        elif text[at : at + 1] != closing:
            raise NotJson


def decode_name(raw: bytes) -> str:
    """Read a string with its quotes.

    Raises:  NotJson
    """
    try:
        name: str = json.loads(raw.decode())
    except ValueError as err:
        raise NotJson from err
    return name


def last_span(text: bytes, start: int, wanted: str) -> tuple[tuple[int, int] | None, int | None]:
    """Find the member that counts, the last of its name, and where the last member of all ends."""
    found, end_of_all = None, None
    for name, at, end in spans(text, start, b"}"):
        end_of_all = end
        if decode_name(name) == wanted:
            found = (at, end)
    return found, end_of_all


def encode_object(members: Mapping[str, bytes]) -> bytes:
    """Put an object together again."""
    return b"{%b}" % b",".join(b"%b:%b" % (json.dumps(name).encode(), raw) for name, raw in members.items())


_OBJECT_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY_DECODER = msgspec.json.Decoder(list[msgspec.Raw])


def members_of(raw: bytes | msgspec.Raw) -> Mapping[str, bytes | msgspec.Raw]:
    """Take an object apart; of a name given twice the last counts. The bytes have been checked to be JSON.

    Raises:  NotJson (it is no object)
    """
    try:
        return _OBJECT_DECODER.decode(raw)
    except msgspec.ValidationError as err:
        raise NotJson from err
    except msgspec.DecodeError as err:
        # a lone surrogate escape: legal grammar, but not for msgspec (R45)
        text = bytes(raw).strip()
        if not text.startswith(b"{"):
            raise NotJson from err
        return {decode_name(name): text[at:end] for name, at, end in spans(text, 0, b"}")}


def checked_members_of(data: bytes) -> Mapping[str, bytes | msgspec.Raw]:
    """Check that the bytes are a JSON object in UTF-8, and take it apart.

    Raises:  NotJson, UnicodeDecodeError, RecursionError
    """
    # msgspec does not look at the bytes of what it keeps raw
    check_utf8(data)
    try:
        return _OBJECT_DECODER.decode(data)
    except msgspec.DecodeError as err:
        text = data.decode()
        if not has_surrogate_escape(text) or not is_json(text):
            raise NotJson from err
        return members_of(data)


def elements_of(raw: bytes | msgspec.Raw) -> list[msgspec.Raw] | list[bytes]:
    """Take an array apart, as `members_of` does an object; null has no elements."""
    text = bytes(raw)
    if text == b"null":
        return []
    if not text.startswith(b"["):
        raise NotJson
    try:
        return _ARRAY_DECODER.decode(text)
    except msgspec.DecodeError:
        return [text[at:end] for _, at, end in spans(text, 0, b"]")]
