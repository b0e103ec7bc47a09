"""One bounded HTTP exchange: total time, size cap, cut-off from another thread; no proxies, netrc, cookies, redirects.

Runs on the caller's thread; each thread has connections of its own. The only file that knows requests (and urllib3
below it). It does not know what an answer means.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPResponse, IncompleteRead
from time import monotonic
from typing import Any

import requests
import urllib3
import urllib3.connection
import urllib3.connectionpool
import urllib3.exceptions
from requests.adapters import HTTPAdapter
from requests.structures import CaseInsensitiveDict

from inference_worker.deadlines import Bounded, Deadlines
from inference_worker.errors import (
    HttpCancelled,
    HttpCutOff,
    HttpError,
    HttpIncomplete,
    HttpTimeout,
    HttpTooLarge,
    HttpUnreachable,
)

#: how much is read at once, and so how far beyond the cap an inflated body can reach
_READ_BYTES = 65_536
#: a peer on the same host or in the same rack answers a SYN in far less
_CONNECT_TIMEOUT_S = 5.0
#: No Content, Not Modified: there is no body to be cut off
_WITHOUT_BODY = frozenset({204, 304})


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A whole answer."""

    status_code: int
    #: names in lower case
    headers: Mapping[str, str]
    #: decompressed
    body: bytes
    #: False: the body ended with the connection, so nothing tells whether it was cut off
    is_length_known: bool


#: status and headers (names in lower case) → what takes the body's pieces, or None to have the body gathered
Listen = Callable[[int, Mapping[str, str]], Callable[[bytes], None] | None]


class _Wire:
    """What one thread's current exchange is on: the socket, to cut it off, and how far the answer has come.

    Owned by the calling thread; `cut` comes from any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cut = False
        #: the request went out on a connection that had carried one before
        self.is_reused = False
        self.is_answer_begun = False

    def begin(self) -> None:
        with self._lock:
            self._cut = False
            self.is_reused = False
            self.is_answer_begun = False

    def attach(self, connection_socket: socket.socket, *, is_reused: bool) -> None:
        with self._lock:
            self._socket = connection_socket
            self.is_reused = is_reused
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


class _Head:
    """What the head of an answer is read from: http.client takes a head that stops short for a whole one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        #: the last line was no empty one, but the end of the stream
        self.is_cut_off = False

    def readline(self, limit: int = -1) -> Any:
        line = self._stream.readline(limit)
        self.is_cut_off = not line
        return line

    def close(self) -> None:
        self._stream.close()


def _connection_class(base: type[Any], wire: _Wire) -> type[Any]:
    class Response(HTTPResponse):
        def begin(self) -> None:
            # peek blocks for the first byte: until then the request may not have been seen at all
            wire.is_answer_begun = bool(self.fp.peek(1))
            stream = self.fp
            head: Any = _Head(stream)
            self.fp = head
            try:
                super().begin()
            finally:
                if self.fp is head:
                    self.fp = stream
            if head.is_cut_off:
                raise IncompleteRead(b"")

    class Connection(base):  # type: ignore[misc]
        response_class = Response

        _has_carried = False

        def connect(self) -> None:
            super().connect()
            self._has_carried = False
            wire.attach(self.sock, is_reused=False)

        def request(self, *args: Any, **kwargs: Any) -> None:
            # with TLS the pool connects first: that there is a socket does not mean that it was used before
            if self.sock is not None:
                wire.attach(self.sock, is_reused=self._has_carried)
            super().request(*args, **kwargs)
            self._has_carried = True

    return Connection


