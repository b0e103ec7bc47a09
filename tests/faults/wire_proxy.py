"""A TCP proxy that understands what passes: it can hold the bytes at an event, run a callback, and let go or drop them.

Two threads for each link, one a direction. A `Tap` cuts the bytes of a link into pieces and says which piece is an
event; `on_event` is called on the direction's thread before the piece is passed on, so that nothing passes meanwhile.
`devstack.proxy.TcpProxy` is for everything that need not know where in a protocol it is.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from devstack.http_server import bound_socket
from devstack.processes import LOOPBACK
from devstack.proxy import Direction

_RECEIVE_BYTES = 64 * 1024
_CONNECT_TIMEOUT_S = 5.0
#: how soon a direction that stands still notices that its link was cut
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True)
class Event:
    """Something that is about to pass: its name, and the request that it concerns."""

    name: str
    request_id: str = ""
    detail: str = ""


#: bytes, and what they mean; no bytes: an event that follows bytes which have passed
Piece = tuple[bytes, Event | None]


class Tap(Protocol):
    """Cuts one link's bytes into pieces. Each direction is fed by a thread of its own."""

    def split(self, direction: Direction, data: bytes) -> Iterator[Piece]: ...


class Link:
    """A client's connection and ours to the server. `cut` is for any thread."""

    def __init__(self, proxy: WireProxy, client: socket.socket, server: socket.socket, tap: Tap) -> None:
        self._proxy, self._client, self._server, self._tap = proxy, client, server, tap
        self.ended = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to carry bytes."""
        for direction, source, sink in (
            (Direction.TO_SERVER, self._client, self._server),
            (Direction.TO_CLIENT, self._server, self._client),
        ):
            threading.Thread(
                target=self._carry,
                args=(direction, source, sink),
                name=f"wire-{self._proxy.port}-{direction.value}",
                daemon=True,
            ).start()

    def cut(self) -> None:
        """End the link with a RST on both sides."""
        self._end(reset=True)

    def _carry(self, direction: Direction, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(_RECEIVE_BYTES):
                self._wait_flowing()
                passed = b""
                for bytes_, event in self._tap.split(direction, data):
                    if event is not None:
                        self._send(sink, passed)
                        passed = b""
                        if not self._proxy.on_event(self, event):
                            self.cut()
                            return
                    passed += bytes_
                self._send(sink, passed)
            self._wait_flowing()  # behind a dead link nobody learns of a close either
            self._end(reset=False)
        except OSError:
            self._end(reset=True)  # one side broke; the other is to see it break too

    def _send(self, sink: socket.socket, data: bytes) -> None:
        self._wait_flowing()
        if data:
            sink.sendall(data)

    def _wait_flowing(self) -> None:
        while not self._proxy.flowing.wait(_LOOK_AGAIN_S):
            if self.ended.is_set():
                raise OSError("cut while it stood still")

    def _end(self, *, reset: bool) -> None:
        with self._lock:
            if self.ended.is_set():
                return
            self.ended.set()
        for sock in (self._client, self._server):
            with contextlib.suppress(OSError):
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                # wakes the direction that reads; sends nothing, so that a RST is all that the peer sees
                sock.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
            sock.close()
        self._proxy._forget(self)


class WireProxy:
    """The proxy. It keeps its port from `start` to `close`, also while it refuses. Safe from any thread."""

    def __init__(
        self,
        target_port: int,
        *,
        make_tap: Callable[[], Tap],
        on_event: Callable[[Link, Event], bool],
        on_end: Callable[[Tap], None] = lambda tap: None,
    ) -> None:
        self.target_port = target_port
        self._make_tap, self._on_end = make_tap, on_end
        #: called before an event passes; False drops it and what follows, and cuts the link
        self.on_event = on_event
        self._lock = threading.RLock()
        self._links: set[Link] = set()
        self._listener: socket.socket | None = None
        self._reservation = bound_socket(0)
        self.port: int = self._reservation.getsockname()[1]
        #: cleared: nothing passes, on open and new links, and nothing is closed
        self.flowing = threading.Event()
        self.flowing.set()

    def start(self) -> WireProxy:
        """Accept connections; also ends a `refuse`."""
        with self._lock:
            if self._listener is None:
                self._listener = bound_socket(self.port)
                self._listener.listen(128)
                threading.Thread(
                    target=self._accept, args=(self._listener,), name=f"wire-accept-{self.port}", daemon=True
                ).start()
        return self

    def close(self) -> None:
        """Cut every link and give the port back."""
        self.refuse()
        self._reservation.close()

    def __enter__(self) -> WireProxy:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def cut(self) -> None:
        """Reset every link, on both sides, and go on accepting new ones."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut()

    def refuse(self) -> None:
        """Refuse new connections and cut the open ones; `start` ends it."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()

    def stall(self) -> None:
        """Let nothing pass and close nothing, until `resume`."""
        self.flowing.clear()

    def resume(self) -> None:
        """End a stall; what has piled up passes."""
        self.flowing.set()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((LOOPBACK, self.target_port), timeout=_CONNECT_TIMEOUT_S)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                continue
            for sock in (client, server):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(self, client, server, self._make_tap())
            with self._lock:
                if self._listener is not listener:
                    link.cut()
                    return
                self._links.add(link)
            link.start()

    def _forget(self, link: Link) -> None:
        with self._lock:
            self._links.discard(link)
        self._on_end(link._tap)
