"""A threaded HTTP/1.1 server on raw sockets, so that it can also break the protocol.

One thread accepts, one more for each connection runs the exchanges on it, in order. Knows nothing of models or sinks.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType

from devstack.processes import LOOPBACK

#: bytes of request line and headers before we give up on a client
_MAX_HEAD_BYTES = 64 * 1024
_RECEIVE_BYTES = 64 * 1024
#: seconds for a thread to notice that its server closes
_JOIN_TIMEOUT_S = 5.0
_BACKLOG = 1024


class ClientGone(Exception):
    """The client closed or reset the connection, or our side ended it. Raised by `Connection`; ends the exchange."""


class BadRequest(Exception):
    """The bytes are no HTTP request that this server understands. Answered with 400."""


@dataclass(frozen=True)
class Request:
    """One request, read whole."""

    method: str
    path: str  #: percent-decoded, without the query
    query: Mapping[str, str]
    headers: Mapping[str, str]  #: names in lower case
    body: bytes

    @property
    def keeps_alive(self) -> bool:
        """Whether the client wants to go on with this connection."""
        return self.headers.get("connection", "").lower() != "close"


class Connection:
    """One accepted connection. Owned by its thread; `end` alone may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = b""
        self._closed = False
        self._lock = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """Send bytes as they are.

        Raises:  ClientGone
        """
        try:
            self._sock.sendall(data)
        except OSError as err:
            raise ClientGone from err

    def receive_until(self, mark: bytes, *, limit_bytes: int) -> bytes:
        """Return the bytes up to and including a mark.

        Raises:  ClientGone; BadRequest when the mark is not within the limit
        """
        while mark not in self._received:
            if len(self._received) > limit_bytes:
                raise BadRequest(f"no end of the headers within {limit_bytes} bytes")
            self._receive_more()
        found, _, self._received = self._received.partition(mark)
        return found + mark

    def receive_exactly(self, count: int) -> bytes:
        """Return that many bytes.

        Raises:  ClientGone
        """
        parts = [self._received]
        missing = count - len(self._received)
        self._received = b""
        while missing > 0:
            self._receive_more()
            parts.append(self._received)
            missing -= len(self._received)
            self._received = b""
        whole = b"".join(parts)
        self._received = whole[count:]
        return whole[:count]

    def pause(self, seconds: float) -> None:
        """Wait, and notice at once when the client hangs up.

        Raises:  ClientGone
        """
        deadline = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            if not poller.poll(left_s * 1000):
                return
            try:
                ahead = self._sock.recv(1, socket.MSG_PEEK)
            except OSError as err:
                raise ClientGone from err
            if not ahead:
                raise ClientGone
            # The next request is here already, so the socket stays readable: a hang-up shows when we write
            time.sleep(max(0.0, deadline - time.monotonic()))

    def reset(self) -> None:
        """Close with a RST: the client sees "connection reset by peer"."""
        self._abort_on_close()
        self.close()

    def close(self) -> None:
        """Close in the ordinary way."""
        with self._lock:
            self._closed = True
            self._sock.close()

    def end(self, *, reset: bool) -> None:
        """Make the connection's thread close it, whatever it is waiting for."""
        with self._lock:
            if self._closed:
                return
            if reset:
                self._abort_on_close()
                # Wakes the thread and sends nothing, so that the RST at its close is all that the client sees
                how = socket.SHUT_RD
            else:
                how = socket.SHUT_RDWR
            with contextlib.suppress(OSError):
                self._sock.shutdown(how)

    def _abort_on_close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _receive_more(self) -> None:
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except OSError as err:
            raise ClientGone from err
        if not data:
            raise ClientGone
        self._received += data


