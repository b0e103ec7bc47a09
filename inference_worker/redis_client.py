"""Opening a Redis client, and the library's errors in our words.

Any thread. Knows redis, as do its neighbours that use a client. Every error of the library, whatever its class, means
one thing to callers: Redis cannot be read or written (field report R34).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from inference_worker.errors import StoreDown, StoreLoginRefused


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
            # an unknown command (SET may be renamed) is quoted with its arguments, and so with the answer
            text = str(err).partition(", with args")[0][:120]
            return f"refused ({type(err).__name__}): {text}"
        case _:
            return type(err).__name__
