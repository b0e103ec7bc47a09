"""The laws of the fuzz targets, on their seeds and on what hypothesis makes up: without a fuzzer, in `make test`.

`tests/fuzz/targets.py` says what must hold of each decoder for any bytes; docs/fuzzing.md lists it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_worker.documents import UsageData, UsageEvent, decode_usage, encode_usage
from inference_worker.json_spans import NotJson, checked_members_of, elements_of, members_of, spans
from tests.fuzz.inputs import expand
from tests.fuzz.oracles import strict_json
from tests.fuzz.seeds import inputs_of, seed_bodies
from tests.fuzz.targets import TARGETS, Target

_TARGETS = list(TARGETS.values())
_names = {"ids": [target.name for target in _TARGETS]}

# -- every decoder ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", _TARGETS, **_names)
def test_every_seed_keeps_the_laws(target: Target) -> None:
    inputs = inputs_of(target)
    assert inputs
    for data in inputs:
        target.check(data)


@pytest.mark.parametrize("target", [target for target in _TARGETS if target.tokens], ids=lambda target: target.name)
def test_a_seed_written_in_tokens_says_the_same(target: Target) -> None:
    plain, in_tokens = inputs_of(target)[: len(seed_bodies(target))], inputs_of(target)[len(seed_bodies(target)) :]
    steering = len(target.steering)
    for one, other in zip(plain, in_tokens, strict=True):
        # a token is ASCII or whole; other bytes lose their highest bit, which would make a token of them
        if one[steering:].isascii():
            assert expand(other[steering:], target.tokens) == one[steering:]


@pytest.mark.parametrize("target", _TARGETS, **_names)
@given(data=st.data())
@settings(max_examples=100)
def test_any_bytes_keep_the_laws(target: Target, data: st.DataObject) -> None:
    steering = data.draw(st.binary(min_size=len(target.steering), max_size=len(target.steering)))
    letters = st.integers(0, 255)
    if target.tokens:
        letters = st.integers(0x80, 0x80 + len(target.tokens) - 1) | letters
    target.check(steering + bytes(data.draw(st.lists(letters, max_size=60))))


@pytest.mark.parametrize("target", _TARGETS, **_names)
@given(data=st.data())
@settings(max_examples=100)
def test_a_damaged_seed_keeps_the_laws(target: Target, data: st.DataObject) -> None:
    damaged = bytearray(data.draw(st.sampled_from(inputs_of(target))))
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=6)):
        damaged[at] = data.draw(st.integers(0, 255))
    target.check(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))


# -- where the values of a JSON text begin and end --------------------------------------------------------------------

_TEXTS = st.lists(st.sampled_from('\ud83d\udc00\\"') | st.characters(codec=None), max_size=6).map("".join)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(_TEXTS, _VALUES, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_an_object_is_taken_apart_into_the_texts_of_its_members(
    value: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode(errors="backslashreplace")
    for members in (members_of(text), checked_members_of(text)):
        assert {name: strict_json(bytes(raw)) for name, raw in members.items()} == strict_json(text)
        assert all(bytes(raw) in text for raw in members.values())
    found = [text[at:end] for _, at, end in spans(text, 0, b"}")]
    assert list(map(strict_json, found)) == list(strict_json(text).values())


@given(st.lists(_VALUES, max_size=4), st.sampled_from([None, 1]))
def test_an_array_is_taken_apart_into_the_texts_of_its_elements(value: list[Any], indent: int | None) -> None:
    text = json.dumps(value, indent=indent).encode()
    assert [strict_json(bytes(raw)) for raw in elements_of(text)] == strict_json(text)


@given(st.binary(max_size=40) | st.text(st.sampled_from('{}[]",:\\ ud8a1')).map(str.encode))
def test_what_is_no_object_is_not_taken_apart(text: bytes) -> None:
    try:
        members = checked_members_of(text)
    except (NotJson, UnicodeDecodeError):
        return
    assert set(members) == set(strict_json(text))


# -- what the outbox holds --------------------------------------------------------------------------------------------

_COUNTS = st.integers(0, 2**53)
_WORDS = st.text(st.characters(codec="utf-8"), max_size=10)
_EVENTS = st.builds(
    UsageEvent,
    completed_at=st.floats(allow_nan=False, allow_infinity=False),
    data=st.builds(
        UsageData,
        request_id=_WORDS,
        deployment_id=_WORDS,
        replica_id=_WORDS,
        user_id=_WORDS,
        org_id=_WORDS,
        model=_WORDS,
        prompt_tokens=_COUNTS,
        completion_tokens=_COUNTS,
        total_tokens=_COUNTS,
        cached_tokens=st.none() | _COUNTS,
    ),
)


@given(_EVENTS)
def test_a_usage_event_comes_out_of_the_outbox_as_it_went_in(event: UsageEvent) -> None:
    assert decode_usage(encode_usage(event)) == event


@given(_EVENTS, st.data())
def test_a_damaged_usage_event_is_one_or_none(event: UsageEvent, data: st.DataObject) -> None:
    text = bytearray(encode_usage(event))
    for at in data.draw(st.lists(st.integers(0, len(text) - 1), max_size=4)):
        text[at] = data.draw(st.integers(0, 255))
    found = decode_usage(bytes(text[: data.draw(st.integers(0, len(text)))]))
    assert found is None or min(found.data.prompt_tokens, found.data.completion_tokens) >= 0
