"""The second look at JSON that the fast decoder will not take."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.json_text import has_surrogate_escape, is_json, salvage_string, split_object, to_value

#: by chance alone a surrogate is rare
_TEXTS = st.lists(st.sampled_from("\ud83d\udc00\\") | st.characters(codec=None), max_size=8).map("".join)
#: what json.dumps can write, lone surrogates included
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXTS,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=5), children, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", True),
        (" [1, 2.5e3, null] \n", True),
        (r'"\ud83d"', True),
        ("1e999", True),
        ("9" * 5000, True),
        ("[" * 900 + "]" * 900, True),
        ("", False),
        ("NaN", False),
        ("[Infinity]", False),
        ('{"a": -Infinity}', False),
        ("[1,]", False),
        ("{} {}", False),
        ("\ufeff{}", False),
        ("{}\x0b", False),
        ("[" * 20_000 + "]" * 20_000, False),
    ],
)
def test_is_json_is_the_grammar_and_nothing_else(text: str, expected: bool) -> None:
    assert is_json(text) is expected


@given(JSON_VALUES)
def test_whatever_is_json_is_seen_as_json(value: object) -> None:
    assert is_json(json.dumps(value))


@given(st.dictionaries(_TEXTS, JSON_VALUES, max_size=5), st.sampled_from([0, 2]))
def test_members_are_split_off_unchanged(members: dict[str, object], indent: int) -> None:
    text = json.dumps(members, indent=indent or None)
    split = split_object(text)
    assert split is not None
    assert {name: json.loads(member) for name, member in split.items()} == json.loads(text)
    assert all(member in text for member in split.values())


def test_of_a_name_given_twice_the_last_counts() -> None:
    assert split_object('{"a":1,"b":2, "a" : [ 3 ] }') == {"a": "[ 3 ]", "b": "2"}


@pytest.mark.parametrize("text", ["[]", '"a"', "null", "", "{", '{"a":}', '{"a":NaN}', "{} x", "[" * 20_000])
def test_what_is_no_json_object_is_not_split(text: str) -> None:
    assert split_object(text) is None


def test_escapes_of_half_a_pair_are_seen_in_either_case() -> None:
    assert has_surrogate_escape(r'"\ud83d"')
    assert has_surrogate_escape(r'"\uDC00"')
    assert not has_surrogate_escape(r'"\u00e9"')


@pytest.mark.parametrize("text", ["", "NaN", "{", "9" * 5000, "[" * 20_000 + "]" * 20_000])
def test_what_cannot_become_a_value_is_none(text: str) -> None:
    assert to_value(text) is None


def test_value_keeps_what_the_fast_decoder_refuses() -> None:
    assert to_value(r'{"a":"\ud83d","b":1e999,"c":3}') == {"a": "\ud83d", "b": float("inf"), "c": 3}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"request_id":"a","payload":' + "[" * 20_000, '"a"'),
        ('{"payload":' + "[" * 20_000 + "]" * 20_000 + ', "request_id" : "a"}', '"a"'),
        ('{"temperature":NaN,"request_id":"a"}', '"a"'),
        ('{"request_id":"a","request_id":"b",', '"b"'),
        ('{"payload":{"request_id":"inner"},"request_id":"outer"', '"outer"'),
        ('{"payload":{"request_id":"inner"}}', ""),
        ('{"note":"request_id","x":"y"}', ""),
        ('{"request_id":5}', ""),
        ('{"request_id":["a"]}', ""),
        ('["request_id","a"]', ""),
        ('{"request_id":"a', ""),
        ('{"x":1}{"request_id":"a"}', ""),
        ("", ""),
        ("no json", ""),
    ],
)
def test_string_is_salvaged_from_the_outermost_object_alone(text: str, expected: str) -> None:
    assert salvage_string(text, "request_id") == expected


@given(st.text() | st.text(st.sampled_from('{}[]",:\\ ar1')))
def test_salvaging_never_raises(text: str) -> None:
    assert isinstance(salvage_string(text, "a"), str)


@given(st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=4), st.text(min_size=1))
def test_what_is_salvaged_from_whole_json_is_what_it_says(members: dict[str, object], value: str) -> None:
    members["request_id"] = value
    assert json.loads(salvage_string(json.dumps(members), "request_id")) == value
