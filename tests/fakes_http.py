"""An HTTP server on a real socket that says exactly the bytes it is told, and stalls, cuts and resets on command.

It keeps a server's rules (a request is read whole before it is answered; a connection carries one request after the
other until it is closed) and none of a client's. Runs on threads of its own; safe from the test's thread.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from timeouts import LONG_TIMEOUT_S

_TLS = Path(__file__).parent / "tls"
CERTIFICATE = _TLS / "localhost-certificate.pem"


#: five seconds
_TRICKLED_BYTES = 250


class Do(Enum):
    """What a reply can do beside saying bytes."""

    #: end the connection in order (FIN)
    CLOSE = "close"
    #: end it with a reset (RST)
    RESET = "reset"
    #: say nothing more until the client hangs up
    STALL = "stall"
    #: say one space every 20 ms until the client hangs up, or has had far too much patience
    TRICKLE = "trickle"


#: bytes to say, an event to wait for, or something else to do
Step = bytes | threading.Event | Do


@dataclass(frozen=True)
class Received:
    """One request as it came."""

    #: counted from 0
    connection: int
    method: str
    target: str
    #: names in lower case; of a name sent twice all values, joined by ", "
    headers: dict[str, str]
    body: bytes


def answer(
    body: bytes = b"{}", *, status: str = "200 OK", headers: dict[str, str] | None = None, length: bool = True
) -> bytes:
    """Write an answer; without `length` its body ends with the connection."""
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class HttpServer:
    """Answers the n-th request with the n-th reply that it was given; without one it fails the client with a 599."""

    def __init__(self, *, tls: bool = False) -> None:
        self._context = None
        if tls:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(CERTIFICATE, _TLS / "localhost-key.pem")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._changed = threading.Condition()
        self._replies: deque[tuple[Step, ...]] = deque()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._is_stopping = False
        self.requests: list[Received] = []
        self.connection_count = 0
        #: connections that either side has ended
        self.ended_count = 0
        #: replies that have come to a stall or a trickle: all that they say before it is on its way
        self.stalled_count = 0
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._listening.getsockname()[1]}"
        self._start(self._accept)

    def reply(self, *steps: Step) -> None:
        """Add what is done for the next request that has no reply yet."""
        self._replies.append(steps)

    def wait_for(self, is_true: Callable[[HttpServer], bool]) -> None:
        """Wait until something has come about, for as long as it takes a machine to be called broken."""
        with self._changed:
            assert self._changed.wait_for(lambda: is_true(self), LONG_TIMEOUT_S), "it never came about"

    def stop(self) -> None:
        """End every connection and thread."""
        with self._changed:
            self._is_stopping = True
            connections = list(self._open)
        for connection in (self._listening, *connections):
            with suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(LONG_TIMEOUT_S)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="fake-http", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with self._changed:
                if self._is_stopping:
                    connection.close()
                    return
                number = self.connection_count
                self.connection_count += 1
                self._open.add(connection)
            self._start(self._serve, connection, number)

    def _serve(self, plain: socket.socket, number: int) -> None:
        connection = plain
        try:
            if self._context is not None:
                connection = self._context.wrap_socket(plain, server_side=True)
                with self._changed:
                    self._open = (self._open - {plain}) | {connection}
            with connection.makefile("rb") as reader:
                while (request := self._read(reader, number)) is not None:
                    with self._changed:
                        self.requests.append(request)
                        steps = self._replies.popleft() if self._replies else (answer(status="599 Unexpected"),)
                        self._changed.notify_all()
                    if not all(self._do(connection, step) for step in steps):
                        break
        except OSError:
            pass
        finally:
            connection.close()
            with self._changed:
                self._open.discard(connection)
                self.ended_count += 1
                self._changed.notify_all()

    @staticmethod
    def _read(reader: Any, number: int) -> Received | None:
        method, _, rest = reader.readline().decode("latin-1").partition(" ")
        if not rest:
            return None
        headers: dict[str, str] = {}
        while line := reader.readline().decode("latin-1").strip():
            name, _, value = line.partition(":")
            name, value = name.lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        body = reader.read(int(headers.get("content-length", "0")))
        return Received(number, method, rest.split(" ")[0], headers, body)

    def _do(self, connection: socket.socket, step: Step) -> bool:
        """Do one step; False when the connection is to end."""
        if step in (Do.STALL, Do.TRICKLE):
            with self._changed:
                self.stalled_count += 1
                self._changed.notify_all()
        match step:
            case bytes():
                connection.sendall(step)
            case threading.Event():
                assert step.wait(LONG_TIMEOUT_S), "nobody set the event"
            case Do.CLOSE:
                return False
            case Do.RESET:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
            case Do.STALL:
                connection.settimeout(LONG_TIMEOUT_S)
                return connection.recv(1) != b""
            case Do.TRICKLE:
                connection.settimeout(0.02)
                for _ in range(_TRICKLED_BYTES):
                    try:
                        return connection.recv(1) != b""
                    except TimeoutError:
                        connection.sendall(b" ")
                return False
        return True
