"""The proxy passes bytes, and cuts, stalls, refuses and delays them as told."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from devstack.proxy import Direction, TcpProxy

LONG_TIMEOUT_S = 10.0
#: seconds in which something that passes would have passed long ago
SHORT_TIMEOUT_S = 0.1


@pytest.fixture
def echo_port() -> Iterator[int]:
    """A server that sends back what it gets, in upper case, until the client has said all."""

    def echo(client: socket.socket) -> None:
        with client:
            while True:
                try:
                    data = client.recv(65536)
                except OSError:
                    return
                if not data:
                    return
                client.sendall(data.upper())

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(LONG_TIMEOUT_S)


@pytest.fixture
def proxy(echo_port: int) -> Iterator[TcpProxy]:
    with TcpProxy(echo_port) as running:
        yield running


@pytest.fixture
def client(proxy: TcpProxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=LONG_TIMEOUT_S) as connection:
        yield connection


def ask(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    received = b""
    while len(received) < len(data):
        part = client.recv(65536)
        assert part, "the connection was closed"
        received += part
    return received


def receive_one_byte(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=LONG_TIMEOUT_S) as client:
        return client.recv(1)


def is_silent(client: socket.socket) -> bool:
    return not select.select([client], [], [], SHORT_TIMEOUT_S)[0]


def test_bytes_pass_both_ways_and_none_is_lost(client: socket.socket) -> None:
    assert ask(client, b"hello") == b"HELLO"
    assert ask(client, b"x" * 100_000) == b"X" * 100_000


def test_the_end_of_one_direction_passes_too(client: socket.socket) -> None:
    client.sendall(b"bye")
    client.shutdown(socket.SHUT_WR)
    assert client.recv(16) == b"BYE"
    assert client.recv(16) == b""


def test_cut_resets_open_links_and_new_ones_work(proxy: TcpProxy, client: socket.socket) -> None:
    ask(client, b"hello")
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert proxy.link_count == 0
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=LONG_TIMEOUT_S) as another:
        assert ask(another, b"again") == b"AGAIN"


def test_stall_lets_nothing_pass_and_closes_nothing(proxy: TcpProxy, client: socket.socket) -> None:
    ask(client, b"hello")
    proxy.stall()
    client.sendall(b"are you there?")
    assert is_silent(client)
    proxy.resume()
    assert client.recv(64) == b"ARE YOU THERE?"


def test_stall_holds_new_connections_too(proxy: TcpProxy) -> None:
    proxy.stall()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=LONG_TIMEOUT_S) as client:
        client.sendall(b"hello")
        assert is_silent(client)
        proxy.resume()
        assert client.recv(64) == b"HELLO"


def test_stall_of_one_direction_lets_the_other_pass(proxy: TcpProxy, client: socket.socket) -> None:
    ask(client, b"hello")
    seen = threading.Event()
    proxy.observe(Direction.TO_SERVER, lambda data: seen.set())
    proxy.stall(frozenset({Direction.TO_CLIENT}))
    client.sendall(b"one way")
    assert seen.wait(LONG_TIMEOUT_S)
    assert is_silent(client)


def test_a_stalled_link_can_be_cut(proxy: TcpProxy, client: socket.socket) -> None:
    ask(client, b"hello")
    proxy.stall()
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_refuse_ends_links_and_refuses_new_ones_on_a_port_it_keeps(proxy: TcpProxy, client: socket.socket) -> None:
    ask(client, b"hello")
    proxy.refuse()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port), timeout=LONG_TIMEOUT_S)
    proxy.start()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=LONG_TIMEOUT_S) as another:
        assert ask(another, b"again") == b"AGAIN"


def test_delay_holds_bytes_back_each_way(proxy: TcpProxy, client: socket.socket) -> None:
    proxy.delay_s = 0.1
    begun_at = time.monotonic()
    assert ask(client, b"hello") == b"HELLO"
    assert time.monotonic() - begun_at >= 0.2


def test_an_observer_can_cut_before_the_bytes_it_sees_pass(proxy: TcpProxy, client: socket.socket) -> None:
    def cut_at_the_word(data: bytes) -> None:
        if b"secret" in data:
            proxy.cut()

    ask(client, b"hello")
    proxy.observe(Direction.TO_SERVER, cut_at_the_word)
    client.sendall(b"the secret")
    with pytest.raises(ConnectionResetError):
        client.recv(64)


def test_a_dead_target_resets_the_client(proxy: TcpProxy) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        proxy.target_port = unused.getsockname()[1]
        with pytest.raises(ConnectionResetError):
            receive_one_byte(proxy.port)
        assert proxy.link_count == 0
