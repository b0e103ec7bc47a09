"""Opening a Redis client, and the library's errors in our words.

Any thread. Knows redis, as do its neighbours that use a client. Every error of the library, whatever its class, means
one thing to callers: Redis cannot be read or written (field report R34).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from inference_worker.errors import StoreDown, StoreLoginRefused


def open_client(
    url: str, *, password: str, timeout_s: float, max_connections: int, retry_count: int = 1
) -> redis.Redis:
    """Make a client that gives a command up within `timeout_s`, the one retry on a dropped connection included.

    With a `retry_count` of 0 nothing is sent twice, for commands that must not be carried out twice.
    A password in the URL wins over `password`, which is never pasted into a URL; empty means no AUTH.
    """
    return redis.Redis.from_url(
        url,
        password=password or None,
        socket_timeout=timeout_s / 2,
        socket_connect_timeout=timeout_s / 2,
        # the library's default is 10 retries: one SET on a refused port took 4 s. A timeout is not tried again
        retry=Retry(NoBackoff(), retry_count, supported_errors=(redis.ConnectionError,)),
        max_connections=max_connections,
        socket_keepalive=True,
    )


class PinnedCommands:
    """Single commands over a connection that stays with its thread. Safe from any thread.

    Taking one out of the pool and putting it back costs as much again as a command, twice for each message.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._pool: Any = client.connection_pool
        self._pinned = threading.local()

    def execute(self, *words: Any) -> Any:
        """Run one command. Raises what the library raises; the connection is another one then."""
        client: Any = getattr(self._pinned, "client", None)
        if client is None:
            client = self._pinned.client = redis.Redis(connection_pool=self._pool, single_connection_client=True)
        try:
            return client.execute_command(*words)
        except (redis.RedisError, OSError):
            # after a failover it leads to a demoted node: dropped, the name is resolved again (R32)
            del self._pinned.client
            with suppress(redis.RedisError, OSError):
                client.connection.disconnect()
            client.close()
            raise


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


def _describe(err: Exception) -> str:
    """Name the error without its text where that could hold a value; Redis' own error codes are safe and say most."""
    match err:
        case redis.TimeoutError():
            return "no answer in time"
        case redis.ConnectionError():
            return "no connection"
        case redis.ResponseError():
            # a command of a pipeline is quoted before the reason, an unknown command in it: with the answer, both times
            reason = str(err).rpartition("caused error: ")[2].partition("'")[0][:80].strip()
            return f"refused ({type(err).__name__}{': ' + reason if reason else ''})"
        case _:
            return type(err).__name__


def is_wrong_type(err: redis.ResponseError) -> bool:
    """Tell whether a key holds another kind of value than was asked for."""
    return "WRONGTYPE" in str(err) or "wrong kind of value" in str(err)
