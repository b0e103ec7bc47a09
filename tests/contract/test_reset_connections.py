"""A broker's port that accepts and resets at once: pika asks for the peer's name, and says so in a bare ValueError."""

from __future__ import annotations

import errno
import socket

import pytest

from inference_worker.amqp_connection import open_connection
from inference_worker.config import BrokerConfig
from inference_worker.errors import BrokerError


def test_a_connection_that_is_accepted_and_reset_at_once_is_a_failed_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A balancer without a backend does that. Whether the reset is there before pika asks is a matter of luck."""

    def no_peer(_: socket.socket) -> None:
        raise OSError(errno.ENOTCONN, "not connected")

    monkeypatch.setattr(socket.socket, "getpeername", no_peer)
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(BrokerError, match="cannot be reached"):
        open_connection(broker_at(listening.getsockname()[1]), name="test")


def broker_at(port: int) -> BrokerConfig:
    return BrokerConfig(
        hosts=("127.0.0.1",),
        port=port,
        username="guest",
        password="guest",
        vhost="/",
        heartbeat_s=60,
        prefetch=1,
        lookahead=0,
        tls=False,
        ca_file="",
        cert_file="",
        key_file="",
        queue_type="",
        dlx="dlx",
        dlq="dlq",
        dlx_routing_key="dead",
    )
