"""Event streams → events → one completion; and the payload that asks for a stream."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference_worker.errors import HttpTooLarge
from inference_worker.event_stream import EventStreamParser
from inference_worker.json_text import is_json
from inference_worker.model_answer import BodyKind, Usage, read_body
from inference_worker.model_stream import (
    AssembledAnswer,
    Assembly,
    ChunkKind,
    StreamEnd,
)
from inference_worker.stream_request import wants_stream, with_usage

CAPTURES = Path(__file__).resolve().parents[1] / "captures"
MIB = 1024 * 1024
DONE = b"[DONE]"


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def _strict(body: bytes) -> Any:
    return json.loads(body.decode(), parse_constant=_no_constant)


def _events(stream: bytes, *, max_event_bytes: int = MIB) -> list[bytes]:
    return EventStreamParser(max_event_bytes=max_event_bytes).feed(stream)


def _events_of_pieces(stream: bytes, cuts: list[int], *, max_event_bytes: int = MIB) -> list[bytes]:
    parser = EventStreamParser(max_event_bytes=max_event_bytes)
    ends = [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    starts = [0, *ends[:-1]]
    return [event for start, end in zip(starts, ends, strict=True) for event in parser.feed(stream[start:end])]


def _bytes_of(chunk: Any) -> bytes:
    return chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()


def _assemble(*chunks: Any, max_body_bytes: int = MIB) -> AssembledAnswer:
    assembly = Assembly(max_body_bytes=max_body_bytes)
    for chunk in chunks:
        assembly.add(_bytes_of(chunk))
    return assembly.finish()


def _body(*chunks: Any) -> Any:
    answer = _assemble(*chunks)
    assert answer.body is not None
    return _strict(answer.body)


def _delta(delta: Any, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, **fields}
    return {"id": "c-1", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": [choice]}


def _end(reason: str = "stop") -> dict[str, Any]:
    return _delta({}, finish_reason=reason)


def _message(*deltas: Any) -> Any:
    return _body(*map(_delta, deltas), _end(), DONE)["choices"][0]["message"]


# -- server-sent events -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\ndata:b\n\n", [b"a", b"b"]),
        (b"data:  a \n\n", [b" a "]),
        (b"data: a\r\rdata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\rdata: b\ndata\r\n\r", [b"a\nb\n"]),
        (b"data\n\n", [b""]),
        (b"data:\n\n", [b""]),
        (b"data\ndata\n\n", [b"\n"]),
        (b": keep-alive\n\ndata: a\n: c\n\n", [b"a"]),
        (b"event: x\nid: 1\nretry: 5\n\n", []),
        (b"event: x\ndata: a\nid: 1\n\n", [b"a"]),
        (b"Data: a\n data: b\ndata : c\n\n", []),
        (b"data: a: b\n\n", [b"a: b"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", []),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),
        (b"data: \xff\x00\xc3\n\n", [b"\xff\x00\xc3"]),
        (b"data: a\x0b\x0c\xc2\x85\xe2\x80\xa8b\n\n", [b"a\x0b\x0c\xc2\x85\xe2\x80\xa8b"]),
        (b"\n\n\r\r\n", []),
        (b"", []),
    ],
)
def test_events_are_those_of_the_standard(stream: bytes, events: list[bytes]) -> None:
    assert _events(stream) == events


@pytest.mark.parametrize("stream", [b"data: a", b"data: a\n", b"data: a\r\n", b"data: a\ndata: b\n: c\n", b"\xef\xbb"])
def test_what_no_blank_line_ends_is_no_event(stream: bytes) -> None:
    assert _events(stream) == []


def _events_by_the_letter(stream: bytes) -> list[bytes]:
    """The standard's algorithm on the whole stream, written without regard to memory or to pieces."""
    lines = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[:-1]
    events, buffer = [], b""
    for line in lines:
        if line == b"":
            if buffer:
                events.append(buffer[:-1])
            buffer = b""
        elif line.startswith(b"data:"):
            buffer += line[6 if line[5:6] == b" " else 5 :] + b"\n"
        elif line == b"data":
            buffer += b"\n"
    return events


_FRAGMENTS = st.sampled_from(
    [b"data", b"data:", b"data: ", b":", b" ", b"\r", b"\n", b"\r\n", b"x", b"event", b"\xef\xbb\xbf", "né€😀".encode()]
)
_STREAMS = st.one_of(st.binary(max_size=40), st.lists(_FRAGMENTS, max_size=40).map(b"".join))
_CUTS = st.lists(st.integers(0, 120), max_size=20)


@given(_STREAMS, _CUTS)
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", list(range(30)))
@example(b"data: a\r\ndata: b\r\n\r\n", list(range(30)))
@example(b"data: a\r\n\ndata: b\n\n", list(range(30)))
@example(b"\xef\xbb\xbfdata: a\n\n", [1, 2, 3])
def test_any_split_of_a_stream_gives_the_events_of_the_whole(stream: bytes, cuts: list[int]) -> None:
    assert _events(stream) == _events_by_the_letter(stream)
    assert _events_of_pieces(stream, cuts) == _events_by_the_letter(stream)


