"""The wire format: what a request has to be, and what a result always is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.errors import MalformedRequest
from inference_worker.messages import (
    MAX_REQUEST_ID_CHARS,
    Completed,
    ErrorType,
    Failed,
    InferenceRequest,
    decode_completed,
    decode_request,
    encode_result,
)

MakeBody = Callable[..., bytes]


def _refusal(body: bytes) -> MalformedRequest:
    with pytest.raises(MalformedRequest) as caught:
        decode_request(body)
    return caught.value


def _strict(value: bytes) -> Any:
    """Parse as a reader does who takes JSON by the letter: UTF-8, no NaN, no infinities."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} in a result")

    return json.loads(value.decode("utf-8"), parse_constant=refuse)


def _objects(text: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    values = st.recursive(
        st.none() | st.booleans() | numbers | text,
        lambda children: st.lists(children, max_size=3) | st.dictionaries(text, children, max_size=3),
        max_leaves=8,
    )
    return st.dictionaries(text, values, max_size=4)


_OBJECTS = _objects(st.text())
#: by chance alone a surrogate is rare
_TEXTS_WITH_LONE_SURROGATES = st.lists(st.sampled_from("\ud83d\udc00\\") | st.characters(codec=None)).map("".join)
_OBJECTS_WITH_LONE_SURROGATES = _objects(_TEXTS_WITH_LONE_SURROGATES)


# -- valid requests ---------------------------------------------------------------------------------------------------


def test_valid_request_is_taken_apart(make_body: MakeBody) -> None:
    request = decode_request(make_body(received_at=1_772_000_000, timeout_s=30))
    assert (request.request_id, request.received_at, request.timeout_s) == ("r-1", 1_772_000_000.0, 30.0)
    assert json.loads(request.payload)["model"] == "m"


def test_payload_is_kept_byte_for_byte() -> None:
    payload = b'{ "b" : 1.0, "a":1e999, "n":10000000000000000000000000000000000000001, "x":"\xc3\xa9\\u00e9", "a":2 }'
    body = b'{"payload":' + payload + b',"request_id":"r","received_at":1,"timeout_s":2}'
    assert decode_request(body).payload == payload


@given(_OBJECTS, st.sampled_from([None, 1]), st.booleans())
def test_any_json_object_is_a_payload_and_comes_out_unchanged(
    payload: dict[str, Any], indent: int | None, ensure_ascii: bool
) -> None:
    text = json.dumps(payload, indent=indent, ensure_ascii=ensure_ascii)
    body = b'{"request_id":"r","received_at":1,"timeout_s":2,"payload":%b}' % text.encode()
    assert decode_request(body).payload == text.encode()


def test_unknown_fields_are_ignored(make_body: MakeBody) -> None:
    assert decode_request(make_body(priority=7, payload_={"x": 1})).request_id == "r-1"


def test_of_a_field_given_twice_the_last_counts() -> None:
    body = b'{"request_id":5,"request_id":"r","received_at":"x","received_at":1,"timeout_s":2,"payload":1,"payload":{}}'
    assert decode_request(body) == InferenceRequest("r", 1.0, 2.0, b"{}")


@pytest.mark.parametrize("timeout_s", [0, -1, -1e300, 1e300, 5e-324])
def test_any_finite_timeout_is_valid(make_body: MakeBody, timeout_s: float) -> None:
    assert decode_request(make_body(timeout_s=timeout_s)).timeout_s == timeout_s


def test_payload_of_the_seeds_example_is_an_object_of_any_content(make_body: MakeBody) -> None:
    assert decode_request(make_body(payload={})).payload == b"{}"


# -- request_id -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", ["a", "x" * MAX_REQUEST_ID_CHARS, "ü", "请求-1", "a/b:c?d#e%20", "\ufffd", "😀"])
def test_usable_request_ids(make_body: MakeBody, request_id: str) -> None:
    assert decode_request(make_body(request_id=request_id)).request_id == request_id


@pytest.mark.parametrize(
    "request_id",
    [
        *(
            "",
            "x" * (MAX_REQUEST_ID_CHARS + 1),
            "a b",
            " a",
            "a\n",
            "a\tb",
            "\u00a0",
            "a\u2028",
            "a\x00",
            "a\x7f",
            "a\x85",
        ),
        *(None, 5, 1.5, True, ["a"], {"a": "b"}, ...),
    ],
)
def test_unusable_request_ids_name_the_field_and_leave_no_key(make_body: MakeBody, request_id: Any) -> None:
    refusal = _refusal(make_body(request_id=request_id))
    assert (refusal.field, refusal.request_id) == ("request_id", None)
    assert "request_id" in str(refusal)


@given(st.text())
def test_accepted_request_ids_fit_a_key_and_a_header(request_id: str) -> None:
    body = json.dumps({"request_id": request_id, "received_at": 1, "timeout_s": 1, "payload": {}}).encode()
    try:
        accepted = decode_request(body).request_id
    except MalformedRequest:
        return
    assert accepted == request_id
    assert 0 < len(accepted) <= MAX_REQUEST_ID_CHARS
    assert accepted.split() == [accepted]
    accepted.encode()


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["received_at", "timeout_s"])
@pytest.mark.parametrize(
    "value",
    [
        *("2026-01-01T00:00:00", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00+08:00", "1772000000", ""),
        *(None, True, [], {}, ...),
    ],
)
def test_r56_what_is_no_number_is_refused_by_name(make_body: MakeBody, field: str, value: Any) -> None:
    refusal = _refusal(make_body(**{field: value}))
    assert (refusal.field, refusal.request_id) == (field, "r-1")
    assert field in str(refusal)


@pytest.mark.parametrize("field", ["received_at", "timeout_s"])
@pytest.mark.parametrize("digits", ["1e309", "-1e309", "1" + "0" * 400, "-1" + "0" * 400, '"NaN"', "1" + "0" * 5000])
def test_r57_what_overflows_a_float_is_refused_by_name(field: str, digits: str) -> None:
    fields = {"request_id": '"r-1"', "received_at": "1", "timeout_s": "1", "payload": "{}", field: digits}
    body = "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"
    refusal = _refusal(body.encode())
    assert (refusal.field, refusal.request_id) == (field, "r-1")


@pytest.mark.parametrize("word", [b"NaN", b"Infinity", b"-Infinity", b"nan"])
@pytest.mark.parametrize("field", [b"received_at", b"timeout_s", b"payload", b"other"])
def test_r57_bare_constants_make_the_body_no_json_but_its_id_is_found(word: bytes, field: bytes) -> None:
    refusal = _refusal(b'{"request_id":"r-1","received_at":1,"timeout_s":1,"payload":{},"%b":%b}' % (field, word))
    assert (refusal.field, refusal.request_id) == (None, "r-1")


def test_r44_nan_inside_the_payload_is_refused() -> None:
    body = b'{"request_id":"r-1","received_at":1,"timeout_s":1,"payload":{"temperature": NaN}}'
    assert _refusal(body).request_id == "r-1"


@pytest.mark.parametrize("received_at", [1e11, 1_772_000_000_000, 946_684_800_000, 1.772e15, 1.772e18, 1e300])
def test_r55_milliseconds_are_refused_as_such(make_body: MakeBody, received_at: float) -> None:
    refusal = _refusal(make_body(received_at=received_at))
    assert (refusal.field, refusal.request_id) == ("received_at", "r-1")
    assert "received_at" in str(refusal)
    assert "milliseconds?" in str(refusal)


@pytest.mark.parametrize("received_at", [99_999_999_999.9, 1_772_000_000, 0, -1])
def test_r55_what_is_below_is_taken_as_seconds(make_body: MakeBody, received_at: float) -> None:
    assert decode_request(make_body(received_at=received_at)).received_at == received_at


@given(st.floats() | st.integers())
def test_an_accepted_time_is_finite(number: float) -> None:
    body = json.dumps({"request_id": "r", "received_at": number, "timeout_s": number, "payload": {}}).encode()
    try:
        request = decode_request(body)
    except MalformedRequest:
        return
    assert math.isfinite(request.received_at)
    assert math.isfinite(request.timeout_s)
    assert request.received_at < 1e11


# -- payload ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [None, [], "{}", 1, True, ...])
def test_payload_that_is_no_object_is_refused_by_name(make_body: MakeBody, payload: Any) -> None:
    refusal = _refusal(make_body(payload=payload))
    assert (refusal.field, refusal.request_id) == ("payload", "r-1")


# -- bodies that are no request ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"null", b"[]", b'"r-1"', b"{", b"hello", b"\x00", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"{} {}"],
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    refusal = _refusal(body)
    assert (refusal.field, refusal.request_id) == (None, None)


def test_id_of_a_body_cut_off_is_found() -> None:
    assert _refusal(b'{"request_id":"r-1","received_at":1,"payload":{"mess').request_id == "r-1"


def test_id_of_a_body_that_is_no_utf8_is_found() -> None:
    refusal = _refusal(b'{"request_id":"r-1","received_at":1,"timeout_s":1,"payload":{"a":"\xff"}}')
    assert (refusal.field, refusal.request_id) == (None, "r-1")
    assert "UTF-8" in str(refusal)


def test_id_that_is_no_utf8_itself_is_not_made_up() -> None:
    assert _refusal(b'{"request_id":"r-\xff","received_at":1,"timeout_s":1,"payload":{}}').request_id is None


def test_r45_lone_surrogate_in_the_payload_goes_through_byte_for_byte() -> None:
    payload = rb'{"messages":[{"content":"\udc00 \uD83D"}]}'
    body = b'{"request_id":"r-1", "received_at": 1, "timeout_s":2.5 ,"payload": ' + payload + b" }"
    assert decode_request(body) == InferenceRequest("r-1", 1.0, 2.5, payload)


def test_r45_lone_surrogate_in_the_request_id_leaves_no_key() -> None:
    refusal = _refusal(rb'{"request_id":"a\ud800","received_at":1,"timeout_s":1,"payload":{}}')
    assert (refusal.field, refusal.request_id) == ("request_id", None)


def test_r45_lone_surrogate_beside_another_fault_is_that_fault() -> None:
    refusal = _refusal(rb'{"request_id":"r-1","received_at":"x","timeout_s":1,"payload":{"a":"\ud800"}}')
    assert (refusal.field, refusal.request_id) == ("received_at", "r-1")


def test_r46_deep_nesting_without_an_id_is_refused() -> None:
    refusal = _refusal(b"[" * 20_000 + b"]" * 20_000)
    assert (refusal.field, refusal.request_id) == (None, None)


def test_r46_payload_nested_900_deep_goes_through() -> None:
    payload = b'{"a":' + b"[" * 899 + b"]" * 899 + b"}"
    assert decode_request(b'{"request_id":"r","received_at":1,"timeout_s":1,"payload":%b}' % payload).payload == payload


@pytest.mark.parametrize("order", ["id first", "id last"])
def test_r46_payload_nested_20000_deep_is_refused_and_its_id_is_found(order: str) -> None:
    payload = b'"payload":{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    request_id = b'"request_id":"r-1"'
    parts = (request_id, payload) if order == "id first" else (payload, request_id)
    refusal = _refusal(b"{" + b",".join(parts) + b',"received_at":1,"timeout_s":1}')
    assert (refusal.field, refusal.request_id) == (None, "r-1")


def _decode(body: bytes) -> InferenceRequest | MalformedRequest:
    try:
        return decode_request(body)
    except MalformedRequest as err:
        return err


@given(st.binary(max_size=200))
def test_decoding_raises_nothing_but_malformed_request(body: bytes) -> None:
    assert str(_decode(body))


@given(st.data())
def test_decoding_a_damaged_request_raises_nothing_but_malformed_request(data: st.DataObject) -> None:
    whole = rb'{"request_id":"r-1","received_at":1772000000.5,"timeout_s":60,"payload":{"a":[1,"\ud83d",null]}}'
    body = bytearray(whole)
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        body[at] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'{}[]",:\\0eE-')))
    found = _decode(bytes(body[: data.draw(st.integers(0, len(whole)))]))
    if isinstance(found, InferenceRequest):
        assert found.payload in bytes(body)
    else:
        assert found.request_id is None or found.request_id.split() == [found.request_id]


