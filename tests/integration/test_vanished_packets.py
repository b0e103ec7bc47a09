"""A link whose packets vanish: nobody closes it, nobody answers, and no heartbeat is due for minutes.

The broker lives in a network namespace of its own, behind a pair of virtual interfaces. Packets vanish when each side
believes that the other one has another hardware address: they leave, and nobody takes them. Linux, and root.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import pytest

from devstack import processes
from devstack.install import Programs, Servers
from devstack.rabbitmq import RabbitMq
from devstack.redis_server import RedisServer

from .support import LONG_TIMEOUT_S, Deployment, completed_text, records, said, wait_record

pytestmark = pytest.mark.integration

#: what a worker may take, with the heartbeat's default of 120 s, by which it would take over four minutes
GIVEN_UP_S = 35.0
WORKER_COUNT = 3
#: how long the calls take that end, and are acked, when the link is dead already
CALLS_S = {"an early ack": 2.0, "a late ack": 13.0}
NOBODY = "02:00:00:00:00:99"


class Wire:
    """Two virtual interfaces that are one cable: one end here, the other in a network namespace."""

    def __init__(self) -> None:
        number = random.randrange(2**14)
        self.namespace = f"devstack-{number}"
        self._here, self._there = f"dsa{number}", f"dsb{number}"
        # four addresses of the range that is set aside for tests of networks (RFC 2544), so that runs can be neighbours
        first = 198 << 24 | 18 << 16 | number << 2
        self.here_ip, self.broker_ip = (".".join(map(str, (first + add).to_bytes(4, "big"))) for add in (1, 2))

    def make(self) -> None:
        """Make the namespace and the cable.

        Raises:  CalledProcessError
        """
        processes.guardian.order(last_will=["ip", "netns", "delete", self.namespace])
        ip("netns", "add", self.namespace)
        ip("link", "add", self._here, "type", "veth", "peer", "name", self._there, "netns", self.namespace)
        ip("address", "add", f"{self.here_ip}/30", "dev", self._here)
        ip("link", "set", self._here, "up")
        ip("-n", self.namespace, "address", "add", f"{self.broker_ip}/30", "dev", self._there)
        for device in ("lo", self._there):
            ip("-n", self.namespace, "link", "set", device, "up")

    def remove(self) -> None:
        """Remove the namespace; the cable goes with it."""
        subprocess.run(["ip", "netns", "delete", self.namespace], check=False, capture_output=True)

    @contextmanager
    def losing_packets(self) -> Iterator[None]:
        """Let everything vanish that is sent while the block runs, in both directions."""
        ends = [((), self.broker_ip, self._here), (("-n", self.namespace), self.here_ip, self._there)]
        for where, neighbour, device in ends:
            ip(*where, "neigh", "replace", neighbour, "lladdr", NOBODY, "dev", device, "nud", "permanent")
        try:
            yield
        finally:
            for where, neighbour, device in ends:
                ip(*where, "neigh", "delete", neighbour, "dev", device)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=LONG_TIMEOUT_S)


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces take root and iproute2")
    made = Wire()
    try:
        try:
            made.make()
        except subprocess.CalledProcessError as err:
            pytest.skip(f"no network namespaces here: {err.stderr.decode().strip()}")
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="module")
def far_broker(servers: Servers, wire: Wire) -> Iterator[RabbitMq]:
    if not isinstance(servers, Programs):
        pytest.skip("a container has a network of its own")
    run_under = ("nsenter", f"--net=/run/netns/{wire.namespace}")
    anywhere = "loopback_users = none"  # else guest may log in from the same machine alone
    with RabbitMq(servers=servers, host=wire.broker_ip, run_under=run_under, extra_config=anywhere) as broker:
        yield broker


@pytest.fixture
def deployment(far_broker: RabbitMq, redis_server: RedisServer) -> Iterator[Deployment]:
    with Deployment(rabbitmq=far_broker, redis_server=redis_server) as running:
        yield running


def test_law_5_a_link_whose_packets_vanish_is_given_up_whatever_was_under_way(
    deployment: Deployment, wire: Wire
) -> None:
    """One worker sends an ack soon after the loss, one late, when the kernel's probes have nearly given the link up.
    The third one is idle: it sends nothing, and only the probes tell.
    """
    for _ in range(WORKER_COUNT):
        # no document, and so no question for the queue's depth, which would be data under way
        deployment.start_worker(ready=False, RABBITMQ_HOST=wire.broker_ip, METRICS_FLUSH_INTERVAL_S=600)
    workers = [worker.wait_ready() for worker in deployment.workers]
    request_ids = {}
    for prompt, call_s in CALLS_S.items():
        deployment.model.behave(match=prompt, delay_s=call_s)
        request_ids[deployment.publish(deployment.request(prompt))] = prompt
    for prompt in CALLS_S:
        deployment.model.ledger.wait_for_calls(prompt)
    took_s: dict[str, float] = {}
    with wire.losing_packets():
        lost_at = time.time()
        for worker in workers:
            (ended,) = wait_record(worker, "session_ended", timeout_s=2 * GIVEN_UP_S)
            settled = [request_ids[line["request_id"]] for line in records(worker, "request_settled")]
            under_way = settled[0] if settled else "nothing"
            took_s[under_way] = datetime.fromisoformat(ended["timestamp"]).timestamp() - lost_at
            print(f"under way: {under_way}; given up after {took_s[under_way]:.1f} s")
        assert not any(worker.ready() for worker in workers)
    assert took_s.keys() == {"nothing", *CALLS_S}
    assert max(took_s.values()) < GIVEN_UP_S
    # the answers are safe, whatever became of their acks
    for request_id, prompt in request_ids.items():
        assert completed_text(deployment.wait_result(request_id)) == said(prompt)
        assert deployment.calls(prompt) == 1
    for worker in workers:
        worker.wait_ready(timeout_s=GIVEN_UP_S)
        assert len(records(worker, "connected")) == 2
        assert worker.stop() == 0
    assert deployment.dead_letters() == []
