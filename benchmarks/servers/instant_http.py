"""A model, or MetricServer, on asyncio's bare protocols: `python -m benchmarks.servers.instant_http --port N`.

One thread. POST is answered after the delay with the prepared answer; as MetricServer with 202, the document kept.
`GET /timings` gives what each POST took here since the last look, from its first byte to its answer's last, in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import selectors
from collections import deque
from pathlib import Path
from time import perf_counter

from benchmarks.servers import answers

#: timings kept between two looks
_MAX_TIMINGS = 100_000
#: where `"stream": true` is looked for
_STREAM_MARKS = (b'"stream": true', b'"stream":true')


class Role:
    """What this server answers. One for all connections."""

    def __init__(self, *, delay_s: float, answer_bytes: int, records_path: Path | None) -> None:
        self.delay_s = delay_s
        self.timings: deque[float] = deque(maxlen=_MAX_TIMINGS)
        self._records_path = records_path
        self._answer = http_answer(200, "application/json", answers.completion(answer_bytes))
        self._accepted = http_answer(202, "application/json", b"")
        events = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in answers.stream())
        self._stream = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            + events
            + b"0\r\n\r\n"
        )

    def get(self, path: bytes) -> bytes:
        """Answer a GET."""
        if path.startswith(b"/metrics"):
            return http_answer(200, "text/plain; version=0.0.4", answers.METRICS_PAGE)
        if path.startswith(b"/timings"):
            body = json.dumps(list(self.timings)).encode()
            self.timings.clear()
            return http_answer(200, "application/json", body)
        return http_answer(200, "text/plain", b"")

    def post(self, path: bytes, body: list[bytes]) -> bytes:
        """Answer a POST."""
        if self._records_path is None:
            # the flag is among the first or the last members of a payload
            edges = body[0][:4096] + body[-1][-4096:] if body else b""
            return self._stream if any(mark in edges for mark in _STREAM_MARKS) else self._answer
        if path.startswith(b"/metrics"):
            with self._records_path.open("ab") as kept:
                kept.write(b"".join(body) + b"\n")
        return self._accepted


def http_answer(status: int, content_type: str, body: bytes) -> bytes:
    """Put an answer together."""
    head = f"HTTP/1.1 {status} OK\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Exchange(asyncio.Protocol):
    """One connection; requests on it come one after the other."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._head = b""
        self._path = b""
        self._body: list[bytes] = []
        self._missing_bytes = 0
        self._began_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Gather a request, and answer it when it is whole."""
        if self._missing_bytes:
            self._body.append(data)
            self._missing_bytes -= len(data)
        else:
            if not self._head:
                self._began_at = perf_counter()
            self._head += data
            head, mark, rest = self._head.partition(b"\r\n\r\n")
            if not mark:
                return
            self._head = b""
            method, self._path = head.split(b" ", 2)[:2]
            if method == b"GET":
                self._transport.write(self._role.get(self._path))
                return
            self._body = [rest] if rest else []
            self._missing_bytes = content_length(head) - len(rest)
        if not self._missing_bytes:
            body, self._body = self._body, []
            if self._role.delay_s:
                asyncio.get_running_loop().call_later(self._role.delay_s, self._answer, body)
            else:
                self._answer(body)

    def _answer(self, body: list[bytes]) -> None:
        self._transport.write(self._role.post(self._path, body))
        self._role.timings.append(perf_counter() - self._began_at)


def content_length(head: bytes) -> int:
    """Read the header; 0 without one."""
    _, found, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


async def serve(port: int, role: Role) -> None:
    """Listen until ended."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Exchange(role), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--answer-bytes", type=int, default=answers.SMALL_ANSWER_BYTES)
    parser.add_argument("--records", type=Path, default=None, help="be MetricServer, and keep the documents here")
    args = parser.parse_args()
    role = Role(delay_s=args.delay_ms / 1000, answer_bytes=args.answer_bytes, records_path=args.records)
    # epoll rounds a wait up to the next millisecond, which would make 101 ms of 100; select does not
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(serve(args.port, role))


if __name__ == "__main__":
    main()
