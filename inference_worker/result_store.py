"""Results in Redis: keys, TTLs, and writes that never overwrite a `completed` result.

Runs on slot threads and, for the probe, on the health thread. Knows redis.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import redis

from inference_worker.errors import StoreDown
from inference_worker.messages import AlreadyCompleted, Completed, NotOurs, Saved, SaveOutcome, decode_completed
from inference_worker.redis_client import ask, is_wrong_type, translated

logger = logging.getLogger(__name__)

#: how often a `failed` value may change under us before we take the store for unusable
_WATCH_TRIES = 5
_PROBE_TTL_MS = 1


class ResultStore:
    """The keys of this deployment's answers. Safe from any thread."""

    def __init__(self, client: redis.Redis, *, ttl_s: int, replica_id: str) -> None:
        self._client: Any = client
        self._ttl_s = ttl_s
        self._probe_key = f"infer_resp:.probe:{replica_id}"
        self._may_read_cancels = True

    def save(self, request_id: str, value: bytes, *, may_replace: Callable[[], bool]) -> SaveOutcome:
        """Write a result, unless a `completed` one is there already.

        Runs on a slot thread.

        Shapes:  value as `messages.encode_result` made it; may_replace tells whether the attempt's session still
                 lives, since an attempt that was given up may fill an empty key but replace nothing
        Raises:  StoreDown, StoreLoginRefused
        Source:  design section 5 "Result", field report R13
        """
        key = _key(request_id)
        with translated(self._client):
            if ask(self._client, "SET", key, value, "EX", self._ttl_s, "NX"):
                return Saved()
            for _ in range(_WATCH_TRIES):
                outcome = self._replace_failed(key, value, may_replace)
                if outcome is not None:
                    return outcome
        raise StoreDown(f"the result changed under us {_WATCH_TRIES} times")

    def _replace_failed(self, key: str, value: bytes, may_replace: Callable[[], bool]) -> SaveOutcome | None:
        """Replace what is no `completed` result; None when it changed meanwhile."""
        with self._client.pipeline() as pipe:
            pipe.watch(key)
            stored = _get(pipe, key)
            completed = decode_completed(stored) if stored is not None else None
            if completed is not None:
                return AlreadyCompleted(completed)
            if stored is not None and not may_replace():
                return NotOurs()
            pipe.multi()
            pipe.set(key, value, ex=self._ttl_s)
            try:
                pipe.execute()
            except redis.WatchError:
                return None
            return Saved()

    def load_completed(self, request_id: str) -> Completed | None:
        """Read the `completed` result of a request, if there is one.

        Raises:  StoreDown, StoreLoginRefused
        """
        with translated(self._client):
            stored = _get(self._client, _key(request_id))
        return decode_completed(stored) if stored is not None else None

    def find_cancelled(self, request_ids: Iterable[str]) -> set[str]:
        """Return those of these requests that their producers cancelled, by any value under `infer_cancel:<id>`.

        Runs on slot threads and on the cancel watch's. Without the right to read those keys nothing is cancelled: a
        deployment that never cancels must not stand still for it.

        Raises:  StoreDown, StoreLoginRefused
        Source:  design section 8 "Cancelling"
        """
        if not self._may_read_cancels:
            return set()
        asked = list(request_ids)
        with translated(self._client):
            try:
                # MGET for one as well: it takes a value of another type for none, where GET raises
                values = ask(self._client, "MGET", *map(_cancel_key, asked))
            except redis.exceptions.NoPermissionError:
                self._may_read_cancels = False
                extra = {"event": "cancels_unreadable"}
                logger.warning("Redis does not let us read infer_cancel:*, so nothing can be cancelled", extra=extra)
                return set()
        return {request_id for request_id, value in zip(asked, values, strict=True) if value is not None}

    def count_start(self, request_id: str) -> int:
        """Count that a redelivered request is begun, across all workers; return how often it was, this one included.

        A message that kills its worker never comes to a settlement that could count (field report R22).

        Raises:  StoreDown, StoreLoginRefused
        """
        key = _starts_key(request_id)
        with translated(self._client), self._client.pipeline(transaction=False) as pipe:
            pipe.incr(key)
            pipe.expire(key, self._ttl_s)
            started, _ = pipe.execute()
        return int(started)

    def uncount_start(self, request_id: str) -> None:
        """Take a start back: the worker lived to settle it.

        Raises:  StoreDown, StoreLoginRefused
        """
        key = _starts_key(request_id)
        with translated(self._client), self._client.pipeline(transaction=False) as pipe:
            pipe.decr(key)
            pipe.expire(key, self._ttl_s)
            pipe.execute()

    def probe(self) -> None:
        """Make one small write: a read-only or full Redis still answers PING (facts, section 4).

        Runs on the health thread.

        Raises:  StoreDown, StoreLoginRefused
        """
        with translated(self._client):
            # gone at once: who counts the keys of a deployment's answers must not count us
            self._client.set(self._probe_key, b"1", px=_PROBE_TTL_MS)

    def ping(self) -> None:
        """Ask for a sign of life without writing anything (`--check`).

        Raises:  StoreDown, StoreLoginRefused
        """
        with translated(self._client):
            self._client.ping()

    def close(self) -> None:
        """Close the kept connections."""
        self._client.close()


def _starts_key(request_id: str) -> str:
    return f"infer_starts:{request_id}"


def _cancel_key(request_id: str) -> str:
    return f"infer_cancel:{request_id}"


def _key(request_id: str) -> str:
    return f"infer_resp:{request_id}"


def _get(client: Any, key: str) -> bytes | None:
    """Read a value; what is no string is no result of ours, and a SET replaces it."""
    try:
        value: bytes | None = client.get(key)
    except redis.ResponseError as err:
        if not is_wrong_type(err):
            raise
        return b""
    return value
