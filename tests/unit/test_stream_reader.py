"""Reading one streamed answer: what is a stream, where its chunks go, when its tokens came."""

from __future__ import annotations

import pytest

from inference_worker.errors import HttpTooLarge
from inference_worker.model_stream import StreamEnd
from inference_worker.stream_reader import StreamReader


class RecordingSink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.attempt = "0a1b2c3d"
        self.chunks: list[bytes] = []

    def append(self, chunk: bytes) -> None:
        self.chunks.append(chunk)


def chunk(text: str, finish: str = "null") -> bytes:
    return (
        b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
        b'"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":%b}]}' % (text.encode(), finish.encode())
    )


def read(*pieces: bytes, max_body_bytes: int = 100_000) -> tuple[StreamReader, RecordingSink]:
    sink = RecordingSink()
    reader = StreamReader(sink, max_body_bytes=max_body_bytes)
    take = reader.listen(200, {"content-type": "text/event-stream; charset=utf-8"})
    assert take is not None
    for piece in pieces:
        take(piece)
    return reader, sink


@pytest.mark.parametrize(
    ("status", "content_type"),
    [(400, "text/event-stream"), (200, "application/json"), (200, ""), (302, "text/event-stream")],
)
def test_what_is_no_2xx_event_stream_is_read_as_an_ordinary_body(status: int, content_type: str) -> None:
    reader = StreamReader(RecordingSink(), max_body_bytes=1000)
    assert reader.listen(status, {"content-type": content_type}) is None
    assert not reader.is_streaming


def test_the_sink_gets_the_chunks_of_the_model_and_nothing_else() -> None:
    first, last = chunk("a"), chunk("b", '"stop"')
    reader, sink = read(b": keep-alive\n\ndata: " + first[:20], first[20:] + b"\n\n", b"data: %b\n\n" % last)
    reader._take(b"data: [DONE]\n\n")
    assert sink.chunks == [first, last]
    assert reader.is_done
    assert reader.assembly.finish().end is StreamEnd.COMPLETE


def test_the_time_to_the_first_token_and_between_tokens_is_unknown_without_tokens() -> None:
    reader, _ = read(b'data: {"object":"chat.completion.chunk","choices":[]}\n\n')
    assert (reader.ttft_s, reader.tbt_s) == (None, None)


def test_the_time_between_tokens_needs_two_of_them() -> None:
    reader, _ = read(b"data: %b\n\n" % chunk("a"))
    assert reader.ttft_s is not None
    assert reader.tbt_s is None
    reader._take(b"data: %b\n\n" % chunk("b"))
    assert reader.tbt_s is not None
    assert reader.tbt_s >= 0


def test_an_event_longer_than_the_cap_ends_the_reading() -> None:
    with pytest.raises(HttpTooLarge):
        read(b"data: " + b"a" * 300, max_body_bytes=100)