def test_refusal_shows_nothing_of_the_payload() -> None:
    refusal = _refusal(b'{"request_id":"r-1","received_at":1,"timeout_s":1,"payload":{"a":"SECRET" "b"}}')
    assert "SECRET" not in str(refusal)


# -- results ----------------------------------------------------------------------------------------------------------


def test_completed_result_is_as_the_specification_writes_it() -> None:
    value = encode_result(Completed(200, b'{"choices": []}'))
    assert value == b'{"status":"completed","status_code":200,"result":{"choices": []}}'


def test_failed_result_tells_why() -> None:
    value = encode_result(Failed(404, 'no "model"', ErrorType.MODEL_ERROR, b'{"error": {"code":404}}'))
    assert _strict(value) == {
        "status": "failed",
        "status_code": 404,
        "error": 'no "model"',
        "error_type": "model_error",
        "model_error": {"error": {"code": 404}},
    }
    assert b'{"error": {"code":404}}' in value


def test_failed_result_without_a_models_body_has_no_such_member() -> None:
    assert "model_error" not in _strict(encode_result(Failed(408, "late", ErrorType.EXPIRED)))


def test_error_types_are_the_closed_list_of_the_contract() -> None:
    listed = {"malformed_request", "expired", "model_error", "model_unavailable", "invalid_model_answer"}
    assert {kind.value for kind in ErrorType} == {*listed, "cancelled", "too_many_redeliveries", "internal_error"}