@given(_STREAMS, _CUTS)
def test_whether_an_event_is_too_large_does_not_depend_on_the_split(stream: bytes, cuts: list[int]) -> None:
    def is_refused(with_cuts: list[int]) -> bool:
        try:
            _events_of_pieces(stream, with_cuts, max_event_bytes=8)
        except HttpTooLarge:
            return True
        return False

    assert is_refused(cuts) == is_refused([])


@pytest.mark.parametrize(
    "stream", [b"data: 4567890", b": 34567890", b": 34567890\n", b"data: 4\ndata: 4\ndata: 4\ndata: 4\ndata: 4\n"]
)
def test_an_event_longer_than_the_cap_is_refused_before_it_ends(stream: bytes) -> None:
    with pytest.raises(HttpTooLarge):
        _events(stream, max_event_bytes=8)


def test_the_cap_is_on_one_event_and_not_on_the_stream() -> None:
    assert _events(b"data: 45\n\n" * 1000, max_event_bytes=8) == [b"45"] * 1000


def test_time_is_linear_when_a_large_event_comes_byte_by_byte() -> None:
    parser = EventStreamParser(max_event_bytes=MIB)
    stream = b"data: " + b"x" * 500_000 + b"\n\n"
    started = time.perf_counter()
    events = [event for at in range(len(stream)) for event in parser.feed(stream[at : at + 1])]
    assert [len(event) for event in events] == [500_000]
    # quadratic would be minutes
    assert time.perf_counter() - started < 20


# -- the payload ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "wanted"),
    [
        (b'{"stream":true}', True),
        (b' {"a": {"stream": false}, "stream" : true } ', True),
        (b'{"\\u0073tream":true}', True),
        (b'{"stream":false,"stream":true}', True),
        (b'{"stream":true,"stream":false}', False),
        (b'{"stream":true,"stream":null}', False),
        (b'{"stream":"true"}', False),
        (b'{"stream":1}', False),
        (b'{"stream":1.0}', False),
        (b'{"stream":[true]}', False),
        (b'{"Stream":true}', False),
        (b'{"a":{"stream":true}}', False),
        (b'{"a":"\\"stream\\":true"}', False),
        (b'{"stream_options":{}}', False),
        (b"{}", False),
        # lone surrogate escapes, which the fast decoder refuses
        (b'{"a":"\\ud83d","stream":true}', True),
        (b'{"a":"\\ud83d","stream":true,"stream":1}', False),
        (b'{"a":"\\ud83d","b":{"stream":true}}', False),
        (b'{"a":"\\ud83d","stream":true', False),
        (b'["stream", true, "\\ud83d"]', False),
        (b'{"stream":true', False),
        (b'{"\xff\\ud83d":1,"stream":true}', False),
    ],
)
def test_a_stream_is_wanted_only_when_stream_is_exactly_true(payload: bytes, wanted: bool) -> None:
    assert wants_stream(payload) is wanted


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"{}", b'{"stream_options":{"include_usage":true}}'),
        (b'{ "a" : 1.0e5 }\n', b'{ "a" : 1.0e5,"stream_options":{"include_usage":true} }\n'),
        (b'{"stream_options":null}', b'{"stream_options":{"include_usage":true}}'),
        (b'{"stream_options":"x","b":2}', b'{"stream_options":{"include_usage":true},"b":2}'),
        (b'{"stream_options": {} }', b'{"stream_options": {"include_usage":true} }'),
        (b'{"stream_options":{"a": [1]},"b":2}', b'{"stream_options":{"a": [1],"include_usage":true},"b":2}'),
        (b'{"stream_options":{"include_usage" : false}}', b'{"stream_options":{"include_usage" : true}}'),
        (b'{"stream_options":{"include_usage":[{}],"a":1}}', b'{"stream_options":{"include_usage":true,"a":1}}'),
        (
            b'{"stream_options":{"include_usage":true,"include_usage":1}}',
            b'{"stream_options":{"include_usage":true,"include_usage":true}}',
        ),
        (
            b'{"stream_options":{"include_usage":true},"stream_options":{}}',
            b'{"stream_options":{"include_usage":true},"stream_options":{"include_usage":true}}',
        ),
        (b'{"\\u0073tream_options":{"a":1}}', b'{"\\u0073tream_options":{"a":1,"include_usage":true}}'),
        (
            b'{"a":{"stream_options":{"include_usage":true}}}',
            b'{"a":{"stream_options":{"include_usage":true}},"stream_options":{"include_usage":true}}',
        ),
        (
            b'{"a":"}\\"stream_options\\":{","n":[[1],{"x":"]"}]}',
            b'{"a":"}\\"stream_options\\":{","n":[[1],{"x":"]"}],"stream_options":{"include_usage":true}}',
        ),
        (b'{"a":"\\ud83d"}', b'{"a":"\\ud83d","stream_options":{"include_usage":true}}'),
    ],
)
def test_usage_is_asked_for_and_no_other_byte_changes(payload: bytes, expected: bytes) -> None:
    assert with_usage(payload) == expected


