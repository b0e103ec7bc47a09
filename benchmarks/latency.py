"""What a request costs in time beyond the model's own: one at a time, from its sending to the sight of its result.

The result is seen through Redis' keyspace notifications, so nothing polls. One thread.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pika.frame
import pika.spec

from benchmarks import messages
from benchmarks.bench import Bench, Running
from benchmarks.servers.http_servers import HttpServerProcess
from devstack import processes
from devstack.processes import LOOPBACK

#: seconds from the start of a request to the start of the next
_INTERVAL_S = 0.015
_RESULT_TIMEOUT_S = 20.0


@dataclass
class Latencies:
    """Of each request, in order: seconds from sending to sight, and those at the model."""

    total_s: list[float] = field(default_factory=list)
    model_s: list[float] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)

    def added_s(self) -> list[float]:
        """Return what came on top of the model."""
        return [total - model for total, model in zip(self.total_s, self.model_s, strict=True)]


class Sights:
    """A subscription to the results that are stored. One thread."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((LOOPBACK, port), timeout=_RESULT_TIMEOUT_S)
        self._socket.sendall(b"SUBSCRIBE __keyevent@0__:set\r\n")
        self._seen = self._socket.recv(4096)

    def wait(self, request_id: str) -> None:
        """Wait until this result is stored.

        Raises:  TimeoutError
        """
        mark = request_id.encode()
        while mark not in self._seen:
            # two parts may split the id
            self._seen = self._seen[-256:] + self._socket.recv(65_536)
        self._seen = b""

    def close(self) -> None:
        """Give the connection back."""
        self._socket.close()


@contextlib.contextmanager
def sights(bench: Bench) -> Iterator[Sights]:
    """Let Redis tell of results while the block runs."""
    bench.redis.config_set("notify-keyspace-events", "E$")
    seen = Sights(bench.redis_server.port)
    try:
        yield seen
    finally:
        seen.close()
        bench.redis.config_set("notify-keyspace-events", "")


def measure_latencies(
    bench: Bench,
    running: Running,
    seen: Sights,
    *,
    model: HttpServerProcess | None,
    count: int,
    interval_s: float = _INTERVAL_S,
) -> Latencies:
    """Send so many requests one at a time, with a pause after each.

    The model is the stand-in, which tells its own time, or None for the instant one, whose few µs count as the
    contender's.

    Raises:  NotInTime, with the end of the contender's log
    """
    if model is not None:
        model.timings()
    found = Latencies()
    for _ in range(count):
        request = messages.make_request()
        body, properties = running.contender.wrap(request, running.queue)
        channel = bench.channel()
        raw = _publish_frames(channel.channel_number, running.queue, body, properties)
        began_at = time.perf_counter()
        # the client's own library takes a while to write a message and look at its sockets: that is not the contender's
        channel.connection._impl._transport._sock.sendall(raw)
        try:
            seen.wait(request["request_id"])
        except TimeoutError as err:
            raise processes.NotInTime(f"{running.contender.name} gave no result\n{running.log()[-2000:]}") from err
        ended_at = time.perf_counter()
        found.total_s.append(ended_at - began_at)
        found.request_ids.append(request["request_id"])
        time.sleep(max(0.0, interval_s - (ended_at - began_at)))
    found.model_s = model.timings() if model is not None else [0.0] * count
    if len(found.model_s) != count:
        raise processes.NotInTime(f"the model saw {len(found.model_s)} requests, not {count}")
    return found


def _publish_frames(channel_number: int, queue: str, body: bytes, properties: pika.BasicProperties) -> bytes:
    """Write a message to the default exchange as it goes over the wire; it has to fit one frame."""
    publish = pika.spec.Basic.Publish(exchange="", routing_key=queue)
    frames = (
        pika.frame.Method(channel_number, publish),
        pika.frame.Header(channel_number, len(body), properties),
        pika.frame.Body(channel_number, body),
    )
    return b"".join(frame.marshal() for frame in frames)