class _Adapter(HTTPAdapter):
    """An adapter with one kept-alive connection for each host, whose socket `wire` always knows."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire
        super().__init__(pool_connections=8, pool_maxsize=1)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        wire = self._wire

        class Http(urllib3.connectionpool.HTTPConnectionPool):
            ConnectionCls = _connection_class(urllib3.connection.HTTPConnection, wire)

        class Https(urllib3.connectionpool.HTTPSConnectionPool):
            ConnectionCls = _connection_class(urllib3.connection.HTTPSConnection, wire)

        self.poolmanager.pool_classes_by_scheme = {"http": Http, "https": Https}

    def exchange(self, prepared: requests.PreparedRequest, *, timeout: tuple[float, float]) -> Any:
        """Send; return the head (urllib3's), with the body still to be read. Raises the exceptions of requests."""
        return self.send(prepared, stream=True, timeout=timeout)

    def build_response(self, req: requests.PreparedRequest, resp: Any) -> Any:
        """Leave the answer as it is: what requests makes of it here (cookies, an encoding) nobody reads."""
        return resp


class _Line:
    """One thread's connections and wire, and the requests that it sends again and again with other bodies.

    Only the adapter of requests is used, below its sessions: a session obeys proxy variables and netrc (R39), sends
    cookies back, so that a model behind a sticky balancer would stick to a dead replica, reads the body of a redirect
    without our cap, and costs a tenth of a message's CPU.
    """

    def __init__(self) -> None:
        self.wire = _Wire()
        self.adapter = _Adapter(self.wire)
        self._prepared: dict[tuple[str, str], requests.PreparedRequest] = {}

    def prepare(
        self, method: str, url: str, headers: Mapping[str, str | bytes], body: bytes | None
    ) -> requests.PreparedRequest:
        """Make the request, parsing its URL only the first time.

        Raises:  HttpUnreachable
        """
        prepared = self._prepared.get((method, url))
        if prepared is None:
            try:
                prepared = requests.Request(method, url).prepare()
            except (requests.RequestException, ValueError) as err:
                # a host name that is none, for example; the text may hold the URL
                raise HttpUnreachable(f"not a request that can be sent ({type(err).__name__})") from err
            self._prepared[(method, url)] = prepared
        prepared.body = body
        own_headers: Any = headers
        prepared.headers = CaseInsensitiveDict(own_headers)
        if body is not None:
            prepared.headers["Content-Length"] = str(len(body))
        return prepared


class HttpClient:
    """Exchanges over kept-alive connections, those of each calling thread apart. Safe from any thread."""

    def __init__(self, deadlines: Deadlines, kind: Bounded, *, max_response_bytes: int) -> None:
        self._deadlines = deadlines
        self._kind = kind
        self._max_response_bytes = max_response_bytes
        self._lines = threading.local()

    def exchange(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str | bytes] | None = None,
        body: bytes | None = None,
        timeout_s: float,
        listen: Listen | None = None,
        name: str | None = None,
    ) -> HttpAnswer:
        """Send one request and read the whole answer.

        Runs on the caller's thread; can be cut off from any thread through `Deadlines`, and cancelled by its name.

        Shapes:  `listen` hears of the head, and may return a function that takes the pieces of the body as they come;
                 the answer's body is empty then
        Units:   timeout_s seconds, over the whole exchange (the timeout of requests is per read)
        Raises:  HttpUnreachable, HttpTimeout, HttpIncomplete, HttpTooLarge, HttpCutOff, HttpCancelled
        Source:  design section 8
        """
        line = self._line()
        ends_at = monotonic() + timeout_s
        prepared = line.prepare(method, url, headers or {}, body)
        try:
            return self._try_once(line, prepared, ends_at, listen, name)
        except _ClosedWhileIdle:
            # the server closed a kept-alive connection as the request arrived: nothing was answered, so nothing was
            # lost, and it must not cost the request a retry (R38). On a fresh connection it would be a failed attempt
            return self._try_once(line, prepared, ends_at, listen, name)

    def _line(self) -> _Line:
        line: _Line | None = getattr(self._lines, "line", None)
        if line is None:
            line = self._lines.line = _Line()
        return line

    def _try_once(
        self,
        line: _Line,
        prepared: requests.PreparedRequest,
        ends_at: float,
        listen: Listen | None,
        name: str | None,
    ) -> HttpAnswer:
        left_s = ends_at - monotonic()
        if left_s <= 0:
            raise HttpTimeout("the time for the whole exchange had run out before it began")
        wire = line.wire
        wire.begin()
        if self._deadlines.is_ended(self._kind):
            raise HttpCutOff("not begun: the process is about to end")
        with self._deadlines.bound(self._kind, left_s, wire.cut, name=name) as bound:
            try:
                timeout = (min(_CONNECT_TIMEOUT_S, left_s), left_s)
                with closing(line.adapter.exchange(prepared, timeout=timeout)) as response:
                    answer = self._read(response, listen)
                if wire.was_cut and not answer.is_length_known:
                    # our own shutdown of the socket looks like the end of such a body
                    raise ConnectionAbortedError("cut off")
                return answer
            except (OSError, ValueError, urllib3.exceptions.HTTPError) as err:
                if bound.was_cancelled:
                    raise HttpCancelled("cancelled") from err
                raise self._translate(err, wire, ends_at) from err

    def _read(self, response: urllib3.BaseHTTPResponse, listen: Listen | None) -> HttpAnswer:
        headers = {name.lower(): value for name, value in response.headers.itermerged()}
        parts: list[bytes] = []
        take = (listen(response.status, headers) if listen else None) or parts.append
        have_bytes = 0
        # read1 gives what is there; what requests offers waits until its chunk is full
        while piece := response.read1(_READ_BYTES, decode_content=True):
            have_bytes += len(piece)
            if have_bytes > self._max_response_bytes:
                raise HttpTooLarge(f"the answer is longer than {self._max_response_bytes} bytes")
            take(piece)
        is_length_known = (
            response.status in _WITHOUT_BODY
            or "content-length" in headers
            or "chunked" in headers.get("transfer-encoding", "").lower()
        )
        return HttpAnswer(response.status, headers, b"".join(parts), is_length_known)

    def _translate(self, err: Exception, wire: _Wire, ends_at: float) -> HttpError:
        """Classify what the library raised; its classes alone do not tell what has happened (facts, section 5)."""
        if wire.was_cut:
            if self._deadlines.is_ended(self._kind):
                return HttpCutOff("cut off by us")
            return HttpTimeout("no whole answer in time")
        match err:
            case requests.ConnectTimeout():
                return HttpUnreachable("no connection in time")
            case requests.Timeout():
                return HttpTimeout("no answer in time")
            case urllib3.exceptions.DecodeError():
                return HttpIncomplete("the answer cannot be decompressed")
            case _ if wire.is_answer_begun:
                # silence in the middle of a body is a plain ConnectionError
                if monotonic() >= ends_at - 0.001:
                    return HttpTimeout("the answer stalled")
                return HttpIncomplete("the answer was cut off")
            case requests.ConnectionError() if wire.is_reused:
                return _ClosedWhileIdle("closed before the first byte of an answer")
            case requests.ConnectionError():
                return HttpUnreachable(_cause_of(err))
            case ValueError():
                # a header with a line break, for example; the text may hold its value
                return HttpUnreachable(f"not a request that can be sent ({type(err).__name__})")
            case _:
                return HttpIncomplete(f"no HTTP answer ({type(err).__name__})")


class _ClosedWhileIdle(HttpUnreachable):
    """A kept-alive connection was gone; never leaves this file."""


def _cause_of(err: Exception) -> str:
    """Name the innermost cause without the URL, which may hold what no log should."""
    inner: BaseException | None = err
    while inner is not None:
        match inner:
            case ConnectionRefusedError():
                return "connection refused"
            case ConnectionResetError() | BrokenPipeError():
                return "connection reset"
            case socket.gaierror():
                return "unknown host"
        reason = getattr(inner, "reason", None)
        args = [arg for arg in getattr(inner, "args", ()) if isinstance(arg, BaseException)]
        inner = reason if isinstance(reason, BaseException) else args[0] if args else inner.__cause__
    return "closed before the first byte of an answer"
