"""RabbitMQ over TLS, with and without a certificate of our own, and several hosts of which some do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from devstack import processes
from devstack.install import Servers
from devstack.rabbitmq import RabbitMq
from devstack.redis_server import RedisServer

from .support import LONG_TIMEOUT_S, Deployment, wait_record

pytestmark = pytest.mark.integration

TLS = Path(__file__).parent.parent / "tls"
#: one certificate serves the broker and the worker; who signed it signs nothing else, its key was thrown away
CA, CERTIFICATE, KEY = TLS / "rabbitmq-ca.pem", TLS / "rabbitmq-peer.pem", TLS / "rabbitmq-peer-key.pem"


@pytest.fixture(scope="module")
def tls_port() -> int:
    return processes.free_port()


@pytest.fixture(scope="module")
def tls_broker(servers: Servers, tls_port: int) -> Iterator[RabbitMq]:
    """A broker that speaks TLS on one more port, and asks every client there for a certificate."""
    lines = f"""
listeners.ssl.default = 127.0.0.1:{tls_port}
ssl_options.cacertfile = {CA}
ssl_options.certfile = {CERTIFICATE}
ssl_options.keyfile = {KEY}
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = true
"""
    with RabbitMq(servers=servers, extra_config=lines) as broker:
        yield broker


@pytest.fixture
def deployment(tls_broker: RabbitMq, redis_server: RedisServer) -> Iterator[Deployment]:
    with Deployment(rabbitmq=tls_broker, redis_server=redis_server) as running:
        yield running


def test_requests_are_served_over_mutual_tls(deployment: Deployment, tls_port: int) -> None:
    worker = deployment.start_worker(
        RABBITMQ_HOST="localhost",
        RABBITMQ_PORT=tls_port,
        RABBITMQ_TLS="true",
        RABBITMQ_CA_FILE=CA,
        RABBITMQ_CERT_FILE=CERTIFICATE,
        RABBITMQ_KEY_FILE=KEY,
    )
    deployment.publish(b"no JSON")
    deployment.wait_dead_letters(1)
    deployment.serve_next()
    deployment.stop_empty(worker)


@pytest.mark.parametrize(
    "files",
    [{}, {"RABBITMQ_CA_FILE": CA}],
    ids=["nobody vouches for the broker", "no certificate of ours"],
)
def test_a_refused_handshake_is_said_at_error_and_tried_again(
    deployment: Deployment, tls_port: int, files: dict[str, Path]
) -> None:
    worker = deployment.start_worker(
        ready=False, RABBITMQ_HOST="localhost", RABBITMQ_PORT=tls_port, RABBITMQ_TLS="true", **files
    )
    (line, *_) = wait_record(worker, "connect_failed")
    assert line["level"] in ("ERROR", "WARNING")
    assert worker.running
    assert worker.stop() == 0


def test_r14_an_unknown_host_in_the_list_costs_no_round(deployment: Deployment) -> None:
    hosts = ",".join(["no-such-host.invalid"] * 5 + ["127.0.0.1"])
    worker = deployment.start_worker(RABBITMQ_HOST=hosts, timeout_s=LONG_TIMEOUT_S)
    deployment.serve_next()
    assert "connect_failed " not in worker.log()
    deployment.stop_empty(worker)
