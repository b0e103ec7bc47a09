"""One thread's connections: their sockets are known, so that an exchange can be cut off from another thread.

Owned by one thread, but for `Wire.cut`. Knows requests (how a URL is to be sent) and urllib3 (connections, TLS). What
is above them is left out: a session obeys proxy variables and netrc (R39), sends cookies back, so that a model behind a
sticky balancer would stick to a dead replica, and follows redirects; session, adapter and pool cost a third of a
message's CPU, and the building of each request anew a tenth.
"""

from __future__ import annotations

import math
import socket
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
import requests.adapters
import urllib3.connection

from inference_worker.errors import HttpUnreachable
from inference_worker.http_request import Body, request_head, request_start
from inference_worker.http_response import Response

#: a peer on the same host or in the same rack answers a SYN in far less
_CONNECT_TIMEOUT_S = 5.0
#: a body up to this goes out with its head: one system call, and one turn of the interpreter's lock, less
_TOGETHER_BYTES = 65_536


class Wire:
    """What the current exchange is on: the socket, to cut it off, and how far the answer has come.

    Owned by the calling thread; `cut` comes from any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cut = False
        #: there is a connection that the request can go out on
        self.is_connected = False
        #: and it had carried one before
        self.is_reused = False
        self.is_answer_begun = False

    def begin(self) -> None:
        """Forget the exchange before."""
        with self._lock:
            self._socket = None
            self._cut = False
        self.is_connected = self.is_reused = False
        self.is_answer_begun = False

    def attach(self, connection_socket: socket.socket) -> None:
        """Say what the exchange waits on; it is cut at once when it should have been before."""
        with self._lock:
            self._socket = connection_socket
            cut = self._cut
        if cut:
            self.cut()

    def cut(self) -> None:
        """Wake the reader: a shutdown does, a close does not (facts, section 5)."""
        with self._lock:
            self._cut = True
            if self._socket is not None:
                with suppress(OSError):
                    # the plain socket's: that of a TLS socket would take its TLS state from under the reader
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    @property
    def was_cut(self) -> bool:
        return self._cut


def _response_class(wire: Wire) -> type[Response]:
    class WatchedResponse(Response):
        def begin(self) -> None:
            # peek blocks for the first byte: until then the request may not have been seen at all
            wire.is_answer_begun = bool(self.fp.peek(1))
            super().begin()

    return WatchedResponse


def _connect(host: str, port: int, timeout_s: float, wire: Wire) -> socket.socket:
    """Connect to the first address of a host that takes it, with each socket known to the wire before it waits."""
    failure = OSError("the name has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if wire.was_cut:
            break
        connection_socket = socket.socket(family, kind, protocol)
        try:
            connection_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection_socket.settimeout(timeout_s)
            wire.attach(connection_socket)
            connection_socket.connect(address)
        except OSError as err:
            connection_socket.close()
            failure = err
        else:
            return connection_socket
    raise failure


def _connection_class(base: type[Any], wire: Wire) -> type[Any]:
    class Connection(base):  # type: ignore[misc]
        response_class = _response_class(wire)

        def _new_conn(self) -> socket.socket:
            # urllib3's own tells nobody of its socket: a call that still connects could not be cut off for 5 s
            return _connect(self.host, self.port, self.timeout, wire)

    return Connection


@dataclass(frozen=True, slots=True)
class Target:
    """A method and a URL, taken apart once for all requests to it."""

    method: str
    #: of the head
    start: bytes
    connection: Any


class Line:
    """One thread's kept-alive connections, one a host. A broken one is closed; the next request opens it again."""

    def __init__(self) -> None:
        self.wire = Wire()
        self._targets: dict[tuple[str, str], Target] = {}
        self._connections: dict[tuple[str, str, int | None], Any] = {}
        self._response: Response | None = None

    def target(self, method: str, url: str) -> Target:
        """Take a URL apart, the first time that it is asked for.

        Raises:  HttpUnreachable
        """
        target = self._targets.get((method, url))
        if target is None:
            try:
                prepared = requests.Request(method, url).prepare()
                parts = urlsplit(prepared.url or "")
                connection = self._connection(parts.scheme, parts.hostname or "", parts.port)
                start = request_start(method, prepared.path_url, parts.netloc.rpartition("@")[2])
            except (requests.RequestException, ValueError) as err:
                # a host name that is none, for example; the text may hold the URL
                raise HttpUnreachable(f"not a request that can be sent ({type(err).__name__})") from err
            target = self._targets[method, url] = Target(method, start, connection)
        return target

    def _connection(self, scheme: str, host: str, port: int | None) -> Any:
        key = (scheme, host, port)
        connection = self._connections.get(key)
        if connection is None:
            if scheme == "https":
                connection = _connection_class(urllib3.connection.HTTPSConnection, self.wire)(
                    host, port, cert_reqs="CERT_REQUIRED", ca_certs=requests.adapters.DEFAULT_CA_BUNDLE_PATH
                )
            else:
                connection = _connection_class(urllib3.connection.HTTPConnection, self.wire)(host, port)
            # with the thread: a socket that is left to the collector is complained of
            weakref.finalize(self, connection.close)
            self._connections[key] = connection
        return connection

    def send(
        self, target: Target, headers: Mapping[str, str | bytes], body: Body | None, *, timeout_s: float
    ) -> Response:
        """Send one request and read the head of its answer.

        Units:   timeout_s seconds, for each read and write of the socket
        Raises:  what http.client, ssl and urllib3's connections raise, ValueError; the connection is then of no use:
                 `drop` it
        """
        head = request_head(target.start, headers, body)
        connection, wire = target.connection, self.wire
        if connection.sock is not None and not connection.is_connected:
            # the server closed it while it was idle, or sent what nobody asked for
            connection.close()
        wire.is_reused = connection.sock is not None
        if not wire.is_reused:
            connection.timeout = min(_CONNECT_TIMEOUT_S, timeout_s)
            connection.connect()
        stream: socket.socket = connection.sock
        wire.attach(stream)
        wire.is_connected = True
        # each call is a system call, and a turn of the interpreter's lock: not for some milliseconds' difference
        stream_timeout_s = math.ceil(timeout_s * 10) / 10
        if stream.gettimeout() != stream_timeout_s:
            stream.settimeout(stream_timeout_s)
        # a server that refuses a body without reading it to its end has answered all the same
        with suppress(BrokenPipeError):
            if body is None or len(body) <= _TOGETHER_BYTES:
                stream.sendall(head + (body or b""))
            else:
                stream.sendall(head)
                stream.sendall(body)
        response: Response = connection.response_class(stream, method=target.method)
        self._response = response
        response.begin()
        if response.will_close:
            # the answer can still be read
            connection.close()
        return response

    def drop(self, target: Target) -> None:
        """Close a connection whose answer was not read to its end."""
        target.connection.close()
        if self._response is not None:
            self._response.close()
            self._response = None