@pytest.mark.parametrize(
    "payload",
    [
        b'{"stream_options":{"include_usage":true}}',
        b'{"stream_options":{},"stream_options" : { "include_usage":1, "include_\\u0075sage" : true , "x":2}}',
        b"",
        b"[1]",
        b"null",
        b'{"a"',
        b'{"a":1',
        b'{"a":{"b":[}',
        b'{"stream_options":{"include_usage":',
        b'{"\xff":1}',
    ],
)
def test_a_payload_that_asks_for_usage_or_is_no_object_comes_back_itself(payload: bytes) -> None:
    assert with_usage(payload) is payload


def test_a_payload_nested_beyond_every_parser_is_edited_all_the_same() -> None:
    deep = b'{"a":' + b"[" * 20_000 + b"]" * 20_000
    assert with_usage(deep + b"}") == deep + b',"stream_options":{"include_usage":true}}'
    assert wants_stream(b'{"stream":true,' + deep[1:] + b"}") is False


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
_OPTIONS = st.dictionaries(st.sampled_from(["include_usage", "a", "b"]), _JSON, max_size=3) | _JSON
_PAYLOADS = st.builds(
    lambda payload, options, has_options: payload | ({"stream_options": options} if has_options else {}),
    st.dictionaries(st.sampled_from(["stream", "model", "é", '"']), _JSON, max_size=4),
    _OPTIONS,
    st.booleans(),
)


@given(_PAYLOADS, st.booleans(), st.sampled_from([None, 1]))
def test_the_payload_with_usage_says_the_same_and_asks_for_usage(
    payload: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    before = json.dumps(payload, ensure_ascii=ascii_only, indent=indent).encode(errors="backslashreplace")
    after = with_usage(before)
    options = payload.get("stream_options")
    expected = (options if isinstance(options, dict) else {}) | {"include_usage": True}
    assert _strict(after) == payload | {"stream_options": expected}
    assert with_usage(after) is after
    assert wants_stream(before) is (payload.get("stream") is True)


# -- captures of vLLM 0.32 --------------------------------------------------------------------------------------------

#: in the plain answer and null there, but in no chunk (vLLM leaves unset fields out of the stream)
NOT_IN_A_STREAM = {
    "": {"service_tier", "prompt_logprobs", "kv_transfer_params", "ec_transfer_params"},
    "choices": {"routed_experts"},
    "message": {"annotations", "audio", "function_call", "reasoning"},
    "usage": {"prompt_tokens_details", "completion_tokens_details"},
    "metrics": {"speculative_decoding"},
}


def _captured_events() -> list[bytes]:
    return _events((CAPTURES / "vllm-chat-completion-stream.sse").read_bytes())


def test_the_captured_stream_becomes_the_body_that_the_same_server_gives_without_streaming() -> None:
    answer = _assemble(*_captured_events())
    assert answer.is_complete
    assert answer.body is not None
    streamed = _strict(answer.body)
    plain = _strict((CAPTURES / "vllm-chat-completion.json").read_bytes())

    def missing(of: Any, there: Any) -> set[str]:
        assert set(there) <= set(of)
        assert all(of[name] is None for name in set(of) - set(there))
        return set(of) - set(there)

    assert missing(plain, streamed) == NOT_IN_A_STREAM[""]
    assert missing(plain["choices"][0], streamed["choices"][0]) == NOT_IN_A_STREAM["choices"]
    assert missing(plain["choices"][0]["message"], streamed["choices"][0]["message"]) == NOT_IN_A_STREAM["message"]
    assert missing(plain["usage"], streamed["usage"]) == NOT_IN_A_STREAM["usage"]
    assert missing(plain["metrics"], streamed["metrics"]) == NOT_IN_A_STREAM["metrics"]


def test_the_captured_stream_is_assembled_value_by_value() -> None:
    answer = _assemble(*_captured_events())
    assert answer.body == (
        b'{"id":"chatcmpl-aab00720137d494b","object":"chat.completion","created":1795969035,"model":"tiny",'
        b'"choices":[{"index":0,"message":{"role":"assistant","content":"{\xef\xbf\xbdw|","refusal":null},'
        b'"logprobs":null,"finish_reason":"length","token_ids":null,"stop_reason":null}],'
        b'"prompt_token_ids":null,"prompt_text":null,'
        b'"usage":{"prompt_tokens":4,"total_tokens":10,"completion_tokens":6},'
        b'"system_fingerprint":"vllm-0.32.0-93101eb1","metrics":{"time_to_first_token_ms":3.248355000096126,'
        b'"generation_time_ms":6.1927360000026965,"queue_time_ms":0.020239999912519124,'
        b'"mean_itl_ms":1.2385472000005393,"tokens_per_second":635.5197720196952}}'
    )
    facts = read_body(answer.body)
    assert facts.kind is BodyKind.ANSWER
    assert facts.usage == Usage(prompt_tokens=4, completion_tokens=6)
    assert facts.timings.ttft_s == pytest.approx(0.003268595)


def test_the_first_token_of_the_captured_stream_is_its_first_text() -> None:
    assembly = Assembly(max_body_bytes=MIB)
    facts = [assembly.add(event) for event in _captured_events()]
    # the role chunk and tokens that are no text yet carry none
    assert [fact.has_token for fact in facts] == [False, False, True, False, True, False, True, False, False]
    assert [fact.kind for fact in facts] == [ChunkKind.PIECE] * 8 + [ChunkKind.DONE]


# -- how a stream ends ------------------------------------------------------------------------------------------------


def test_a_stream_that_ends_with_done_is_complete() -> None:
    assert _assemble(_delta({"content": "a"}), DONE).end is StreamEnd.COMPLETE
    assert _assemble(_delta({"content": "a"}), b" [DONE] ").end is StreamEnd.COMPLETE


def test_a_stream_without_done_is_complete_only_when_every_choice_has_its_finish_reason() -> None:
    second = {"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": None}]}
    assert _assemble(_delta({"content": "a"}), _end()).end is StreamEnd.COMPLETE
    assert _assemble(_delta({"content": "a"}), _end(), second).end is StreamEnd.CUT_OFF
    assert _assemble(_delta({"content": "a"})).end is StreamEnd.CUT_OFF
    assert _assemble(_delta({"content": "a"})).body is None
    assert _assemble({"choices": [], "usage": {}}).end is StreamEnd.CUT_OFF


