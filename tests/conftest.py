"""What every test stands on: none of our variables, no network but loopback, valid things to start from."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from inference_worker.config import VARIABLES

#: these would lead our HTTP calls elsewhere (R39)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "NETRC", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")

# before anything else: a developer's shell may hold any of them
for _name in (*(variable.name for variable in VARIABLES), *_PROXIES, *(name.lower() for name in _PROXIES)):
    os.environ.pop(_name, None)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from inference_worker.deadlines import Deadlines  # noqa: E402

# a slow machine is no failing test
settings.register_profile("default", deadline=None)
settings.load_profile("default")

UNIT_TESTS = Path(__file__).parent / "unit"
CAPTURES = Path(__file__).parent / "captures"


# -- no network -------------------------------------------------------------------------------------------------------


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_address(address: Any) -> None:
    """Fail the test that connects to another machine. Paths of Unix sockets are text, not tuples."""
    if isinstance(address, tuple) and not _is_loopback(address[0]):
        pytest.fail(f"a unit test connects to {address[0]}")


@pytest.fixture(autouse=True)
def _loopback_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse sockets to anything but loopback; names under `.invalid` are unknown without asking anybody."""
    if UNIT_TESTS not in request.path.parents:
        return
    connect, connect_ex, getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def checked_connect(self: socket.socket, address: Any) -> None:
        _check_address(address)
        connect(self, address)

    def checked_connect_ex(self: socket.socket, address: Any) -> int:
        _check_address(address)
        return connect_ex(self, address)

    def checked_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name is not None and name.endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if name is not None and not _is_loopback(name):
            pytest.fail(f"a unit test looks up {name}")
        return getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", checked_connect)
    monkeypatch.setattr(socket.socket, "connect_ex", checked_connect_ex)
    monkeypatch.setattr(socket, "getaddrinfo", checked_getaddrinfo)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Keep a port on which nobody listens: bound, so that nobody else gets it meanwhile."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Put the process's loggers back after a test that sets logging up."""
    names = ("", "inference_worker", "pika", "urllib3")
    before = [(logging.getLogger(name).level, logging.getLogger(name).handlers[:]) for name in names]
    yield
    for name, (level, handlers) in zip(names, before, strict=True):
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).handlers[:] = handlers


# -- what the supervisor does in the worker ---------------------------------------------------------------------------


@pytest.fixture
def deadlines() -> Iterator[Deadlines]:
    """Deadlines that somebody looks after."""
    deadlines, stop = Deadlines(), threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            deadlines.cut_overdue(monotonic())

    thread = threading.Thread(target=watch, name="deadlines")
    thread.start()
    yield deadlines
    stop.set()
    thread.join()


# -- valid things to start from ---------------------------------------------------------------------------------------


@pytest.fixture
def environment() -> dict[str, str]:
    """Return the smallest valid environment: what is required, and nothing else."""
    return {
        "METRIC_SERVER_URL": "http://metrics.invalid:9000",
        "METRIC_SERVER_SERVICE_TOKEN": "metrics-token",
        "CROESUS_HOST": "http://croesus.invalid:9001",
        "DEPLOYMENT_ID": "3f0c5b1e-7c1d-4b0e-9a53-0a9f3f5a1c11",
        "REPLICA_ID": "replica-1",
        "USER_ID": "user-1",
        "HF_MODEL_ID": "org/model",
    }


@pytest.fixture
def make_body() -> Callable[..., bytes]:
    """Return a maker of request bodies: valid, but for the fields that the caller names. `...` leaves a field out."""

    def make(**changes: Any) -> bytes:
        fields: dict[str, Any] = {
            "request_id": "r-1",
            "received_at": 1_772_000_000.5,
            "timeout_s": 60.0,
            "payload": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
        }
        fields.update(changes)
        return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()

    return make


@pytest.fixture
def capture() -> Callable[[str], bytes]:
    """Return a reader of what a real vLLM 0.32.0 answered."""

    def read(name: str) -> bytes:
        return (CAPTURES / name).read_bytes()

    return read
