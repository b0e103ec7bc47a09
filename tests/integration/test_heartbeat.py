"""The connection is pumped whatever the slots do (law 4): long calls and long suspensions cost no session."""

from __future__ import annotations

import threading
import time

import pytest

from devstack.processes import wait_until
from devstack.proxy import Direction, TcpProxy
from devstack.worker_process import WorkerProcess

from .support import Deployment, completed_text, readyz, records, said, settlements, until, wait_hold, wait_record

pytestmark = pytest.mark.integration

HEARTBEAT_S = 5
PROMPT = "Think about it."


class Links:
    """Counts the connections that go through a proxy, by the protocol header with which each begins."""

    def __init__(self, proxy: TcpProxy) -> None:
        self._lock = threading.Lock()
        self.opened = 0
        proxy.observe(Direction.TO_SERVER, self._look)

    def _look(self, data: bytes) -> None:
        with self._lock:
            self.opened += data.startswith(b"AMQP\x00")


@pytest.fixture
def links(broker_proxy: TcpProxy) -> Links:
    return Links(broker_proxy)


@pytest.fixture
def worker(deployment: Deployment, broker_proxy: TcpProxy, links: Links) -> WorkerProcess:
    return deployment.start_worker(RABBITMQ_PORT=broker_proxy.port, RABBITMQ_HEARTBEAT_S=HEARTBEAT_S)


def held_s(worker: WorkerProcess) -> float:
    """Return how long the worker has been suspended, by its own account."""
    return max((time.time() - hold["since"] for hold in readyz(worker)["holds"]), default=0.0)


def check_one_session(deployment: Deployment, worker: WorkerProcess, links: Links) -> None:
    assert links.opened == 1
    assert len(records(worker, "connected")) == 1
    assert records(worker, "session_ended") == []


def test_law_4_r01_a_call_of_six_heartbeats_costs_one_session_one_call_and_one_ack(
    deployment: Deployment, worker: WorkerProcess, links: Links
) -> None:
    deployment.model.behave(match=PROMPT, delay_s=30.0)
    request_id = deployment.publish(deployment.request(PROMPT, timeout_s=120.0))
    assert completed_text(deployment.wait_result(request_id, timeout_s=60.0)) == said(PROMPT)
    deployment.serve_next()
    assert settlements(worker, request_id) == [("ack", "completed")]
    assert deployment.calls(PROMPT) == 1
    check_one_session(deployment, worker, links)
    deployment.stop_empty(worker)


def test_law_4_r03_a_suspension_of_four_heartbeats_keeps_the_session(
    deployment: Deployment, worker: WorkerProcess, links: Links
) -> None:
    deployment.model.behave_health(status=503)
    wait_hold(worker, "model_unhealthy")
    until(lambda: deployment.consumer_count() == 0, "no consumer")
    request_id = deployment.publish(deployment.request(PROMPT, timeout_s=120.0))
    wait_until(lambda: held_s(worker) >= 4 * HEARTBEAT_S, timeout_s=60.0, what="the suspension has lasted")
    assert deployment.result_bytes(request_id) is None
    deployment.model.behave_health()
    assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)
    wait_record(worker, "consuming", count=2, session=1)
    check_one_session(deployment, worker, links)
    deployment.stop_empty(worker)
