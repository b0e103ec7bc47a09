"""The one broker and the one Redis of the run, and for each test a deployment with queue names of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from devstack.proxy import TcpProxy
from devstack.rabbitmq import RabbitMq
from devstack.redis_server import RedisServer
from devstack.stack import Stack
from tests.servers import rabbitmq, redis_server, servers

from .support import Deployment

__all__ = ["rabbitmq", "redis_server", "servers"]


@pytest.fixture
def deployment(rabbitmq: RabbitMq, redis_server: RedisServer) -> Iterator[Deployment]:
    if not rabbitmq.running:
        rabbitmq.start()
    with Deployment(rabbitmq=rabbitmq, redis_server=redis_server) as running:
        yield running


@pytest.fixture
def redis_proxy(redis_server: RedisServer) -> Iterator[TcpProxy]:
    """A way to Redis that can be cut without taking Redis from the other tests, or its data from this one."""
    with TcpProxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def broker_proxy(rabbitmq: RabbitMq) -> Iterator[TcpProxy]:
    """A way to the broker that can be cut, stalled and watched."""
    with TcpProxy(rabbitmq.port) as proxy:
        yield proxy


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show the end of each worker's log beside a failure; the folder with the log is gone afterwards."""
    report = yield
    stacks = [value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Stack)]
    if report.failed and call.when == "call":
        for stack in stacks:
            for number, worker in enumerate(stack.workers, start=1):
                report.sections.append((f"log of worker {number}", worker.log()[-6000:]))
    return report
