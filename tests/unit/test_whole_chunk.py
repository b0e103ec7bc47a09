"""A stored answer as one chunk: whoever reads streams gets the same answer out of it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from inference_worker.model_stream import Assembly
from inference_worker.whole_chunk import whole_chunk

KINDS = ("chat", "logprobs", "two-choices", "tool-auto", "text-completion")


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_of_vllm_read_as_a_stream_is_the_answer(kind: str, capture: Callable[[str], bytes]) -> None:
    body = capture(f"vllm-{kind}.json")
    assembly = Assembly(max_body_bytes=1024 * 1024)
    facts = assembly.add(whole_chunk(body))
    assert facts.has_token
    assembly.add(b"[DONE]")
    joined = assembly.finish().body
    assert joined is not None
    assert json.loads(joined) == json.loads(body)


def test_numbers_escapes_and_the_order_of_members_stay() -> None:
    body = rb'{"z":1.0,"choices":[{"message":{"content":"\ud83d"},"index":0}],"a":1e5}'
    assert whole_chunk(body) == rb'{"z":1.0,"choices":[{"delta":{"content":"\ud83d"},"index":0}],"a":1e5}'


def test_tool_calls_get_the_index_by_which_pieces_are_joined() -> None:
    body = b'{"choices":[{"message":{"tool_calls":[{"id":"a"},{"id":"b"}]}}]}'
    assert whole_chunk(body) == b'{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a"},{"index":1,"id":"b"}]}}]}'


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b"{", b"", b'{"choices":7}', b'{"choices":[7]}', b'{"choices":[{"message":7}]}', b"\xff"]
)
def test_what_is_no_completion_is_left_as_it_is(body: bytes) -> None:
    assert whole_chunk(body) == body
