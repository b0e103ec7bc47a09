"""Clients for the servers under test: one that behaves (requests), one that shows every byte (a socket)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

from devstack.model_server import CHAT_PATH, ModelServer

#: seconds for what should happen at once; long, since waiting for it costs nothing when it does
LONG_TIMEOUT_S = 10.0


@pytest.fixture
def http() -> Iterator[requests.Session]:
    """A session that ignores the environment's proxies."""
    with requests.Session() as session:
        session.trust_env = False
        yield session


@pytest.fixture
def model() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


@pytest.fixture
def chat(http: requests.Session, model: ModelServer) -> Callable[..., requests.Response]:
    """Post a chat completion request with one user message."""

    def post(prompt: str = "hello there", **fields: Any) -> requests.Response:
        document = {"model": model.model, "messages": [{"role": "user", "content": prompt}], **fields}
        return http.post(model.url + CHAT_PATH, json=document, timeout=LONG_TIMEOUT_S)

    return post


@pytest.fixture
def raw_exchange() -> Callable[[int, bytes], tuple[bytes, str]]:
    """Send bytes to a port; return all that comes back, and how it ended: "closed" or "reset"."""

    def exchange(port: int, sent: bytes) -> tuple[bytes, str]:
        received = b""
        with socket.create_connection(("127.0.0.1", port), timeout=LONG_TIMEOUT_S) as client:
            client.sendall(sent)
            while True:
                try:
                    data = client.recv(65536)
                except ConnectionResetError:
                    return received, "reset"
                if not data:
                    return received, "closed"
                received += data

    return exchange