def test_an_empty_stream_is_no_answer() -> None:
    assert _assemble() == AssembledAnswer(StreamEnd.CUT_OFF)
    assert _assemble(DONE) == AssembledAnswer(StreamEnd.EMPTY)


def test_an_aborted_choice_is_never_an_answer() -> None:
    assembly = Assembly(max_body_bytes=MIB)
    assert not assembly.add(_bytes_of(_delta({"content": "a"}))).is_aborted
    assert assembly.add(_bytes_of(_end("abort"))).is_aborted
    assert not assembly.add(_bytes_of(_delta({"content": "b"}))).is_aborted
    assert assembly.finish() == AssembledAnswer(StreamEnd.ABORTED)
    assembly.add(DONE)
    assert assembly.finish() == AssembledAnswer(StreamEnd.ABORTED)


@pytest.mark.parametrize(
    ("event", "status_code", "message"),
    [
        (b'{"error":{"message":"m","type":"t","param":null,"code":404}}', 404, "m"),
        (b'{"error": {"message":"m","code":"503"}}', 503, "m"),
        (b'{"object":"error","message":"m","code":400}', 400, "m"),
        (b'{"object":"\\u0065rror","message":"m"}', 500, "m"),
        (b'{"error":{"message":"m","code":null}}', 500, "m"),
        (b'{"error":{"message":"m","code":"context_length_exceeded"}}', 500, "m"),
        (b'{"error":{"message":"m","code":200}}', 500, "m"),
        (b'{"error":{"message":"m","code":40000}}', 500, "m"),
        (b'{"error":"m","error_type":"overloaded","choices":null}', 500, "m"),
        (b'{"code":400,"error":{"message":"m","code":404}}', 404, "m"),
        (b'{"error":{}}', 500, None),
        (b'{"error":{"message":"\\ud83d","code":429}}', 429, "\ud83d"),
    ],
)
def test_an_error_event_is_the_error_that_it_says(event: bytes, status_code: int, message: str | None) -> None:
    assembly = Assembly(max_body_bytes=MIB)
    assembly.add(_bytes_of(_delta({"content": "a"})))
    facts = assembly.add(event)
    assert facts.kind is ChunkKind.ERROR
    assert facts.error is not None
    assert facts.error.status_code == status_code
    assert facts.error.body == event
    assert facts.error.message == message
    assert assembly.add(DONE).kind is ChunkKind.IGNORED
    assert assembly.finish() == AssembledAnswer(StreamEnd.ERROR, error=facts.error)


@pytest.mark.parametrize("value", [None, False, ""])
def test_an_error_that_says_there_is_none_is_none(value: object) -> None:
    assert _assemble(_delta({"content": "a"}) | {"error": value}, DONE).end is StreamEnd.COMPLETE


