"""Opening a Redis client, and the library's errors in our words.

Any thread. Knows redis, as do its neighbours that use a client. Every error of the library, whatever its class, means
one thing to callers: Redis cannot be read or written (field report R34).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from inference_worker.errors import StoreDown, StoreLoginRefused


def open_client(url: str, *, password: str, timeout_s: float, retry_count: int = 1) -> redis.Redis:
    """Make a client that gives a command up within `timeout_s`, the one retry on a dropped connection included.

    With a `retry_count` of 0 nothing is sent twice, for commands that must not be carried out twice.
    A password in the URL wins over `password`, which is never pasted into a URL; empty means no AUTH.
    """
    connections = _OwnConnections.from_url(
        url,
        password=password or None,
        socket_timeout=timeout_s / 2,
        socket_connect_timeout=timeout_s / 2,
        # the library's default is 10 retries: one SET on a refused port took 4 s. A timeout is not tried again
        retry=Retry(NoBackoff(), retry_count, supported_errors=(redis.ConnectionError,)),
        socket_keepalive=True,
        # as many as there are threads
        max_connections=sys.maxsize,
    )
    return redis.Redis.from_pool(connections)


class _OwnConnections(redis.ConnectionPool):
    """A connection for each thread that asks, kept by it. Safe from any thread.

    To take one out of the library's pool and put it back costs as much again as a command, twice for each message; and
    how many that pool has depends on how many commands once came together, so that no leak could be told from it.
    """

    def __init__(self, *, retry: Retry, **options: Any) -> None:
        self._own = threading.local()
        #: where a command is tried again, that finds a stale connection for less
        self._looks_first = retry.get_retries() == 0
        super().__init__(retry=retry, **options)

    def get_connection(self, command_name: Any = None, *keys: Any, **options: Any) -> Any:
        connection: Any = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = self.make_connection()
            with self._lock:
                self._in_use_connections.add(connection)
        if connection.should_reconnect() or (self._looks_first and _is_stale(connection)):
            connection.disconnect()
        connection.connect()
        return connection

    def release(self, connection: Any) -> None:
        """Leave it with its thread."""

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Close all; without those in use, each is opened anew when it is used next."""
        if inuse_connections:
            super().disconnect()
            return
        with self._lock:
            for connection in self._in_use_connections:
                connection.mark_for_reconnect()


def _is_stale(connection: Any) -> bool:
    """Tell whether the server closed a connection, or said what nobody asked for, while nobody used it."""
    try:
        return bool(connection.is_connected and connection.can_read())
    except (redis.RedisError, OSError):
        return True


def ask(client: Any, *command: Any) -> Any:
    """Carry one command out on this thread's connection, with the client's retries; return the reply as it came.

    The library's own `execute_command` spends more on its metrics and callbacks than on the command: of a message with
    two commands a tenth of the CPU.

    Raises:  what the library raises
    """
    pool = client.connection_pool
    connection = pool.get_connection()

    def send_and_read() -> Any:
        connection.send_command(*command)
        return connection.read_response()

    try:
        return connection.retry.call_with_retry(send_and_read, lambda _: connection.disconnect())
    finally:
        pool.release(connection)


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
        # after a failover all connections lead to a demoted node: opened anew, the name is resolved again (R32)
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
