"""A streamed answer in Redis as it is made: the Redis Stream `infer_stream:<request_id>`.

Slot threads append; what is gathered meanwhile is written by one thread, `stream-writer`: the first chunk at once,
later ones within 50 ms, so at most 20 writes a second for each stream. Knows redis.
Source: design section 8 "Streaming".
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import redis

from inference_worker.errors import StoreDown
from inference_worker.redis_client import is_wrong_type, translated

logger = logging.getLogger(__name__)

#: how long chunks are gathered
_GATHER_S = 0.05
#: after a write that failed; the chunks stay and go with the next one
_PAUSE_AFTER_FAILURE_S = 1.0
#: 20 a second for more than an hour; the bound on what a runaway stream can take
_MAX_ENTRIES = 100_000
_LOOK_AGAIN_S = 60.0

#: `type`, `attempt`, `data`
Entry = dict[str, bytes | str]


class AnswerStream:
    """One attempt's entries. `append` and `end` on its slot thread, `flush` on the writer's as well."""

    def __init__(
        self, store: StreamStore, key: str, *, attempt: str, is_retry: bool, is_wanted: Callable[[], bool]
    ) -> None:
        self._store = store
        self._key = key
        #: 8 hexadecimal digits, another one in every attempt
        self.attempt = attempt
        #: false once the attempt's session has ended: another one writes now
        self._is_wanted = is_wanted
        self._lock = threading.Lock()
        self._chunks: list[bytes] = []
        #: what Redis has taken of this attempt
        self._written: list[bytes] = []
        #: a write began whose end we have not heard of: Redis may have taken it
        self._is_torn = False
        #: how long the stream was after our last write
        self._length = 0
        #: another attempt wrote after we began: to those who follow, its text may count now
        self._has_others = False
        self._has_restart = is_retry
        self._wrote_at = float("-inf")
        #: the writer will flush: until then nobody else writes, but for the end
        self._is_scheduled = False

    def append(self, chunk: bytes) -> None:
        """Add one of the model's chunks, a JSON text. Written at once when nothing was for 50 ms, else soon."""
        with self._lock:
            self._chunks.append(chunk)
            if self._is_scheduled:
                return
            due_at = self._wrote_at + _GATHER_S
            is_due = due_at <= monotonic()
            self._is_scheduled = not is_due
        if is_due:
            self.flush()
        else:
            self._store.flush_at(due_at, self)

    @property
    def has_chunks(self) -> bool:
        """Whether the model has said anything through this stream."""
        return bool(self._chunks or self._written)

    def flush(self) -> None:
        """Write what was gathered. What Redis does not take now stays, and goes with the next write."""
        self._is_scheduled = False
        try:
            self._write([])
        except StoreDown as err:
            extra = {"event": "stream_write_failed"}
            logger.debug("a stream's chunks wait for Redis: %s", err, extra=extra)
            self._is_scheduled = True
            self._store.flush_at(monotonic() + _PAUSE_AFTER_FAILURE_S, self)

    def replace(self, chunk: bytes) -> None:
        """Forget this attempt's chunks: this is the whole of the stored result, whose attempt may be another."""
        with self._lock:
            self._has_restart = True
            self._written.clear()
            self._chunks[:] = [chunk]

    def end(self, kind: str, data: bytes = b"", *, whole: Callable[[], bytes] | None = None) -> None:
        """Write what is left, and the last entry: `done`, or `failed` with the result's body.

        Of two attempts at once each may end the other's text. With `whole` what we wrote so far counts only where no
        other attempt has written since we began; else the whole answer is written once more, as one chunk.

        Raises:  StoreDown
        """
        closing = [self._entry(kind, data)]
        if whole is None:
            self._write(closing)
        elif not self._write(closing, only_if_alone=True):
            self.replace(whole())
            self._write(closing)

    def _write(self, closing: list[Entry], *, only_if_alone: bool = False) -> bool:
        """Write what was gathered, and `closing`; False, with nothing written, when another attempt wrote as well."""
        with self._lock:
            if not self._is_wanted():
                return True
            if self._is_torn:
                # sent again as it was, a piece may be there twice, and nothing would tell those who follow
                self._chunks[:0] = self._written
                self._written.clear()
                self._has_restart = True
            opening = [self._entry("restart")] if self._has_restart else []
            gathered = [self._entry("chunk", b"[" + b",".join(self._chunks) + b"]")] if self._chunks else []
            entries = [*opening, *gathered, *closing]
            if not entries:
                return True
            if only_if_alone and self._has_others and not opening:
                return False
            self._wrote_at = monotonic()
            self._is_torn = True
            # what was there before our `restart` counts no more
            expected_length = self._length if only_if_alone and not opening else None
            length = self._store.write(self._key, entries, expected_length=expected_length)
            self._is_torn = False
            if length is None:
                return False
            self._has_others = not opening and (self._has_others or length != self._length + len(entries))
            self._length, self._has_restart = length, False
            self._written += self._chunks
            self._chunks.clear()
            return True

    def _entry(self, kind: str, data: bytes = b"") -> Entry:
        return {"type": kind, "attempt": self.attempt, "data": data}


