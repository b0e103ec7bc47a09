"""Header values that pika reads wrongly: read as they are, and sent on as they came."""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from typing import Any

import pika.data
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.amqp_headers import Timestamp

MILLISECONDS = 1_772_000_000_000
NEGATIVE_JAVA_TIME = 18_446_744_073_695_295_616


def decode(table: bytes) -> dict[Any, Any]:
    return pika.data.decode_table(struct.pack(">I", len(table)) + table, 0)[0]


def encode(table: dict[str, Any]) -> bytes:
    pieces: list[bytes] = []
    pika.data.encode_table(pieces, table)
    return b"".join(pieces)[4:]


@pytest.mark.parametrize("seconds", [MILLISECONDS, NEGATIVE_JAVA_TIME])
def test_r29_a_timestamp_that_is_no_date_is_kept_and_sent_on_byte_for_byte(seconds: int) -> None:
    table = b"\x04when" + b"T" + struct.pack(">Q", seconds)
    headers = decode(table)
    assert headers == {"when": seconds}
    assert isinstance(headers["when"], Timestamp)
    assert encode(headers) == table


def test_a_timestamp_that_is_a_date_stays_one() -> None:
    table = b"\x04when" + b"T" + struct.pack(">Q", 1_772_000_000)
    assert decode(table) == {"when": datetime.fromtimestamp(1_772_000_000, UTC)}
    assert encode(decode(table)) == table


def test_r30_a_float_is_neither_cut_nor_refused_at_any_depth() -> None:
    headers = {"score": 3.5, "list": [0.25, {"deep": -1e300}], "table": {"x": 0.1}}
    assert decode(encode(headers)) == headers


def test_r30_a_short_float_keeps_its_value() -> None:
    assert decode(b"\x01f" + b"f" + struct.pack(">f", 0.25)) == {"f": 0.25}


def nested(depth: int, inner: bytes, *, kind: bytes) -> bytes:
    """A header table with one value: lists, or tables, so deep in each other."""
    value = inner
    for _ in range(depth):
        content = value if kind == b"A" else b"\x01k" + value
        value = kind + struct.pack(">I", len(content)) + content
    return b"\x04deep" + value


@pytest.mark.parametrize("kind", [b"A", b"F"])
@pytest.mark.parametrize("depth", [1, 15, 16, 17, 18, 400, 20_000])
def test_a_header_of_any_depth_is_read_and_sent_on_byte_for_byte(depth: int, kind: bytes) -> None:
    table = nested(depth, b"I\x00\x00\x00\x07", kind=kind)
    assert encode(decode(table)) == table


def test_what_is_behind_a_deep_header_is_read() -> None:
    headers = decode(nested(400, b"t\x01", kind=b"A") + b"\x05after" + b"I\x00\x00\x00\x07")
    assert headers["after"] == 7


def test_a_table_as_deep_as_programs_write_is_read() -> None:
    value = decode(nested(15, b"I\x00\x00\x00\x07", kind=b"F"))["deep"]
    for _ in range(15):
        value = value["k"]
    assert value == 7


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20).filter(lambda text: "\ud800" not in text),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=20), VALUES, max_size=5))
def test_what_is_encoded_is_decoded_to_the_same(headers: dict[str, Any]) -> None:
    assert decode(encode(headers)) == headers