@given(_TEXTS_WITH_LONE_SURROGATES, st.sampled_from(list(ErrorType)), st.integers(400, 599))
def test_any_failed_result_is_strict_utf8_json(error: str, error_type: ErrorType, status_code: int) -> None:
    value = _strict(encode_result(Failed(status_code, error, error_type)))
    assert value["error"] == error.encode(errors="replace").decode()
    assert (value["status"], value["status_code"], value["error_type"]) == ("failed", status_code, error_type.value)
    assert decode_completed(encode_result(Failed(status_code, error, error_type))) is None


@given(_OBJECTS_WITH_LONE_SURROGATES, st.integers(200, 299), st.sampled_from([None, 1]))
def test_completed_result_is_strict_json_and_read_back_as_it_was(
    content: dict[str, Any], status_code: int, indent: int | None
) -> None:
    body = json.dumps(content, indent=indent).encode()
    value = encode_result(Completed(status_code, body))
    # two halves that meet are a pair once they are read
    assert _strict(value) == {"status": "completed", "status_code": status_code, "result": json.loads(body)}
    assert decode_completed(value) == Completed(status_code, body)


@pytest.mark.parametrize(
    "body",
    [
        rb'{"content":"\ud83d"}',
        b'{"a":' + b"[" * 990 + b"]" * 990 + b"}",
        rb'{"x":",\"result\":","y":"\udc00"}',
        b'{"usage":{"prompt_tokens":1e999}}',
    ],
    ids=["lone surrogate", "deep", "looks like the head", "beyond a float"],
)
def test_r45_completed_result_is_found_whatever_the_fast_decoder_makes_of_it(body: bytes) -> None:
    assert decode_completed(encode_result(Completed(201, body))) == Completed(201, body)