class Exchange:
    """One request and the ways to answer it. Owned by its connection's thread."""

    def __init__(self, request: Request, connection: Connection) -> None:
        self.request = request
        self.connection = connection
        self.ends_connection = not request.keeps_alive

    def respond(self, status: int, body: bytes = b"", *, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole answer with its length."""
        fields = {"Content-Length": str(len(body)), **(headers or {})}
        self.connection.send(encode_head(status, fields) + body)

    def pause(self, seconds: float) -> None:
        """Wait; raises ClientGone as soon as the client hangs up."""
        if seconds > 0:
            self.connection.pause(seconds)


def encode_head(status: int, headers: Mapping[str, str]) -> bytes:
    """Encode the status line and the headers, with the empty line after them."""
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = "Status"
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def encode_chunk(data: bytes) -> bytes:
    """Encode one chunk of a chunked body; no data encodes the last chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def read_request(connection: Connection) -> Request:
    """Read one request from a connection.

    Raises:  ClientGone, BadRequest
    """
    head = connection.receive_until(b"\r\n\r\n", limit_bytes=_MAX_HEAD_BYTES).decode("latin-1")
    request_line, *lines = head.strip().split("\r\n")
    try:
        method, target, _ = request_line.split(" ")
    except ValueError as err:
        raise BadRequest(f"no request line: {request_line[:100]}") from err
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    url = urllib.parse.urlsplit(target)
    if headers.get("expect", "").lower() == "100-continue":
        connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    return Request(
        method=method,
        path=urllib.parse.unquote(url.path),
        query=dict(urllib.parse.parse_qsl(url.query)),
        headers=headers,
        body=read_body(connection, headers),
    )


def read_body(connection: Connection, headers: Mapping[str, str]) -> bytes:
    """Read a request's body, by length or in chunks."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        parts: list[bytes] = []
        while True:
            line = connection.receive_until(b"\r\n", limit_bytes=_MAX_HEAD_BYTES)
            try:
                size = int(line.split(b";")[0], 16)
            except ValueError as err:
                raise BadRequest("no chunk size") from err
            part = connection.receive_exactly(size)
            connection.receive_until(b"\r\n", limit_bytes=_MAX_HEAD_BYTES)
            if not size:
                return b"".join(parts)
            parts.append(part)
    try:
        length = int(headers.get("content-length", "0"))
    except ValueError as err:
        raise BadRequest("no Content-Length") from err
    return connection.receive_exactly(length)


class HttpServer:
    """A server that keeps its port from `start` to `close`, also while it refuses connections. Safe from any thread."""

    def __init__(self, answer: Callable[[Exchange], None], *, port: int = 0) -> None:
        self._answer = answer
        self._lock = threading.RLock()
        self._connections: dict[Connection, threading.Thread] = {}
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        # Bound and never listening: while the listener is closed, nobody else can be given the port
        self._reservation = bound_socket(port)
        self.port: int = self._reservation.getsockname()[1]
        self.url = f"http://{LOOPBACK}:{self.port}"

    def start(self) -> None:
        """Listen; also ends a `refuse`."""
        with self._lock:
            if self._listener is not None:
                return
            listener = bound_socket(self.port)
            listener.listen(_BACKLOG)
            self._listener = listener
            self._acceptor = threading.Thread(
                target=self._accept, args=(listener,), name=f"http-accept-{self.port}", daemon=True
            )
            self._acceptor.start()

    def refuse(self) -> None:
        """Stop listening and reset every open connection, as if the process had died."""
        self._stop_listening()
        self.end_connections(reset=True)

    def end_connections(self, *, reset: bool) -> None:
        """End every open connection, the idle ones too, and go on listening."""
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            connection.end(reset=reset)
        for thread in connections.values():
            if thread is not threading.current_thread():
                thread.join(_JOIN_TIMEOUT_S)

    def close(self) -> None:
        """End everything and give the port back."""
        self._stop_listening()
        self.end_connections(reset=False)
        self._reservation.close()

    def _stop_listening(self) -> None:
        with self._lock:
            listener, self._listener = self._listener, None
            acceptor, self._acceptor = self._acceptor, None
        if listener is None or acceptor is None:
            return
        # On Linux the first line wakes accept(), elsewhere its time limit does
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        if acceptor is not threading.current_thread():
            acceptor.join(_JOIN_TIMEOUT_S)
        listener.close()

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(0.2)
        while self._listener is listener:
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            sock.settimeout(None)
            connection = Connection(sock)
            thread = threading.Thread(
                target=self._serve, args=(connection,), name=f"http-connection-{self.port}", daemon=True
            )
            with self._lock:
                if self._listener is not listener:
                    connection.reset()
                    return
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            while self._serve_one(connection):
                pass
        except ClientGone:
            pass
        except BadRequest as err:
            with contextlib.suppress(ClientGone):
                connection.send(encode_head(400, {"Content-Length": "0", "Connection": "close", "X-Reason": str(err)}))
        finally:
            connection.close()
            with self._lock:
                self._connections.pop(connection, None)

    def _serve_one(self, connection: Connection) -> bool:
        exchange = Exchange(read_request(connection), connection)
        self._answer(exchange)
        return not exchange.ends_connection

    def __enter__(self) -> HttpServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def bound_socket(port: int, *, host: str = LOOPBACK) -> socket.socket:
    """Return a loopback socket that shares its port with others of ours."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock
