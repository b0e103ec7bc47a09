"""What `amqp_connection` takes of pika's private names: a version that renames one has to fail here."""

from __future__ import annotations

import dataclasses
import threading
from time import monotonic
from typing import Any

import pytest

from devstack.processes import wait_until
from devstack.proxy import TcpProxy
from inference_worker.amqp_connection import (
    LIBRARY_ERRORS,
    close_connection,
    open_connection,
    send_now,
    shut_down,
    unflushed,
)
from inference_worker.config import BrokerConfig, load_config
from inference_worker.errors import BrokerUnusable
from tests.timeouts import LONG_TIMEOUT_S

pytestmark = pytest.mark.integration


@pytest.fixture
def broker_config(rabbitmq: Any, environment: dict[str, str]) -> BrokerConfig:
    return load_config({**environment, "RABBITMQ_HOST": "127.0.0.1", "RABBITMQ_PORT": str(rabbitmq.port)}).broker


def end_from_another_thread(connection: Any, blocked: Any) -> float:
    """Call `blocked` here, shut the connection down from another thread, return how long the call took."""
    began = threading.Event()

    def cut() -> None:
        began.wait(LONG_TIMEOUT_S)
        shut_down(connection)

    cutter = threading.Thread(target=cut)
    cutter.start()
    began_at = monotonic()
    began.set()
    with pytest.raises(LIBRARY_ERRORS):
        blocked()
    took_s = monotonic() - began_at
    cutter.join()
    return took_s


def test_shut_down_wakes_a_pump_from_another_thread(broker_config: BrokerConfig) -> None:
    connection = open_connection(broker_config, name="contract")
    assert end_from_another_thread(connection, lambda: connection.process_data_events(time_limit=20)) < 5
    assert not connection.is_open


@pytest.mark.parametrize(
    "blocked",
    [
        lambda connection, channel: channel.queue_declare("contract", passive=True),
        lambda connection, channel: channel.basic_publish("", "contract", b"a", mandatory=True),
        lambda connection, channel: connection.close(),
    ],
    ids=["declare", "confirm", "close"],
)
def test_shut_down_wakes_a_call_that_waits_on_a_stalled_link(
    rabbitmq: Any, broker_config: BrokerConfig, blocked: Any
) -> None:
    with TcpProxy(rabbitmq.port) as proxy:
        connection = open_connection(dataclasses.replace(broker_config, port=proxy.port), name="contract")
        channel = connection.channel()
        channel.confirm_delivery()
        proxy.stall()
        assert end_from_another_thread(connection, lambda: blocked(connection, channel)) < 5
        assert not connection.is_open


def test_shutting_down_twice_or_without_a_connection_does_nothing(broker_config: BrokerConfig) -> None:
    connection = open_connection(broker_config, name="contract")
    shut_down(None)
    shut_down(connection)
    shut_down(connection)
    close_connection(connection)


def test_a_refused_login_and_a_missing_vhost_need_a_person(broker_config: BrokerConfig) -> None:
    for change in ({"password": "wrong"}, {"vhost": "missing"}, {"hosts": ("no-such-host.invalid",)}):
        with pytest.raises(BrokerUnusable):
            open_connection(dataclasses.replace(broker_config, **change), name="contract")


def test_a_connection_reads_more_than_4_kib_at_a_time(broker_config: BrokerConfig) -> None:
    """A new pika may have another name for it; then 10 MB messages cost twice the CPU, and this test tells."""
    connection = open_connection(broker_config, name="contract")
    try:
        sizes: list[int] = []
        transport = connection._impl._transport
        read = transport._sigint_safe_recv
        transport._sigint_safe_recv = lambda sock, max_bytes: sizes.append(max_bytes) or read(sock, max_bytes)
        connection.channel()
        assert sizes
        assert min(sizes) == 131_072
    finally:
        connection.close()


def test_what_is_sent_now_has_left_when_the_link_dies_before_the_next_pump(broker_config: BrokerConfig) -> None:
    connection = open_connection(broker_config, name="contract")
    channel = connection.channel()
    queue = channel.queue_declare("", auto_delete=False).method.queue
    channel.confirm_delivery()
    for _ in range(2):
        channel.basic_publish("", queue, b"a")
    tags = [channel.basic_get(queue)[0].delivery_tag for _ in range(2)]
    settling = unflushed(channel)
    settling.basic_ack(tags[0])
    send_now(connection)
    settling.basic_ack(tags[1])
    shut_down(connection)
    with pytest.raises(LIBRARY_ERRORS):
        connection.process_data_events(time_limit=20)

    looking = open_connection(broker_config, name="contract")
    try:
        # the second is there again: its ack had not left
        channel = looking.channel()
        wait_until(
            lambda: channel.queue_declare(queue, passive=True).method.message_count == 1,
            timeout_s=LONG_TIMEOUT_S,
            what="the broker gives one of the two back",
        )
        assert channel.queue_delete(queue).method.message_count == 1
    finally:
        looking.close()


def test_sending_now_with_nothing_to_send_or_no_link_does_nothing(broker_config: BrokerConfig) -> None:
    connection = open_connection(broker_config, name="contract")
    send_now(connection)
    connection.process_data_events(time_limit=0)
    connection.close()
    send_now(connection)