@pytest.mark.parametrize(
    "value",
    [
        b'{"status": "completed", "status_code": 200, "result": {"a": "\\ud83d"}}',
        b'{"status_code":200,"result":{"a":"\\ud83d"},"status":"completed"}',
        b'{\n "status": "completed",\n "status_code": 200,\n "result": {"a": "\\ud83d"}\n}\n',
    ],
)
def test_completed_result_of_another_version_is_one_too(value: bytes) -> None:
    plain = value.replace(b"\\ud83d", b"x")
    assert decode_completed(plain) is not None
    assert decode_completed(value) is not None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"junk",
        b"null",
        b"[]",
        b'"completed"',
        b'{"status":"pending"}',
        b'{"status":"failed","status_code":500,"error":"\\ud83d"}',
        b'{"status":"failed","status_code":500,"error":"{\\"status\\":\\"completed\\"}"}',
        b'{"result":{"status":"completed"},"status":"failed","status_code":500}',
        b"\xff\xfe",
        b"[" * 20_000,
    ],
)
def test_anything_else_is_no_completed_result(value: bytes) -> None:
    assert decode_completed(value) is None


@given(st.binary() | st.binary().map(lambda tail: b'{"status":"completed","status_code":200,"result":' + tail))
def test_reading_back_never_raises(value: bytes) -> None:
    found = decode_completed(value)
    assert found is None or isinstance(found, Completed)
