"""A cluster of three brokers, given as a list of hosts: each node may die, and no request notices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from devstack.install import Programs, Servers
from devstack.rabbitmq import RabbitMq
from devstack.rabbitmq_cluster import HOSTS, RabbitMqCluster
from devstack.redis_server import RedisServer
from devstack.worker_process import WorkerProcess

from .support import LONG_TIMEOUT_S, Deployment, Producer, completed_text, records, said, until, wait_results

pytestmark = pytest.mark.integration

WORKER_COUNT = 3
PREFETCH = 4
PER_SECOND = 15.0
REQUEST_COUNT = 240
CALL_S = 0.1
#: the longest pause between two tries to connect, and a little more
BACK_S = 35.0
RESULTS_TIMEOUT_S = 90.0


@pytest.fixture(scope="module")
def cluster(servers: Servers) -> Iterator[RabbitMqCluster]:
    if not isinstance(servers, Programs):
        pytest.skip("the nodes of a cluster are made of installed programs")
    with RabbitMqCluster(servers=servers) as running:
        yield running


@pytest.fixture
def deployment(cluster: RabbitMqCluster, redis_server: RedisServer) -> Iterator[Deployment]:
    """The test looks and publishes through the last node, which is never killed."""
    with Deployment(rabbitmq=cluster.nodes[-1], redis_server=redis_server) as running:
        yield running


def leader_of(deployment: Deployment) -> str:
    """Return the name of the node that leads the request queue."""
    lines = deployment.rabbitmq.ctl("list_queues", "--no-table-headers", "name", "leader").splitlines()
    return dict(line.split("\t") for line in lines)[deployment.queue]


def links_to(node: RabbitMq, *, seen_by: RabbitMq) -> int:
    """Count the workers' connections to a node."""
    lines = seen_by.ctl("list_connections", "--no-table-headers", "host", "client_properties").splitlines()
    return sum(line.split("\t")[0] == node.host and "inference_worker" in line for line in lines)


def count_ended(workers: Sequence[WorkerProcess]) -> int:
    """Count the sessions that the workers have lost."""
    return sum(len(records(worker, "session_ended")) for worker in workers)


def test_nodes_of_a_cluster_die_one_after_the_other_and_every_request_is_answered_once(
    deployment: Deployment, cluster: RabbitMqCluster
) -> None:
    """The first to die is the one through which everything was declared: it leads the queue, and is home to whatever is
    not replicated. It comes back only when every worker has found its way around it. Then the next one dies.
    """
    first, second, _ = cluster.nodes
    settings: dict[str, object] = {
        "RABBITMQ_PORT": cluster.port,
        "RABBITMQ_QUEUE_TYPE": "quorum",
        "RABBITMQ_PREFETCH": PREFETCH,
    }
    assert deployment.start_worker(RABBITMQ_HOST=first.host, **settings).stop() == 0
    assert leader_of(deployment) == first.node_name
    deployment.model.behave(delay_s=CALL_S)
    settings["RABBITMQ_HOST"] = ",".join(HOSTS)
    workers = [deployment.start_worker(**settings) for _ in range(WORKER_COUNT)]
    while not links_to(first, seen_by=second):  # they choose at random
        workers.append(deployment.start_worker(**settings))
    producer = Producer(deployment, REQUEST_COUNT, PER_SECOND, "Cluster").start()
    producer.wait_sent(REQUEST_COUNT // 4, timeout_s=LONG_TIMEOUT_S)
    for node in (first, second):
        lost_count = count_ended(workers) + links_to(node, seen_by=node)
        node.kill()
        until(lambda lost_count=lost_count: count_ended(workers) >= lost_count, "the loss is noticed")
        until(lambda: all(worker.ready() for worker in workers), f"all consume without {node.host}", timeout_s=BACK_S)
        node.start()
        producer.wait_sent(min(REQUEST_COUNT, len(producer.sent) + REQUEST_COUNT // 8), timeout_s=LONG_TIMEOUT_S)
    sent = producer.join(timeout_s=LONG_TIMEOUT_S)
    results = wait_results(deployment, sent, timeout_s=RESULTS_TIMEOUT_S)
    assert [item for item in sent if completed_text(results[item.request_id]) != said(item.prompt)] == []
    for worker in workers:
        assert worker.stop() == 0
    assert deployment.queue_depth() == 0
    assert deployment.dead_letters() == []
    until(lambda: len(deployment.croesus.events) == len(sent), "an event for each request")
    assert {event["id"] for event in deployment.croesus.events} == {item.request_id for item in sent}