@pytest.mark.parametrize(
    "event",
    [
        b"",
        b"x",
        b"null",
        b"[]",
        b'"ok"',
        b'{"choices":[{"index":0,"delta":{"content":"\xff"}}]}',
        b'{"choices":[],"x":NaN}',
        b'{"choices":[],"usage":{"a":-Infinity}}',
        b'{"choices":[',
        b"{}{}",
        b"\xef\xbb\xbf{}",
        b'{"choices":[{"delta":{"content":"\\ud83d"}}]',
        b'{"choices":{}}',
        b'{"choices":[1]}',
        b'{"choices":["\\ud83d"]}',
        b'{"choices":[{"index":-1}]}',
        b'{"choices":[{"index":"0"}]}',
        b'{"choices":[{"delta":[]}]}',
        b'{"choices":[{"delta":{"tool_calls":{}}}]}',
        b'{"choices":[{"delta":{"tool_calls":[null]}}]}',
        b'{"choices":[{"delta":{"tool_calls":[{"function":"f"}]}}]}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"b":"\\ud83d","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_chunk_that_is_none_makes_the_whole_answer_invalid(event: bytes) -> None:
    assembly = Assembly(max_body_bytes=MIB)
    assembly.add(_bytes_of(_delta({"content": "a"})))
    facts = assembly.add(event)
    assert facts.kind is ChunkKind.INVALID
    assembly.add(_bytes_of(_end()))
    assembly.add(DONE)
    assert assembly.finish() == AssembledAnswer(StreamEnd.INVALID, problem=facts.problem)
    assert facts.problem


def test_what_follows_done_is_not_looked_at() -> None:
    plain = _assemble(_delta({"content": "a"}), _end(), DONE)
    assert _assemble(_delta({"content": "a"}), _end(), DONE, _delta({"content": "b"}), b"\xff", DONE) == plain


# -- the first token --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "has_token"),
    [
        (_delta({"role": "assistant", "content": ""}), False),
        (_delta({"role": "assistant", "content": None, "tool_calls": None}), False),
        (_delta({"tool_calls": []}), False),
        (_delta({}), False),
        (_delta(None), False),
        ({"choices": [], "usage": {"prompt_tokens": 1}}, False),
        (_delta({"content": "a"}), True),
        (_delta({"reasoning": "a"}), True),
        (_delta({"reasoning_content": "a", "content": None}), True),
        (_delta({"refusal": "a"}), True),
        (_delta({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}), True),
        (_delta({"function_call": {"name": "f"}}), True),
        ({"object": "text_completion", "choices": [{"index": 0, "text": ""}]}, False),
        ({"object": "text_completion", "choices": [{"index": 0, "text": "a"}]}, True),
    ],
)
def test_a_token_is_text_reasoning_or_a_tool_call(chunk: Any, has_token: bool) -> None:
    assert Assembly(max_body_bytes=MIB).add(_bytes_of(chunk)).has_token is has_token


# -- what is assembled ------------------------------------------------------------------------------------------------


def test_reasoning_comes_beside_the_content() -> None:
    said = _message({"role": "assistant", "content": ""}, {"reasoning": "a"}, {"reasoning": "b"}, {"content": "c"})
    assert said == {"role": "assistant", "content": "c", "refusal": None, "reasoning": "ab"}
    said = _message({"role": "assistant"}, {"reasoning_content": "a", "content": None}, {"content": "c"})
    assert said == {"role": "assistant", "content": "c", "refusal": None, "reasoning_content": "a"}


def test_content_is_null_when_the_message_says_only_something_else() -> None:
    role = {"role": "assistant", "content": ""}
    assert _message(role, {"tool_calls": [{"index": 0, "function": {"name": "f"}}]})["content"] is None
    assert _message(role, {"reasoning": "a"})["content"] is None
    assert _message(role, {"refusal": "no"}) == {"role": "assistant", "content": None, "refusal": "no"}


def test_an_answer_of_no_text_is_an_empty_one() -> None:
    assert _message({"role": "assistant", "content": ""})["content"] == ""


def test_tool_calls_are_put_together_by_their_index() -> None:
    calls = _message(
        {"role": "assistant", "content": ""},
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "id": None, "function": {"name": None, "arguments": '":1}'}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}], "content": None},
    )["tool_calls"]
    assert calls == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


def test_an_id_and_a_name_that_are_repeated_in_each_piece_are_taken_once() -> None:
    piece = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "x"}}
    assert _message({"tool_calls": [piece]}, {"tool_calls": [piece]})["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "xx"}}
    ]
    # without the id it is a piece
    more = {"index": 0, "function": {"name": "f", "arguments": "y"}}
    assert _message({"tool_calls": [piece]}, {"tool_calls": [more]})["tool_calls"][0]["function"]["name"] == "ff"
    # no name beside the repeated id
    again = {"index": 0, "id": "a", "function": {"arguments": "y"}}
    assert _message({"tool_calls": [piece]}, {"tool_calls": [again]})["tool_calls"][0]["function"]["name"] == "f"
    nameless = {"index": 0, "id": "a", "function": {"arguments": "x"}}
    function = _message({"tool_calls": [nameless]}, {"tool_calls": [nameless]})["tool_calls"][0]["function"]
    assert function == {"arguments": "xx"}


