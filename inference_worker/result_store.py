"""Results in Redis: keys, TTLs, and writes that never overwrite a `completed` result.

Runs on slot threads and, for the probe, on the health thread. The only file that knows redis. Every error of the
library, whatever its class, means one thing to its callers: Redis cannot be read or written (field report R34).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from inference_worker.errors import StoreDown, StoreLoginRefused
from inference_worker.messages import AlreadyCompleted, Completed, NotOurs, Saved, SaveOutcome, decode_completed

logger = logging.getLogger(__name__)

#: how often a `failed` value may change under us before we take the store for unusable
_WATCH_TRIES = 5
_PROBE_TTL_MS = 1


def open_client(url: str, *, password: str, timeout_s: float, max_connections: int) -> redis.Redis:
    """Make a client that gives a command up within `timeout_s`, the one retry on a dropped connection included.

    A password in the URL wins over `password`, which is never pasted into a URL; empty means no AUTH.
    """
    return redis.Redis.from_url(
        url,
        password=password or None,
        socket_timeout=timeout_s / 2,
        socket_connect_timeout=timeout_s / 2,
        # the library's default is 10 retries: one SET on a refused port took 4 s. A timeout is not tried again
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        max_connections=max_connections,
        socket_keepalive=True,
    )


class ResultStore:
    """The keys of this deployment's answers. Safe from any thread."""

    def __init__(self, client: redis.Redis, *, ttl_s: int, replica_id: str) -> None:
        self._client: Any = client
        self._ttl_s = ttl_s
        self._probe_key = f"infer_resp:.probe:{replica_id}"

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
            if self._client.set(key, value, ex=self._ttl_s, nx=True):
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
            stored = pipe.get(key)
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
            stored = self._client.get(_key(request_id))
        return decode_completed(stored) if stored is not None else None

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


@contextmanager
def translated(client: Any) -> Iterator[None]:
    """Turn the library's errors into ours.

    Raises:  StoreDown, StoreLoginRefused
    """
    try:
        yield
    except redis.AuthenticationError as err:
        raise StoreLoginRefused("Redis refuses the login (REDIS_PASSWORD or the one in REDIS_URL)") from err
    except (redis.RedisError, OSError) as err:
        # after a failover the kept connections lead to a demoted node: dropped, the name is resolved again (R32)
        client.connection_pool.disconnect(inuse_connections=False)
        raise StoreDown(_describe(err)) from err


def _key(request_id: str) -> str:
    return f"infer_resp:{request_id}"


def _describe(err: Exception) -> str:
    """Name the error without its text where that could hold a value; Redis' own error codes are safe and say most."""
    match err:
        case redis.TimeoutError():
            return "no answer in time"
        case redis.ConnectionError():
            return "no connection"
        case redis.ResponseError():
            return f"refused: {str(err)[:120]}"
        case _:
            return type(err).__name__
