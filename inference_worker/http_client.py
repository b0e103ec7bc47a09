"""One bounded HTTP exchange: total time, size cap, cut-off from another thread; no proxies, netrc, cookies, redirects.

Runs on the caller's thread; each thread has connections of its own. Knows requests and urllib3, as its neighbour
`http_connection` does. It does not know what an answer means.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

import urllib3
import urllib3.exceptions

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
from inference_worker.http_connection import Line, Target, Wire
from inference_worker.http_request import Body
from inference_worker.http_response import Response

#: how much is read at once, and so how far beyond the cap an inflated body can reach
_READ_BYTES = 65_536


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
        body: Body | None = None,
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
        exchange = _Exchange(line.target(method, url), headers or {}, body, ends_at, listen, name)
        try:
            return self._try_once(line, exchange)
        except _ClosedWhileIdle:
            # the server closed a kept-alive connection as the request arrived: nothing was answered, so nothing was
            # lost, and it must not cost the request a retry (R38). On a fresh connection it would be a failed attempt
            return self._try_once(line, exchange)

    def _line(self) -> Line:
        line: Line | None = getattr(self._lines, "line", None)
        if line is None:
            line = self._lines.line = Line()
        return line

    def _try_once(self, line: Line, exchange: _Exchange) -> HttpAnswer:
        left_s = exchange.ends_at - monotonic()
        if left_s <= 0:
            raise HttpTimeout("the time for the whole exchange had run out before it began")
        wire = line.wire
        wire.begin()
        if self._deadlines.is_ended(self._kind):
            raise HttpCutOff("not begun: the process is about to end")
        with self._deadlines.bound(self._kind, left_s, wire.cut, name=exchange.name) as bound:
            is_whole = False
            try:
                response = line.send(exchange.target, exchange.headers, exchange.body, timeout_s=left_s)
                answer = self._read(response, exchange)
                if wire.was_cut and not answer.is_length_known:
                    # our own shutdown of the socket looks like the end of such a body
                    raise ConnectionAbortedError("cut off")
                is_whole = response.isclosed()
                return answer
            except (OSError, ValueError, http.client.HTTPException, urllib3.exceptions.HTTPError) as err:
                if bound.was_cancelled:
                    raise HttpCancelled("cancelled") from err
                raise self._translate(err, wire, exchange.ends_at) from err
            finally:
                if not is_whole:
                    line.drop(exchange.target)

    def _read(self, response: Response, exchange: _Exchange) -> HttpAnswer:
        headers = response.fields
        take = exchange.listen(response.status, headers) if exchange.listen else None
        if take is None and response.length is not None and "content-encoding" not in headers:
            self._check_size(response.length)
            return HttpAnswer(response.status, headers, response.read(), is_length_known=True)
        parts: list[bytes] = []
        self._read_pieces(response, exchange.target.method, take or parts.append)
        return HttpAnswer(response.status, headers, b"".join(parts), response.is_length_known)

    def _read_pieces(self, response: Response, method: str, take: Callable[[bytes], None]) -> None:
        """Hand the body's pieces over as they come, decompressed."""
        decoded = urllib3.HTTPResponse(
            response,
            response.fields,
            response.status,
            preload_content=False,
            original_response=response,
            request_method=method,
        )
        have_bytes = 0
        # read1 gives what is there; what requests offers waits until its chunk is full
        while piece := decoded.read1(_READ_BYTES, decode_content=True):
            have_bytes += len(piece)
            self._check_size(have_bytes)
            take(piece)

    def _check_size(self, have_bytes: int) -> None:
        if have_bytes > self._max_response_bytes:
            raise HttpTooLarge(f"the answer is longer than {self._max_response_bytes} bytes")

    def _translate(self, err: Exception, wire: Wire, ends_at: float) -> HttpError:
        """Classify what the libraries raised; their classes alone do not tell what has happened (facts, section 5)."""
        if wire.was_cut:
            if self._deadlines.is_ended(self._kind):
                return HttpCutOff("cut off by us")
            if wire.is_connected:
                return HttpTimeout("no whole answer in time")
            return HttpUnreachable("no connection in time")
        match err:
            case TimeoutError() if not wire.is_connected:
                return HttpUnreachable("no connection in time")
            case TimeoutError() | urllib3.exceptions.ReadTimeoutError():
                return HttpTimeout("the answer stalled" if wire.is_answer_begun else "no answer in time")
            case urllib3.exceptions.DecodeError():
                return HttpIncomplete("the answer cannot be decompressed")
            case _ if wire.is_answer_begun:
                if monotonic() >= ends_at - 0.001:
                    return HttpTimeout("the answer stalled")
                return HttpIncomplete("the answer was cut off")
            case OSError() if wire.is_reused:
                return _ClosedWhileIdle("closed before the first byte of an answer")
            case OSError():
                return HttpUnreachable(_cause_of(err))
            case ValueError():
                # a header with a line break, for example; the text may hold its value
                return HttpUnreachable(f"not a request that can be sent ({type(err).__name__})")
            case _:
                return HttpIncomplete(f"no HTTP answer ({type(err).__name__})")


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What is asked for, whether it takes one try or two."""

    target: Target
    headers: Mapping[str, str | bytes]
    body: Body | None
    #: monotonic
    ends_at: float
    listen: Listen | None
    name: str | None


class _ClosedWhileIdle(HttpUnreachable):
    """A kept-alive connection was gone; never leaves this file."""


def _cause_of(err: OSError) -> str:
    """Name the cause without the URL, which may hold what no log should."""
    match err:
        case http.client.RemoteDisconnected():
            return "closed before the first byte of an answer"
        case ConnectionRefusedError():
            return "connection refused"
        case ConnectionResetError() | BrokenPipeError():
            return "connection reset"
        case socket.gaierror():
            return "unknown host"
        case ssl.SSLError():
            return f"no TLS connection ({err.reason or type(err).__name__})"
        case _:
            return err.strerror or type(err).__name__
