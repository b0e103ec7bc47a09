"""The real RabbitMQ and Redis of the tests that are marked `integration`: one of each for the whole run.

Where no programs are installed and no Docker answers, these tests are skipped on a laptop and fail where CI is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from devstack.install import Servers, find_containers, find_programs
from devstack.rabbitmq import RabbitMq
from devstack.redis_server import RedisServer


@pytest.fixture(scope="session")
def servers() -> Servers:
    found = find_programs() or find_containers()
    if found is None:
        sentence = "RabbitMQ and Redis are not installed (python -m devstack.install gets them)"
        if os.environ.get("CI"):
            pytest.fail(sentence)
        pytest.skip(sentence)
    return found


@pytest.fixture(scope="session")
def rabbitmq(servers: Servers) -> Iterator[RabbitMq]:
    with RabbitMq(servers=servers) as broker:
        yield broker


@pytest.fixture(scope="session")
def redis_server(servers: Servers) -> Iterator[RedisServer]:
    with RedisServer(servers=servers) as server:
        yield server
