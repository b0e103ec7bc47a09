"""A whole answer as the one chunk of a stream, for those who follow a stream whose own chunks they cannot trust.

Pure: any thread, no I/O. Values are kept as the bytes that came.
Source: design section 8 "Streaming".
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from inference_worker.json_spans import NotJson, checked_members_of, elements_of, encode_object, members_of

Members = Mapping[str, bytes | msgspec.Raw]


def whole_chunk(body: bytes) -> bytes:
    """Write a completion as a chunk: each choice's message as its delta, each tool call with its index.

    Shapes:  body is the JSON object of a stored result; what is no completion comes back as it is
    """
    try:
        answer = checked_members_of(body)
        choices = [_to_piece(members_of(choice)) for choice in elements_of(answer.get("choices", b"null"))]
    except (NotJson, RecursionError, UnicodeDecodeError):
        return body
    members = {name: bytes(value) for name, value in answer.items()}
    if members.get("object") == b'"chat.completion"':
        members["object"] = b'"chat.completion.chunk"'
    if "choices" in members:
        members["choices"] = b"[%b]" % b",".join(choices)
    return encode_object(members)


def _to_piece(choice: Members) -> bytes:
    piece: dict[str, bytes] = {}
    for name, value in choice.items():
        if name == "message":
            piece["delta"] = _to_delta(members_of(value))
        else:
            piece[name] = bytes(value)
    return encode_object(piece)


def _to_delta(message: Members) -> bytes:
    delta = {name: bytes(value) for name, value in message.items()}
    if "tool_calls" in delta:
        calls = enumerate(elements_of(delta["tool_calls"]))
        delta["tool_calls"] = b"[%b]" % b",".join(_number(members_of(call), index) for index, call in calls)
    return encode_object(delta)


def _number(call: Members, index: int) -> bytes:
    return encode_object({"index": b"%d" % index, **{name: bytes(value) for name, value in call.items()}})