def test_a_tool_call_without_arguments_or_type_gets_those_of_the_plain_answer() -> None:
    assert _message({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f"}}]})["tool_calls"] == [
        {"id": "a", "function": {"name": "f", "arguments": ""}, "type": "function"}
    ]


def test_tool_calls_that_are_not_numbered_are_told_apart_by_their_ids() -> None:
    calls = _message(
        {"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "1"}}]},
        {"tool_calls": [{"function": {"arguments": "2"}}]},
        {"tool_calls": [{"id": "b", "function": {"name": "g", "arguments": "3"}}]},
    )["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "f", "arguments": "12"}, {"name": "g", "arguments": "3"}]


def test_no_tool_call_is_what_the_stream_says_of_none() -> None:
    assert "tool_calls" not in _message({"content": "a"})
    assert _message({"content": "a", "tool_calls": None})["tool_calls"] is None
    assert _message({"content": "a", "tool_calls": []})["tool_calls"] == []


def test_choices_are_put_together_by_their_index() -> None:
    def piece(index: int, text: str, reason: str | None) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": text},
            "finish_reason": reason,
            "stop_reason": 5 if reason else None,
        }

    body = _body(
        {"choices": [piece(1, "b", None), piece(0, "a", None)]},
        {"choices": [piece(1, "B", "length")]},
        {"choices": [piece(0, "A", "stop")]},
    )
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["aA", "bB"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert [choice["stop_reason"] for choice in body["choices"]] == [5, 5]


def test_logprobs_and_token_ids_are_joined() -> None:
    def entry(token: str) -> dict[str, Any]:
        return {"token": token, "logprob": -0.1, "bytes": [97], "top_logprobs": []}

    choice = _body(
        _delta({"role": "assistant"}, logprobs=None, token_ids=None),
        _delta({"content": "a"}, logprobs={"content": [entry("a")], "refusal": None}, token_ids=[1]),
        _delta({"content": "b"}, logprobs={"content": []}, token_ids=[]),
        _delta({"content": "c"}, logprobs={"content": [entry("b"), entry("c")]}, token_ids=[2, 3]),
        _end(),
    )["choices"][0]
    assert choice["logprobs"] == {"content": [entry("a"), entry("b"), entry("c")], "refusal": None}
    assert choice["token_ids"] == [1, 2, 3]


def test_fields_that_we_do_not_know_are_kept() -> None:
    said = _message(
        {"content": "a", "thought": "x", "count": 1, "cited": [1], "audio": {"id": "i", "data": "AA", "expires_at": 3}},
        {"content": "b", "thought": "y", "count": 2, "cited": [2], "audio": {"id": "i", "data": "BB", "expires_at": 3}},
        {"thought": None, "count": None, "odd": {"a": {"b": {"c": {"d": {"e": "1"}}}}}},
        {"odd": {"a": {"b": {"c": {"d": {"e": "2"}}}}}},
    )
    assert said == {
        "role": "assistant",
        "content": "ab",
        "refusal": None,
        "thought": "xy",
        "count": 2,
        "cited": [1, 2],
        "audio": {"id": "i", "data": "AABB", "expires_at": 3},
        "odd": {"a": {"b": {"c": {"d": {"e": "2"}}}}},
    }


def test_a_field_that_changes_its_kind_is_the_last_one() -> None:
    assert _message({"x": "a"}, {"x": 1}, {"x": ["b"]}, {"x": {"c": "d"}}, {"x": "e"})["x"] == "e"


def test_the_role_is_not_repeated() -> None:
    assert _message({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"})["role"] == "assistant"
    assert _message({"role": None, "content": "a"})["role"] == "assistant"
    assert _message({"role": "critic", "content": "a"})["role"] == "critic"


def test_of_usage_and_the_like_the_last_that_says_something_counts() -> None:
    first = {"id": "", "object": "", "created": 0, "model": "", "choices": [], "prompt_filter_results": [{"a": 1}]}
    body = _body(
        first,
        _delta({"content": "a"}) | {"usage": {"prompt_tokens": 1, "x": 1}, "service_tier": "default"},
        _end() | {"usage": None, "service_tier": None, "system_fingerprint": "f"},
        {"object": "", "choices": [], "usage": {"prompt_tokens": 2}, "metrics": {"queue_time_ms": 1.5}},
        DONE,
    )
    assert {name: value for name, value in body.items() if name != "choices"} == {
        "id": "c-1",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "prompt_filter_results": [{"a": 1}],
        "usage": {"prompt_tokens": 2},
        "service_tier": "default",
        "system_fingerprint": "f",
        "metrics": {"queue_time_ms": 1.5},
    }


def test_numbers_and_escapes_survive_as_they_came() -> None:
    answer = _assemble(
        b'{"choices":[{"index":0,"delta":{"content":"\\u00e9\\/"},"logprobs":{"content":[{"logprob":-1.0E-05}]}}]}',
        b'{"choices":[{"index":0,"delta":{"content":"\xc3\xa9"},"finish_reason":"stop"}],'
        b'"usage":{"n":123456789012345678901234567890,"x":1e999, "y":1.10}}',
        DONE,
    )
    assert answer.body is not None
    assert b'"content":"\\u00e9\\/\xc3\xa9"' in answer.body
    assert b'[{"logprob":-1.0E-05}]' in answer.body
    assert b'{"n":123456789012345678901234567890,"x":1e999, "y":1.10}' in answer.body


def test_halves_of_a_surrogate_pair_in_two_chunks_meet_again() -> None:
    answer = _assemble(
        b'{"choices":[{"index":0,"delta":{"content":"a\\ud83d"}}]}',
        b'{"choices":[{"index":0,"delta":{"content":"\\uDE00b"},"finish_reason":"stop"}]}',
        DONE,
    )
    assert answer.body is not None
    assert _strict(answer.body)["choices"][0]["message"]["content"] == "a😀b"
    assert read_body(answer.body).kind is BodyKind.ANSWER


def test_a_lone_surrogate_stays_an_escape() -> None:
    answer = _assemble(
        b'{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"\\ud83d"}}]}}],"\\udc00":1}',
        b'{ "choices" : [ { "delta" : {"content" : "\\\\\\udc00" , "content":"\\udfff"} , "x" : [ ] } ] , "y" : 1 }',
        DONE,
    )
    assert answer.body is not None
    assert answer.body.decode().isascii()
    choice = _strict(answer.body)["choices"][0]
    assert choice["message"]["content"] == "\udfff"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "\ud83d"
    assert read_body(answer.body).kind is BodyKind.ANSWER


def test_a_text_completion_is_assembled_too() -> None:
    def piece(text: str, tokens: list[str], offsets: list[int], **fields: Any) -> dict[str, Any]:
        logprobs = {"text_offset": offsets, "token_logprobs": [-1.0] * len(tokens), "tokens": tokens}
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None, **fields}
        return {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m", "choices": [choice]}

    body = _body(
        piece("a", ["a"], [0]),
        piece("bc", ["b", "c"], [1, 2], finish_reason="length", stop_reason=None),
        {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m", "choices": [], "usage": {"a": 1}},
        DONE,
    )
    assert body == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": "abc",
                "logprobs": {"text_offset": [0, 1, 2], "token_logprobs": [-1.0] * 3, "tokens": ["a", "b", "c"]},
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {"a": 1},
    }


def test_a_choice_that_says_nothing_has_the_shape_of_its_kind() -> None:
    chat = {"object": "chat.completion.chunk", "choices": [{"index": 0, "finish_reason": "stop"}]}
    assert _body(chat)["choices"][0]["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert _body({"choices": [{"index": 0, "finish_reason": "stop"}]})["choices"][0]["text"] == ""


def _add_all(assembly: Assembly, chunks: Iterable[Any]) -> None:
    for chunk in chunks:
        assembly.add(_bytes_of(chunk))


def test_an_answer_longer_than_the_cap_is_refused() -> None:
    assembly = Assembly(max_body_bytes=100_000)
    _add_all(assembly, [_delta({"content": "x" * 1000})] * 90)
    with pytest.raises(HttpTooLarge):
        _add_all(assembly, [_delta({"content": "x" * 1000})] * 10)


@pytest.mark.parametrize(
    ("chunk_of", "max_body_bytes"),
    [
        (lambda at: {f"n{at}": 1}, 1_000_000),
        (lambda at: {"choices": [{"index": at}]}, 5_000_000),
        (lambda at: _delta({"tool_calls": [{"index": at}]}), 2_000_000),
        (lambda at: _delta({"tool_calls": [{"index": 0, "function": {f"n{at}": None}}]}), 1_000_000),
    ],
    ids=["fields", "choices", "calls", "arguments"],
)
def test_many_small_things_count_for_the_memory_that_they_take(
    chunk_of: Callable[[int], Any], max_body_bytes: int
) -> None:
    with pytest.raises(HttpTooLarge):
        _add_all(Assembly(max_body_bytes=max_body_bytes), map(chunk_of, range(10_000)))


def test_fields_that_are_replaced_do_not_count_twice() -> None:
    assembly = Assembly(max_body_bytes=100_000)
    for _ in range(1000):
        assembly.add(_bytes_of({"choices": [], "usage": {"note": "x" * 1000}}))
    assembly.add(DONE)
    assert assembly.finish().is_complete


def test_a_stream_of_100_000_chunks_is_assembled_in_linear_time() -> None:
    call = [{"index": 0, "function": {"arguments": "0123456789"}}]
    logprobs = {"content": [{"token": "a", "logprob": -0.5}]}
    data = _bytes_of(_delta({"content": "0123456789", "tool_calls": call}, logprobs=logprobs))
    assembly = Assembly(max_body_bytes=64 * MIB)
    started = time.perf_counter()
    for _ in range(100_000):
        assembly.add(data)
    assembly.add(DONE)
    body = assembly.finish().body
    # quadratic would be minutes
    assert time.perf_counter() - started < 20
    assert body is not None
    assert len(_strict(body)["choices"][0]["message"]["content"]) == 1_000_000


# -- any stream at all ------------------------------------------------------------------------------------------------

_TEXT = st.text(max_size=12)
_TOKENS = st.lists(st.fixed_dictionaries({"token": _TEXT, "logprob": st.floats(-9, 0)}), max_size=4)
_CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.text(min_size=1, max_size=4),
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": st.text(min_size=1, max_size=4), "arguments": _TEXT}),
        }
    ),
    min_size=1,
    max_size=3,
)
_MESSAGES = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": _TEXT.filter(bool), "refusal": st.none()},
    optional={"reasoning": _TEXT.filter(bool), "tool_calls": _CALLS},
)


@st.composite
def _completions(draw: st.DrawFn) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": message,
            "logprobs": draw(st.none() | st.fixed_dictionaries({"content": _TOKENS.filter(bool)})),
            "finish_reason": draw(st.sampled_from(["stop", "length", "tool_calls"])),
        }
        for index, message in enumerate(draw(st.lists(_MESSAGES, min_size=1, max_size=3)))
    ]
    head = {"id": draw(st.text(min_size=1)), "object": "chat.completion", "created": 7, "model": "m"}
    return head | {"choices": choices, "usage": {"prompt_tokens": draw(st.integers(0, 2**53))}}


