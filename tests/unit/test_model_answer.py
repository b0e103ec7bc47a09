"""What a model server's body says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.model_answer import BodyKind, Timings, Usage, read_body, to_seconds

Capture = Callable[[str], bytes]


# -- a real vLLM 0.32.0 -----------------------------------------------------------------------------------------------


def test_captured_completion_is_an_answer_with_usage_and_timings(capture: Capture) -> None:
    facts = read_body(capture("vllm-chat-completion.json"))
    assert facts.kind is BodyKind.ANSWER
    assert facts.usage == Usage(prompt_tokens=4, completion_tokens=16, cached_tokens=None)
    assert facts.usage.total_tokens == 20
    # queue_time_ms + time_to_first_token_ms: vLLM counts the latter from scheduling
    assert facts.timings.ttft_s == pytest.approx((0.02782100000331411 + 12.749695999900723) / 1000)
    assert facts.timings.tbt_s == pytest.approx(1.5207802666736825 / 1000)


def test_captured_abort_is_no_answer(capture: Capture) -> None:
    assert read_body(capture("vllm-aborted-200.json")).kind is BodyKind.ABORTED


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vllm-error-400-context.json", "This model's maximum context length is 1024 tokens."),
        ("vllm-error-404-model.json", "The model `nope` does not exist."),
        ("vllm-error-503-busy.json", "The engine is currently busy"),
    ],
)
def test_captured_errors_speak_for_themselves(capture: Capture, name: str, words: str) -> None:
    facts = read_body(capture(name))
    assert facts.kind is BodyKind.ERROR
    assert facts.error_message is not None
    assert facts.error_message.startswith(words)


def test_r42_captured_event_stream_is_no_json(capture: Capture) -> None:
    assert read_body(capture("vllm-chat-completion-stream.sse")).kind is BodyKind.NO_JSON


# -- what a whole body is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"object":"error","code":404}', BodyKind.ERROR),
        (b'{"error":{"message":"x"}}', BodyKind.ERROR),
        (b'{"error":"Unauthorized"}', BodyKind.ERROR),
        (rb'{"error":{"message":"\ud83d"}}', BodyKind.ERROR),
        (b"null", BodyKind.OTHER_JSON),
        (b"[]", BodyKind.OTHER_JSON),
        (b'"ok"', BodyKind.OTHER_JSON),
        (b"17", BodyKind.OTHER_JSON),
        (rb'["\ud83d"]', BodyKind.OTHER_JSON),
        (b"<html><body>hello</body></html>", BodyKind.NO_JSON),
        (b"data: {}\n\n", BodyKind.NO_JSON),
        (b"{}{}", BodyKind.NO_JSON),
        (b"\xef\xbb\xbf{}", BodyKind.NO_JSON),
        (b"{\x00}\x00", BodyKind.NO_JSON),
        (b"[" * 20_000 + b"]" * 20_000, BodyKind.NO_JSON),
        (b'{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}", BodyKind.NO_JSON),
        (b"{}", BodyKind.ANSWER),
        (b'{"choices":[]}', BodyKind.ANSWER),
        (b'{"choices":null}', BodyKind.ANSWER),
        (b'{"choices":"x"}', BodyKind.ANSWER),
        (b'{"choices":[1]}', BodyKind.ANSWER),
        (b'{"error":null,"choices":[]}', BodyKind.ANSWER),
        (b'{"error":false,"choices":[]}', BodyKind.ANSWER),
        (b'{"error":"","choices":[]}', BodyKind.ANSWER),
        (b'{"object":"chat.completion"}', BodyKind.ANSWER),
        (b' \n{"choices" : [ ] }\r\n', BodyKind.ANSWER),
    ],
)
def test_r43_r46_what_a_whole_body_is(body: bytes, kind: BodyKind) -> None:
    assert read_body(body).kind is kind


@pytest.mark.parametrize("word", [b"NaN", b"-Infinity", b"Infinity"])
def test_r44_constants_that_are_no_json_are_none_here(word: bytes) -> None:
    assert read_body(b'{"choices":[{"logprob":%b}]}' % word).kind is BodyKind.NO_JSON


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3(", b"\xed\xa0\xbd", b"\xf8\x88\x80\x80\x80"])
def test_r45_bytes_that_are_no_utf8_are_no_json_even_where_nobody_reads_them(bad: bytes) -> None:
    assert read_body(b'{"choices":[{"message":{"content":"a%bb"}}]}' % bad).kind is BodyKind.NO_JSON


def test_r45_lone_surrogate_is_legal_and_costs_neither_answer_nor_usage() -> None:
    body = (
        rb'{"choices":[{"message":{"content":"\ud83d"}}],"usage":{"prompt_tokens":1,"completion_tokens":2},'
        rb'"metrics":{"mean_itl_ms":2.0}}'
    )
    facts = read_body(body)
    assert (facts.kind, facts.usage, facts.timings) == (BodyKind.ANSWER, Usage(1, 2), Timings(None, 0.002))


@pytest.mark.parametrize(
    "choices",
    [
        rb'[{"finish_reason":"abort"}]',
        rb'[{"finish_reason":"stop"},{"index":1,"finish_reason" : "abort" }]',
        rb'[{"message":{"content":"cut \ud83d"},"finish_reason":"abort"}]',
        rb'[null,{"finish_reason":"abort"}]',
    ],
)
def test_aborted_choice_makes_an_aborted_answer(choices: bytes) -> None:
    assert read_body(b'{"choices":%b}' % choices).kind is BodyKind.ABORTED


@pytest.mark.parametrize("reason", [b'"stop"', b'"length"', b'"ABORT"', b"null", b"5", b'["abort"]'])
def test_no_other_finish_reason_is_an_abort(reason: bytes) -> None:
    assert read_body(b'{"choices":[{"finish_reason":%b,"text":"abort"}]}' % reason).kind is BodyKind.ANSWER


_ANSWERS = st.dictionaries(
    st.sampled_from(["choices", "usage", "a", "é"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


def _every_cut(body: bytes) -> list[tuple[bytes, BodyKind]]:
    return [(body[:length], read_body(body[:length]).kind) for length in range(len(body))]


def test_r41_json_cut_anywhere_is_seen_as_cut_off() -> None:
    body = (
        '{"id": "é😀", "n": [-1.5e+3, 0, -0.25E-2, true, false, null], "e": "\\u00e9\\"\\\\\\n",'
        ' "lone": "\\ud83d", "pair": "\\ud83d\\ude00", "o": {"x": [{}, []]}}'
    ).encode()
    assert read_body(body).kind is BodyKind.ANSWER
    assert [cut for cut, kind in _every_cut(body) if kind is not BodyKind.TRUNCATED] == []


@given(_ANSWERS, st.booleans())
def test_r41_any_json_object_cut_anywhere_is_seen_as_cut_off(answer: dict[str, Any], ensure_ascii: bool) -> None:
    body = json.dumps(answer, ensure_ascii=ensure_ascii).encode()
    assert [cut for cut, kind in _every_cut(body) if kind is not BodyKind.TRUNCATED] == []


@pytest.mark.parametrize(
    "body", [rb'{"a":"\ud83d"} x', rb'{"a":"\ud83d",}', b'{"a":01', b'{"a":NaN', b'{"a":"\xff', b"<"]
)
def test_what_no_further_byte_would_make_json_is_not_cut_off(body: bytes) -> None:
    assert read_body(body).kind is BodyKind.NO_JSON


@given(st.binary() | st.binary().map(lambda tail: b'{"choices":[' + tail))
def test_reading_never_raises_and_takes_no_more_for_json_than_a_strict_parser(body: bytes) -> None:
    kind = read_body(body).kind
    if kind not in (BodyKind.NO_JSON, BodyKind.TRUNCATED):
        json.loads(body.decode("utf-8"))


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"no"}}', "no"),
        (b'{"error":"Unauthorized"}', "Unauthorized"),
        (b'{"object":"error","message":"old vLLM","code":400}', "old vLLM"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"message":"Loading model"}', "Loading model"),
        (b'{"error":{"message":"first"},"detail":"second"}', "first"),
        (b'{"error":{"code":5}}', None),
        (b'{"error":{"message":"  "},"detail":"second"}', "second"),
        (b'{"detail":[{"loc":["body"]}]}', None),
        (b'{"error":[1]}', None),
        (b"[]", None),
        (b"no json", None),
    ],
)
def test_servers_own_words_are_found_in_every_dialect(body: bytes, message: str | None) -> None:
    assert read_body(body).error_message == message


# -- usage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "usage",
    ["null", "{}", '{"prompt_tokens":5}', '"5"', "[]", "7"]
    + [
        f'{{"prompt_tokens":{bad},"completion_tokens":3}}'
        for bad in ("-1", "1.5", "5.0", "true", '"5"', "null", "1e999", "1" + "0" * 400, "9007199254740992", "[]")
    ]
    + [f'{{"prompt_tokens":3,"completion_tokens":{bad}}}' for bad in ("-1", "1.5", "true", '"5"')],
)
def test_r73_usage_that_is_no_two_counts_is_unknown_and_costs_no_answer(usage: str) -> None:
    facts = read_body(b'{"choices":[],"usage":%b}' % usage.encode())
    assert (facts.kind, facts.usage) == (BodyKind.ANSWER, None)


def test_r73_usage_that_is_not_there_is_unknown() -> None:
    assert read_body(b'{"choices":[]}').usage is None


@pytest.mark.parametrize("total", ["7", "null", '"x"', "-1", "1e999", "1" + "0" * 400, r'"\ud83d"'])
def test_r73_total_is_our_own_sum_whatever_the_server_says(total: str) -> None:
    body = b'{"usage":{"prompt_tokens":5,"completion_tokens":0,"total_tokens":%b}}' % total.encode()
    usage = read_body(body).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 0, 5)


@pytest.mark.parametrize(
    ("details", "cached"),
    [('{"cached_tokens":4}', 4), ("null", None), ("{}", None), ('{"cached_tokens":-1}', None), ('"4"', None)],
)
def test_cached_tokens_are_read_where_there_are_any(details: str, cached: int | None) -> None:
    body = b'{"usage":{"prompt_tokens":5,"completion_tokens":1,"prompt_tokens_details":%b}}' % details.encode()
    assert read_body(body).usage == Usage(5, 1, cached)


# -- timings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metrics", "timings"),
    [
        ('{"queue_time_ms":500,"time_to_first_token_ms":250.0,"mean_itl_ms":2}', Timings(0.75, 0.002)),
        ('{"time_to_first_token_ms":50.0}', Timings()),
        ('{"queue_time_ms":null,"time_to_first_token_ms":50.0,"mean_itl_ms":null}', Timings()),
        ('{"queue_time_ms":-1,"time_to_first_token_ms":50.0}', Timings()),
        ("null", Timings()),
        ("[]", Timings()),
        ('"x"', Timings()),
    ],
)
def test_timings_are_read_where_they_are_known(metrics: str, timings: Timings) -> None:
    assert read_body(b'{"choices":[],"metrics":%b}' % metrics.encode()).timings == timings


@pytest.mark.parametrize(
    ("milliseconds", "seconds"),
    [(1500, 1.5), (0, 0.0), (2.5, 0.0025), ("12.5", 0.0125), (" 7 ", 0.007)]
    + [
        (bad, None)
        for bad in (None, True, -1, "-1", "", "abc", "nan", "inf", "1e999", float("nan"), 10**400, [], "1,5")
    ],
)
def test_milliseconds_become_seconds_or_nothing(milliseconds: Any, seconds: float | None) -> None:
    assert to_seconds(milliseconds) == (None if seconds is None else pytest.approx(seconds))
