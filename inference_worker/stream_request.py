"""The payload of a streamed request: does it ask for a stream, and the one member that we add.

Pure: any thread, no I/O. Source: design section 8 "Streaming", field report R42.
"""

from __future__ import annotations

import msgspec

from inference_worker.json_spans import NotJson, last_span, space_end
from inference_worker.json_text import has_surrogate_escape, is_json


class _Asked(msgspec.Struct):
    stream: msgspec.Raw = msgspec.Raw(b"")


_ASKED_DECODER = msgspec.json.Decoder(_Asked)


def wants_stream(payload: bytes) -> bool:
    """Tell whether the payload asks for a stream: `stream` is exactly true, by the last of its occurrences.

    False for "true" and 1, although vLLM streams for them (R42), and for what is no JSON object.
    """
    try:
        # a search for the word first would cost a 10 MB payload four times as much as this
        return bytes(_ASKED_DECODER.decode(payload).stream) == b"true"
    except RecursionError:
        return False
    except msgspec.DecodeError:
        return _wants_stream_at_second_look(payload)


def _wants_stream_at_second_look(payload: bytes) -> bool:
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return False
    start = space_end(payload, 0)
    if payload[start : start + 1] != b"{" or not has_surrogate_escape(text) or not is_json(text):
        return False
    span, _ = last_span(payload, start, "stream")
    return span is not None and payload[span[0] : span[1]] == b"true"


def with_usage(payload: bytes) -> bytes:
    """Return the payload with `stream_options.include_usage` true, without which nothing could be billed.

    Shapes:  the payload is a JSON object; every byte of it outside of that member stays; the same object comes back
             when it is true already (and when the payload is no JSON object: then the model decides)
    Source:  design section 8
    """
    start = space_end(payload, 0)
    if payload[start : start + 1] != b"{":
        return payload
    try:
        options, end_of_all = last_span(payload, start, "stream_options")
        if options is None:
            return _insert(payload, start, end_of_all, b'"stream_options":{"include_usage":true}')
        at, end = options
        if payload[at : at + 1] != b"{":
            return payload[:at] + b'{"include_usage":true}' + payload[end:]
        usage, end_of_all = last_span(payload, at, "include_usage")
    except NotJson:
        return payload
    if usage is None:
        return _insert(payload, at, end_of_all, b'"include_usage":true')
    at, end = usage
    return payload if payload[at:end] == b"true" else payload[:at] + b"true" + payload[end:]


def _insert(payload: bytes, start: int, end_of_all: int | None, member: bytes) -> bytes:
    """Put one more member behind the last one of the object at `start`."""
    if end_of_all is None:
        return payload[: start + 1] + member + payload[start + 1 :]
    return payload[:end_of_all] + b"," + member + payload[end_of_all:]