def _pieces(draw: Callable[..., Any], whole: Any) -> list[Any]:
    """Cut a string or a list into pieces, empty ones included."""
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=3)))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def _choice_pieces(draw: Callable[..., Any], choice: dict[str, Any]) -> list[dict[str, Any]]:
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning", "content"):
        deltas += (
            [{"delta": {name: piece}} for piece in _pieces(draw, message.get(name, ""))] if name in message else []
        )
    pieces = [{"delta": deltas[0]}, *deltas[1:]]
    for index, call in enumerate(message.get("tool_calls", [])):
        first, *rest = _pieces(draw, call["function"]["arguments"])
        function = {"name": call["function"]["name"], "arguments": first}
        pieces.append({"delta": {"tool_calls": [{"index": index, **call, "function": function}]}})
        pieces += [{"delta": {"tool_calls": [{"index": index, "function": {"arguments": more}}]}} for more in rest]
    if choice["logprobs"] is not None:
        parts = _pieces(draw, choice["logprobs"]["content"])
        pieces += [{"delta": {}, "logprobs": {"content": part}} for part in parts]
    pieces.append({"delta": {}, "finish_reason": choice["finish_reason"]})
    return [{"index": choice["index"], "logprobs": None, "finish_reason": None} | piece for piece in pieces]


