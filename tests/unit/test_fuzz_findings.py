"""What the fuzzing has found, smallest inputs first (docs/fuzzing.md)."""

from __future__ import annotations

import struct

import pika
import pytest

from inference_worker import amqp_headers
from inference_worker.disposition import ModelError
from inference_worker.documents import decode_usage
from inference_worker.messages import Completed, InferenceRequest, decode_completed
from inference_worker.model_answer import BodyKind, read_body
from inference_worker.model_client import ModelClient
from tests.fuzz.inputs import nested
from tests.fuzz.targets import Answer, FixedExchange, model_settings

REQUEST = InferenceRequest("r-1", 1.0, 60.0, b"{}")

# -- F1: a few hundred arrays or tables in each other (2.5 KB) raised RecursionError inside pika's reader -------------


@pytest.mark.parametrize("in_arrays", [True, False])
@pytest.mark.parametrize("levels", [15, 16, 17, 330, 500, 20_000])
def test_f1_a_header_nested_to_any_depth_is_read_and_goes_on_as_it_came(levels: int, in_arrays: bool) -> None:
    assert amqp_headers.decode_value is pika.data.decode_value
    table = b"\x04deep" + nested(b"t\x01", levels, in_arrays=in_arrays) + b"\x0dx-retry-countI\0\0\0\x02"
    encoded = b"\x20\x00" + struct.pack(">I", len(table)) + table
    properties = pika.BasicProperties().decode(encoded)
    assert list(properties.headers) == ["deep", "x-retry-count"]
    assert properties.headers["x-retry-count"] == 2
    deep = pika.BasicProperties(headers={"deep": properties.headers["deep"]})
    assert b"".join(deep.encode())[6:] == table[: -len(b"\x0dx-retry-countI\0\0\0\x02")]


# -- F2: a JSON string with half a surrogate pair was taken for no JSON, and an error's body was not kept --------------


@pytest.mark.parametrize("body", [rb'"\ude00"', rb'"\ud83dx"', rb' "a\uD83D" ', rb'["\ude00"]'])
def test_f2_a_text_with_a_lone_surrogate_is_json_but_no_object(body: bytes) -> None:
    assert read_body(body).kind is BodyKind.OTHER_JSON


@pytest.mark.parametrize("body", [rb'"\ude00', rb'"\ude00" x', rb'"\ude0"', b'"\xff\\ude00"'])
def test_f2_a_text_with_a_lone_surrogate_that_is_no_json_stays_none(body: bytes) -> None:
    assert read_body(body).kind in (BodyKind.NO_JSON, BodyKind.TRUNCATED)


def test_f2_an_error_whose_body_is_a_text_with_a_lone_surrogate_keeps_it() -> None:
    answer = Answer(400, {}, rb' "\ude00"', True)
    outcome = ModelClient(model_settings(1024), FixedExchange(answer)).infer(REQUEST, trace={}).outcome
    assert isinstance(outcome, ModelError)
    assert outcome.model_error == rb'"\ude00"'


# -- F3: a junk row of the outbox, nested deeply, raised RecursionError at the start -----------------------------------


def test_f3_what_is_nested_too_deeply_is_no_usage_event() -> None:
    assert decode_usage(b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}") is None


# -- F4: a stored result with a lone surrogate and a member behind `result` was read back with a body that is no JSON


@pytest.mark.parametrize(
    "value",
    [
        rb'{"status":"completed","status_code":200,"result":{"a":"\ud83d"},"x":1}',
        rb'{"status":"completed","status_code":200,"result":1,"result":{"a":"\ud83d"},"status":"completed"}',
    ],
    ids=["another member", "given twice"],
)
def test_f4_a_stored_result_ends_where_its_member_ends(value: bytes) -> None:
    assert decode_completed(value) == Completed(200, rb'{"a":"\ud83d"}')


def test_f4_a_stored_value_that_says_failed_at_last_is_no_completed_one() -> None:
    assert (
        decode_completed(rb'{"status":"completed","status_code":200,"result":{"a":"\ud83d"},"status":"failed"}') is None
    )