class StreamStore:
    """Opens streams and owns the writer thread, which starts with the first of them. Safe from any thread."""

    def __init__(self, client: redis.Redis, *, ttl_s: int) -> None:
        self._client: Any = client
        self._ttl_s = ttl_s
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, AnswerStream]] = []
        self._order = itertools.count()
        self._writer: threading.Thread | None = None

    def open(self, request_id: str, *, attempt: str, is_retry: bool, is_wanted: Callable[[], bool]) -> AnswerStream:
        """Begin one attempt's entries; a further attempt begins with `restart`. Nothing is written yet."""
        key = f"infer_stream:{request_id}"
        return AnswerStream(self, key, attempt=attempt, is_retry=is_retry, is_wanted=is_wanted)

    def flush_at(self, due_at: float, stream: AnswerStream) -> None:
        """Have the writer flush a stream at this time, monotonic."""
        with self._changed:
            if self._writer is None:
                writer = threading.Thread(target=self._run, name="stream-writer", daemon=True)
                # before it can be seen: one that is not started looks dead, and a dead one ends the process
                writer.start()
                self._writer = writer
            heapq.heappush(self._due, (due_at, next(self._order), stream))
            self._changed.notify()

    def write(self, key: str, entries: list[Entry], *, expected_length: int | None = None) -> int | None:
        """Append entries and renew the TTL; return how long the stream is then.

        With an `expected_length` nothing is written to a stream of another length, and None returned.

        Raises:  StoreDown, StoreLoginRefused
        """
        with translated(self._client):
            try:
                return self._append(key, entries, expected_length)
            except redis.ResponseError as err:
                if not is_wrong_type(err):
                    raise
                # somebody else's value under our key
                self._client.delete(key)
                return self._append(key, entries, None)

    def _append(self, key: str, entries: list[Entry], expected_length: int | None) -> int | None:
        # at once: an entry of another attempt must not come between a `restart` and its `done`
        with self._client.pipeline(transaction=True) as pipe:
            if expected_length is not None:
                pipe.watch(key)
                if pipe.xlen(key) != expected_length:
                    return None
                pipe.multi()
            for entry in entries:
                pipe.xadd(key, entry, maxlen=_MAX_ENTRIES, approximate=True)
            pipe.xlen(key)
            pipe.expire(key, self._ttl_s)
            try:
                *_, length, _ = pipe.execute()
            except redis.WatchError:
                return None
        return int(length)

    @property
    def is_alive(self) -> bool:
        """Whether the writer lives, or was not needed yet."""
        return self._writer is None or self._writer.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due or (wait_s := self._due[0][0] - monotonic()) > 0:
                    self._changed.wait(wait_s if self._due else _LOOK_AGAIN_S)
                _, _, stream = heapq.heappop(self._due)
            stream.flush()
