"""A TCP proxy on loopback that cuts, stalls, refuses and delays what passes.

One thread accepts, one more for each link carries both directions. Knows nothing of the protocols inside.
"""

from __future__ import annotations

import contextlib
import enum
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from devstack.http_server import bound_socket
from devstack.processes import LOOPBACK

#: bytes that wait in one direction before we stop reading from its sender
_BUFFER_BYTES = 256 * 1024
_CONNECT_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 5.0


class Direction(enum.Enum):
    """Which way bytes travel."""

    TO_SERVER = "to_server"
    TO_CLIENT = "to_client"


BOTH = frozenset(Direction)
#: sees the bytes of a direction before they are passed on; runs on the link's thread and may call the proxy's methods
Observer = Callable[[bytes], None]


class _Flow:
    """One direction of a link: what was read and is not yet written. Owned by the link's thread."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.waiting: deque[tuple[float, bytes]] = deque()  #: (due, bytes); no bytes is the end of the stream
        self.read_all = False
        self.written_all = False

    def wants_to_read(self) -> bool:
        return not self.read_all and sum(len(data) for _, data in self.waiting) < _BUFFER_BYTES

    def due_s(self, now: float) -> float | None:
        """Return the seconds until there is something to write; None when nothing waits."""
        return max(0.0, self.waiting[0][0] - now) if self.waiting else None


class _Link:
    """A client's connection and ours to the server. Owned by its thread; `cut` and `wake` are for any."""

    def __init__(self, proxy: TcpProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._sockets = (client, server)
        self._flows = {Direction.TO_SERVER: _Flow(client, server), Direction.TO_CLIENT: _Flow(server, client)}
        self._cut = False
        self._waker, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        for sock in self._sockets:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.thread = threading.Thread(target=self._run, name=f"proxy-link-{proxy.port}", daemon=True)

    def cut(self) -> None:
        """End the link with a RST on both sides."""
        self._cut = True
        self.wake()

    def wake(self) -> None:
        """Make the link look at what the proxy was told."""
        with contextlib.suppress(OSError):
            self._waker.send(b"w")

    def _run(self) -> None:
        try:
            while not self._cut and not all(flow.written_all for flow in self._flows.values()):
                self._turn()
        except OSError:
            self._cut = True  # one side broke; the other is to see it break too
        finally:
            for sock in (*self._sockets, self._waker, self._wakes):
                if self._cut and sock in self._sockets:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()
            self._proxy._forget(self)

    def _turn(self) -> None:
        poller = select.poll()
        interests = {self._wakes.fileno(): select.POLLIN}
        bounds_s = []
        now = time.monotonic()
        for direction, flow in self._flows.items():
            if direction in self._proxy.stalled:
                continue  # neither read nor written: the sender's buffers fill up, as behind a dead link
            if flow.wants_to_read():
                interests[flow.source.fileno()] = interests.get(flow.source.fileno(), 0) | select.POLLIN
            due_s = flow.due_s(now)
            if due_s == 0.0:
                interests[flow.sink.fileno()] = interests.get(flow.sink.fileno(), 0) | select.POLLOUT
            elif due_s is not None:
                bounds_s.append(due_s)
        for number, events in interests.items():
            poller.register(number, events)
        timeout_ms = max(1.0, min(bounds_s) * 1000) if bounds_s else None
        ready = {number for number, _ in poller.poll(timeout_ms)}
        if self._wakes.fileno() in ready:
            self._wakes.recv(4096)
        for direction, flow in self._flows.items():
            if self._cut or direction in self._proxy.stalled:
                continue
            if flow.source.fileno() in ready and flow.wants_to_read():
                self._read(direction, flow)
        for direction, flow in self._flows.items():
            if not self._cut and direction not in self._proxy.stalled:
                self._write(flow)

    def _read(self, direction: Direction, flow: _Flow) -> None:
        try:
            data = flow.source.recv(65536)
        except BlockingIOError:
            return
        if data:
            self._proxy._observe(direction, data)
        else:
            flow.read_all = True
        flow.waiting.append((time.monotonic() + self._proxy.delay_s, data))

    def _write(self, flow: _Flow) -> None:
        while flow.due_s(time.monotonic()) == 0.0:
            due, data = flow.waiting.popleft()
            if not data:
                with contextlib.suppress(OSError):
                    flow.sink.shutdown(socket.SHUT_WR)
                flow.written_all = True
                return
            try:
                sent = flow.sink.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                flow.waiting.appendleft((due, data[sent:]))
                return


class TcpProxy:
    """The proxy. It keeps its port from `start` to `close`, also while it refuses. Safe from any thread."""

    def __init__(self, target_port: int, *, port: int = 0) -> None:
        self.target_port = target_port
        self._lock = threading.RLock()
        self._links: set[_Link] = set()
        self._observers: dict[Direction, Observer] = {}
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._reservation = bound_socket(port)
        self.port: int = self._reservation.getsockname()[1]
        #: directions in which nothing passes; replaced whole, never changed
        self.stalled: frozenset[Direction] = frozenset()
        #: seconds that bytes take to pass, in each direction
        self.delay_s = 0.0

    def start(self) -> TcpProxy:
        """Accept connections; also ends a `refuse`."""
        with self._lock:
            if self._listener is None:
                listener = bound_socket(self.port)
                listener.listen(128)
                self._listener = listener
                self._acceptor = threading.Thread(
                    target=self._accept, args=(listener,), name=f"proxy-accept-{self.port}", daemon=True
                )
                self._acceptor.start()
        return self

    def close(self) -> None:
        """Cut every link and give the port back."""
        self.refuse()
        self._reservation.close()

    def __enter__(self) -> TcpProxy:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def link_count(self) -> int:
        """How many connections pass through right now."""
        with self._lock:
            return len(self._links)

    def cut(self) -> None:
        """Reset every connection, on both sides, and go on accepting new ones."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut()
        for link in links:
            if link.thread is not threading.current_thread():
                link.thread.join(_JOIN_TIMEOUT_S)

    def refuse(self) -> None:
        """Refuse new connections and cut the open ones; `start` ends it."""
        with self._lock:
            listener, self._listener = self._listener, None
            acceptor, self._acceptor = self._acceptor, None
        if listener is not None and acceptor is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            acceptor.join(_JOIN_TIMEOUT_S)
            listener.close()
        self.cut()

    def stall(self, directions: frozenset[Direction] = BOTH) -> None:
        """Let nothing pass in these directions, on open and new connections, and close nothing."""
        self.stalled = frozenset(directions)
        self._wake_links()

    def resume(self) -> None:
        """End a stall; what has piled up passes."""
        self.stalled = frozenset()
        self._wake_links()

    def observe(self, direction: Direction, observer: Observer | None) -> None:
        """Call `observer` with the bytes of a direction, before they pass; None ends it."""
        with self._lock:
            if observer is None:
                self._observers.pop(direction, None)
            else:
                self._observers[direction] = observer

    def _observe(self, direction: Direction, data: bytes) -> None:
        with self._lock:
            observer = self._observers.get(direction)
        if observer is not None:
            observer(data)

    def _forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)

    def _wake_links(self) -> None:
        with self._lock:
            links = list(self._links)
        for link in links:
            link.wake()

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(0.2)
        while self._listener is listener:
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            try:
                server = socket.create_connection((LOOPBACK, self.target_port), timeout=_CONNECT_TIMEOUT_S)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                continue
            with self._lock:
                link = _Link(self, client, server)
                self._links.add(link)
                # before anybody can see it: whoever cuts a link waits for its thread
                link.thread.start()
