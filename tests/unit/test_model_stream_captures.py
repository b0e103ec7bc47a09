"""Streams of vLLM 0.32, put together, against what it says plain to the same request (`tests/captures`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inference_worker.event_stream import EventStreamParser
from inference_worker.model_answer import BodyKind, Usage, read_body
from inference_worker.model_stream import Assembly
from tests.vllm.compare import KNOWN_DIFFERENCES, Differences, differences, unexpected_in

CAPTURES = Path(__file__).resolve().parents[1] / "captures"
MIB = 1024 * 1024
KINDS = sorted(KNOWN_DIFFERENCES)


def plain_body(kind: str) -> bytes:
    return (CAPTURES / f"vllm-{kind}.json").read_bytes()


def assembled_body(kind: str) -> bytes:
    assembly = Assembly(max_body_bytes=MIB)
    for event in EventStreamParser(max_event_bytes=MIB).feed((CAPTURES / f"vllm-{kind}.sse").read_bytes()):
        assembly.add(event)
    answer = assembly.finish()
    assert answer.body is not None, answer
    return answer.body


def test_there_is_a_capture_of_each_kind() -> None:
    assert len(KINDS) == 8
    assert all((CAPTURES / f"vllm-{kind}.{end}").stat().st_size > 500 for kind in KINDS for end in ("json", "sse"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_put_together_is_the_plain_answer_but_for_what_vllm_itself_says_otherwise(kind: str) -> None:
    found = differences(json.loads(plain_body(kind)), json.loads(assembled_body(kind)))
    assert unexpected_in(kind, found) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_billed_like_the_plain_answer(kind: str) -> None:
    plain, streamed = read_body(plain_body(kind)), read_body(assembled_body(kind))
    assert plain.kind is streamed.kind is BodyKind.ANSWER
    assert isinstance(plain.usage, Usage)
    assert plain.usage == streamed.usage
    assert (plain.timings.ttft_s is None) == (streamed.timings.ttft_s is None) == (kind == "two-choices")


def without(document: dict[str, Any], name: str) -> dict[str, Any]:
    return {member: value for member, value in document.items() if member != name}


def test_the_comparison_finds_what_differs() -> None:
    plain = json.loads(plain_body("chat"))
    assert differences(plain, plain) == Differences()
    assert differences(plain, without(plain, "service_tier")) == Differences(frozenset({"service_tier"}))
    assert differences(plain, plain | {"model": "other"}).other == {"model": '"tiny" plain, "other" streamed'}
    assert differences(plain, without(plain, "id")).other.keys() == {"id"}
    assert differences(without(plain, "usage"), plain).other.keys() >= {"usage.total_tokens"}
    assert unexpected_in("chat", Differences(frozenset({"model"}), {"id": "gone"})) == [
        "model: only in the plain answer",
        "id: gone",
    ]
    assert unexpected_in("tool-auto", Differences()) == ["choices[].message.tool_calls[].function.arguments: the same"]
