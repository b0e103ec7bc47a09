"""A client that costs next to nothing, to learn what a model server can take by itself. One thread."""

from __future__ import annotations

import selectors
import socket
import time

from devstack.processes import LOOPBACK

_RECEIVE_BYTES = 65_536
_TIMEOUT_S = 5.0


def request_bytes(path: str, body: bytes) -> bytes:
    """Put a POST together."""
    head = f"POST {path} HTTP/1.1\r\nHost: {LOOPBACK}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def answer_length(data: bytes) -> int | None:
    """Return how long the whole answer is that begins here; None while its headers are not all there."""
    head, mark, _ = data.partition(b"\r\n\r\n")
    if not mark:
        return None
    length = head.lower().partition(b"\r\ncontent-length:")[2].split(b"\r\n", 1)[0]
    return len(head) + len(mark) + int(length or 0)


def measure_rate(port: int, request: bytes, *, connections: int, seconds: float, stagger_s: float = 0.0) -> float:
    """Ask over and over on some connections, each again as soon as it was answered; return answers per second.

    The first requests are sent `stagger_s` apart: a slow server is otherwise asked in waves, each behind the other.

    Raises:  OSError when the server does not answer
    """
    selector = selectors.DefaultSelector()
    sockets = [socket.create_connection((LOOPBACK, port), timeout=_TIMEOUT_S) for _ in range(connections)]
    try:
        received: dict[socket.socket, bytes] = {}
        for sock in sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(sock, selectors.EVENT_READ)
            received[sock] = b""
            sock.sendall(request)
            time.sleep(stagger_s)
        count, began_at = 0, time.perf_counter()
        answered_at = began_at
        ends_at = began_at + seconds
        while answered_at < ends_at:
            ready = selector.select(_TIMEOUT_S)
            if not ready:
                raise OSError(f"no answer within {_TIMEOUT_S:g} s")
            for selected, _ in ready:
                sock = selected.fileobj  # type: ignore[assignment]
                data = received[sock] + sock.recv(_RECEIVE_BYTES)
                length = answer_length(data)
                if length is None or len(data) < length:
                    received[sock] = data
                    continue
                received[sock] = b""
                count += 1
                answered_at = time.perf_counter()
                sock.sendall(request)
        # to the last answer, not to the end of the time: slow answers come in waves
        return count / (answered_at - began_at)
    finally:
        selector.close()
        for sock in sockets:
            sock.close()