@given(st.data(), _completions(), st.booleans())
@settings(max_examples=200)
def test_any_chunking_of_a_completion_is_assembled_to_it(
    data: st.DataObject, completion: dict[str, Any], ascii_only: bool
) -> None:
    queues = [_choice_pieces(data.draw, choice) for choice in completion["choices"]]
    head = {name: completion[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = []
    while any(queues):
        queue = data.draw(st.sampled_from([queue for queue in queues if queue]))
        chunks.append(head | {"choices": [queue.pop(0)]})
    chunks.append(head | {"choices": [], "usage": completion["usage"]})
    stream = b"".join(b"data: %b\n\n" % json.dumps(chunk, ensure_ascii=ascii_only).encode() for chunk in chunks)
    assert _body(*_events_of_pieces(stream + b"data: [DONE]\n\n", data.draw(_CUTS))) == completion


@given(st.text(alphabet=st.characters(exclude_categories=[]), max_size=20), st.data())
def test_any_text_cut_anywhere_is_the_text_again(text: str, data: st.DataObject) -> None:
    # what a server in a language of UTF-16 does: cuts between the halves of a pair, and escapes them
    units = re.findall(r"\\u[0-9a-f]{4}|\\.|.", json.dumps(text)[1:-1])
    parts = ["".join(part) for part in _pieces(data.draw, units)]
    chunks = [b'{"choices":[{"index":0,"delta":{"content":"%b"}}]}' % part.encode() for part in parts]
    expected = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    assert _body(*chunks, DONE)["choices"][0]["message"]["content"] == expected


_ODD = st.sampled_from(
    [b'"\\ud83d"', b'"\\udc00"', b'"\xff"', b"NaN", b"1e999", b"{}", b"[]", b"null", b'"x"', b"0", b'"abort"', b"[{}]"]
)
_NAMES = st.sampled_from(
    [
        "choices",
        "index",
        "delta",
        "message",
        "text",
        "tool_calls",
        "function",
        "arguments",
        "content",
        "id",
        "role",
        "logprobs",
        "finish_reason",
        "object",
        "error",
        "code",
        "usage",
        "x",
    ]
)


def _object(members: list[tuple[str, bytes]]) -> bytes:
    return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), value) for name, value in members)


_VALUES = st.recursive(
    _ODD,
    lambda inner: (
        st.lists(st.tuples(_NAMES, inner), max_size=4).map(_object)
        | st.lists(inner, max_size=3).map(lambda parts: b"[%b]" % b",".join(parts))
    ),
    max_leaves=12,
)
_ODD_CHUNKS = st.one_of(
    st.binary(max_size=12),
    _VALUES,
    st.lists(st.tuples(_NAMES, _VALUES), max_size=4).map(_object),
    st.lists(st.tuples(_NAMES, _VALUES), max_size=4).map(lambda m: b'{"choices":[%b]}' % _object(m)),
    st.lists(st.tuples(_NAMES, _VALUES), max_size=4).map(lambda m: b'{"choices":[{"delta":%b}]}' % _object(m)),
    st.just(DONE),
)


@given(st.lists(_ODD_CHUNKS, max_size=6), st.sampled_from([500, MIB]))
@settings(max_examples=500)
def test_any_chunks_make_strict_json_or_nothing(chunks: list[bytes], max_body_bytes: int) -> None:
    try:
        answer = _assemble(*chunks, DONE, max_body_bytes=max_body_bytes)
    except HttpTooLarge:
        return
    assert (answer.body is not None) == answer.is_complete
    if answer.body is not None:
        assert is_json(answer.body.decode())
        assert len(answer.body) <= max_body_bytes
        # what is stored and billed goes by this
        assert read_body(answer.body).kind is BodyKind.ANSWER
    if answer.error is not None:
        assert is_json(answer.error.body.decode())
        assert 400 <= answer.error.status_code <= 599


@given(st.one_of(st.binary(max_size=60), _VALUES, _STREAMS))
@settings(max_examples=300)
def test_any_bytes_are_a_payload_that_goes_out(payload: bytes) -> None:
    assert isinstance(with_usage(payload), bytes)
    assert wants_stream(payload) in (True, False)
