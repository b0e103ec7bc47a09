"""Header values that pika reads wrongly or not at all: floats, timestamps that are no date, and deep nesting.

Knows pika. Imported for its effect, before the first connection, by `amqp_connection`. pika cuts a double to an integer
and cannot send one (R30); a timestamp in milliseconds, or a few hundred lists in each other, raises inside its decoder,
is reported as a lost stream, and comes back at every reconnect: one message stops a deployment (R29). An integration
test holds these on a real broker.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pika.data

#: kind and eight bytes
_LONG_SIZE = 9
#: kind and four bytes
_SHORT_SIZE = 5
#: deeper than any header that a program reads, and far from the recursion limit, whatever stack we are called on
_MAX_DEPTH = 16

_decode_other: Callable[[bytes, int], tuple[Any, int]] = pika.data.decode_value
_encode_other: Callable[[list[bytes], Any], int] = pika.data.encode_value


class Timestamp(int):
    """Seconds since 1970 as they came, unsigned, when they are no date that Python knows; sent on as they are."""


class Nested(bytes):
    """A table or an array as it came, with its kind and length: it is nested too deeply to be read, and is sent on."""


class _Depth(threading.local):
    value = 0


#: of the value that this thread decodes: slots read from connections of their own
_depth = _Depth()


def decode_value(encoded: bytes, offset: int) -> tuple[Any, int]:
    """Decode one value of a header table: (value, where the next begins)."""
    kind = encoded[offset : offset + 1]
    if kind == b"d":
        return struct.unpack_from(">d", encoded, offset + 1)[0], offset + _LONG_SIZE
    if kind == b"f":
        return struct.unpack_from(">f", encoded, offset + 1)[0], offset + _SHORT_SIZE
    if kind == b"T":
        seconds = struct.unpack_from(">Q", encoded, offset + 1)[0]
        try:
            return datetime.fromtimestamp(seconds, UTC), offset + _LONG_SIZE
        except (ValueError, OverflowError, OSError):
            return Timestamp(seconds), offset + _LONG_SIZE
    if kind in (b"A", b"F"):
        return _decode_nested(encoded, offset)
    return _decode_other(encoded, offset)


def _decode_nested(encoded: bytes, offset: int) -> tuple[Any, int]:
    if _depth.value >= _MAX_DEPTH:
        end = offset + _SHORT_SIZE + int(struct.unpack_from(">I", encoded, offset + 1)[0])
        return Nested(encoded[offset:end]), end
    _depth.value += 1
    try:
        return _decode_other(encoded, offset)
    finally:
        _depth.value -= 1


def encode_value(pieces: list[bytes], value: Any) -> int:
    """Encode one value of a header table; return how many bytes it takes."""
    if isinstance(value, float):
        pieces.append(struct.pack(">cd", b"d", value))
        return _LONG_SIZE
    if isinstance(value, Timestamp):
        pieces.append(struct.pack(">cQ", b"T", value))
        return _LONG_SIZE
    if isinstance(value, Nested):
        pieces.append(bytes(value))
        return len(value)
    return _encode_other(pieces, value)


# pika's tables and arrays look both up by name in their module
pika.data.decode_value = decode_value
pika.data.encode_value = encode_value
