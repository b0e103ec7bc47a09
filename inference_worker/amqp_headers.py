"""Header values that pika reads wrongly or not at all: floats, and timestamps that are no date.

Knows pika. Imported for its effect, before the first connection, by `amqp_connection`. pika cuts a double to an integer
and cannot send one (R30); a timestamp in milliseconds raises inside its decoder, is reported as a lost stream, and
comes back at every reconnect: one message stops a deployment (R29). An integration test holds both on a real broker.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pika.data

#: kind and eight bytes
_LONG_SIZE = 9
#: kind and four bytes
_SHORT_SIZE = 5

_decode_other: Callable[[bytes, int], tuple[Any, int]] = pika.data.decode_value
_encode_other: Callable[[list[bytes], Any], int] = pika.data.encode_value


class Timestamp(int):
    """Seconds since 1970 as they came, unsigned, when they are no date that Python knows; sent on as they are."""


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
    return _decode_other(encoded, offset)


def encode_value(pieces: list[bytes], value: Any) -> int:
    """Encode one value of a header table; return how many bytes it takes."""
    if isinstance(value, float):
        pieces.append(struct.pack(">cd", b"d", value))
        return _LONG_SIZE
    if isinstance(value, Timestamp):
        pieces.append(struct.pack(">cQ", b"T", value))
        return _LONG_SIZE
    return _encode_other(pieces, value)


# pika's tables and arrays look both up by name in their module
pika.data.decode_value = decode_value
pika.data.encode_value = encode_value
