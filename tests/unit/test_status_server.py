"""`/healthz` and `/readyz` on a real port of this machine."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inference_worker.holds import HoldName, Holds, ListenerState
from inference_worker.status_server import StatusServer
from tests.timeouts import LONG_TIMEOUT_S


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Worker:
    """What the pages tell about."""

    def __init__(self) -> None:
        self.is_alive = True
        self.state = ListenerState.CONSUMING
        self.holds = Holds()

    def server(self, port: int, host: str = "127.0.0.1") -> StatusServer:
        return StatusServer(host, port, is_alive=lambda: self.is_alive, state=lambda: self.state, holds=self.holds)


@pytest.fixture(scope="module")
def shared_worker() -> Iterator[tuple[Worker, int]]:
    """One server for the module, since its end takes half a second."""
    worker = Worker()
    server = worker.server(free_port())
    server.start()
    assert server.port is not None
    yield worker, server.port
    assert server._server is not None
    server._server.shutdown()
    server._server.server_close()


@pytest.fixture
def worker(shared_worker: tuple[Worker, int]) -> Worker:
    worker, _ = shared_worker
    worker.is_alive, worker.state = True, ListenerState.CONSUMING
    for name in HoldName:
        worker.holds.lift(name)
    return worker


@pytest.fixture
def get(shared_worker: tuple[Worker, int]) -> Callable[..., Any]:
    _, port = shared_worker

    def ask(path: str, method: str = "GET") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_TIMEOUT_S)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read()
            return response.status, json.loads(body) if response.status in (200, 404) or body[:1] == b"{" else None
        finally:
            connection.close()

    return ask


def test_healthz_is_200_while_every_thread_lives_and_ticks(worker: Worker, get: Callable[..., Any]) -> None:
    assert get("/healthz") == (200, {"alive": True})
    worker.is_alive = False
    assert get("/healthz") == (503, {"alive": False})


@pytest.mark.parametrize("state", ListenerState)
def test_readyz_is_200_only_while_consuming(worker: Worker, get: Callable[..., Any], state: ListenerState) -> None:
    worker.state = state
    status, document = get("/readyz?verbose=1")
    assert status == (200 if state is ListenerState.CONSUMING else 503)
    assert document == {"ready": status == 200, "state": state.value, "holds": []}


def test_readyz_tells_why_it_is_not_ready(worker: Worker, get: Callable[..., Any]) -> None:
    worker.state = ListenerState.HELD
    worker.holds.raise_hold(HoldName.RESULT_STORE_DOWN, "no connection")
    _, document = get("/readyz")
    (hold,) = document["holds"]
    assert (hold["name"], hold["detail"]) == ("result_store_down", "no connection")
    assert hold["since"] > 1_700_000_000


def test_any_other_path_is_404_and_any_other_method_is_refused(worker: Worker, get: Callable[..., Any]) -> None:
    assert get("/")[0] == 404
    assert get("/healthz", "POST")[0] == 501


def test_port_0_serves_nothing() -> None:
    server = Worker().server(0)
    server.start()
    assert server.port is None


def test_a_taken_port_is_a_warning_and_no_end(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = Worker().server(taken.getsockname()[1])
        server.start()
    assert server.port is None
    (entry,) = caplog.records
    assert (entry.levelno, entry.event) == (logging.WARNING, "status_server_off")  # type: ignore[attr-defined]
