"""One streamed answer, read as it comes: its chunks go to a sink and into the assembly, and its tokens are timed.

Runs on a slot thread. Knows no library.
Source: design section 8 "Streaming".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Protocol

from inference_worker.event_stream import EventStreamParser
from inference_worker.model_stream import Assembly, ChunkKind


class ChunkSink(Protocol):
    """Where the chunks of a streamed answer go as they come."""

    #: 8 hexadecimal digits, another one in every attempt
    attempt: str

    def append(self, chunk: bytes) -> None: ...


class StreamReader:
    """Reads one streamed answer as it comes. Owned by a slot thread."""

    def __init__(self, sink: ChunkSink, *, max_body_bytes: int) -> None:
        self._sink = sink
        self._parser = EventStreamParser(max_event_bytes=max_body_bytes)
        self.assembly = Assembly(max_body_bytes=max_body_bytes)
        self._began_at = monotonic()
        self._first_token_at: float | None = None
        self._last_token_at = 0.0
        self._token_count = 0
        self.status_code = 0
        self.headers: Mapping[str, str] = {}
        self.is_streaming = False
        #: the answer is whole; what follows is not looked at
        self.is_done = False

    def listen(self, status_code: int, headers: Mapping[str, str]) -> Callable[[bytes], None] | None:
        """Take the body's pieces when it is a stream; an error, or an answer unstreamed all the same, is no stream."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if not 200 <= status_code <= 299 or kind != "text/event-stream":
            return None
        self.is_streaming = True
        self.status_code, self.headers = status_code, headers
        return self._take

    def _take(self, piece: bytes) -> None:
        for data in self._parser.feed(piece):
            facts = self.assembly.add(data)
            self.is_done = self.is_done or facts.kind is ChunkKind.DONE
            if facts.has_token:
                self._last_token_at = monotonic()
                self._token_count += 1
                if self._first_token_at is None:
                    self._first_token_at = self._last_token_at
            if facts.kind is ChunkKind.PIECE:
                self._sink.append(data)

    @property
    def ttft_s(self) -> float | None:
        return None if self._first_token_at is None else self._first_token_at - self._began_at

    @property
    def tbt_s(self) -> float | None:
        if self._first_token_at is None or self._token_count < 2:
            return None
        return (self._last_token_at - self._first_token_at) / (self._token_count - 1)
