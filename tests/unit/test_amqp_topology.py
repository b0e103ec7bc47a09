"""What is declared, what is taken as it is, and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from inference_worker.amqp_topology import Topology, TopologyNames
from inference_worker.errors import BrokerUnusable
from tests.fakes.amqp import FakeBroker, FakeConnection

NAMES = TopologyNames("infer_req.d-1", "", "infer.dlx", "infer.dlq", "dead")
ARGUMENTS = {"x-dead-letter-exchange": "infer.dlx", "x-dead-letter-routing-key": "dead"}


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    broker = FakeBroker()
    yield broker
    broker.close()


@pytest.fixture
def connection(broker: FakeBroker) -> FakeConnection:
    return broker.connect()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING)
    return lambda: [entry for entry in caplog.records if getattr(entry, "event", "") == "topology_taken_as_is"]


def test_everything_is_declared_where_nothing_was(broker: FakeBroker, connection: FakeConnection) -> None:
    assert Topology(NAMES).declare(connection, now=0.0) is False
    assert all(broker.has_queue(name) for name in (NAMES.queue, NAMES.dlq))
    connection.channel().queue_declare(NAMES.queue, durable=True, arguments=ARGUMENTS)
    connection.channel().exchange_declare(NAMES.dlx, "direct", durable=True)
    broker.publish(NAMES.queue, b"a")
    channel = connection.channel()
    method, _, _ = channel.basic_get(NAMES.queue)
    channel.basic_nack(method.delivery_tag, requeue=False)
    assert [message.body for message in broker.ready(NAMES.dlq)] == [b"a"]


def test_the_queue_type_is_declared_when_it_is_named(connection: FakeConnection) -> None:
    names = TopologyNames(NAMES.queue, "quorum", NAMES.dlx, NAMES.dlq, NAMES.dlx_routing_key)
    assert Topology(names).declare(connection, now=0.0) is False
    connection.channel().queue_declare(NAMES.queue, durable=True, arguments={**ARGUMENTS, "x-queue-type": "quorum"})
    # a classic dead-letter queue is whole on one node, and without that node nobody could declare or consume
    connection.channel().queue_declare(NAMES.dlq, durable=True, arguments={"x-queue-type": "quorum"})


def test_declaring_again_changes_and_says_nothing(
    broker: FakeBroker, connection: FakeConnection, warnings: Any
) -> None:
    topology = Topology(NAMES)
    for _ in range(3):
        assert topology.declare(connection, now=0.0) is False
    assert warnings() == []


def test_no_channel_is_left_open(connection: FakeConnection) -> None:
    Topology(NAMES).declare(connection, now=0.0)
    assert not any(channel.is_open for channel in connection.channels)


@pytest.mark.parametrize(
    ("existing", "named"),
    [
        ({}, "x-dead-letter-exchange"),
        ({**ARGUMENTS, "x-dead-letter-exchange": "other.dlx"}, "x-dead-letter-exchange"),
        ({**ARGUMENTS, "x-max-priority": 5}, "x-max-priority"),
        ({**ARGUMENTS, "x-queue-type": "quorum"}, "x-queue-type"),
    ],
)
def test_r15_a_queue_with_other_arguments_is_taken_as_it_is_and_the_argument_named_once(
    broker: FakeBroker, connection: FakeConnection, warnings: Any, existing: dict[str, Any], named: str
) -> None:
    broker.make_queue(NAMES.queue, arguments=existing)
    topology = Topology(NAMES)
    for _ in range(3):
        assert topology.declare(connection, now=0.0) is True
    (warning,) = warnings()
    assert named in warning.reply
    assert connection.is_open


@pytest.mark.parametrize("limit", ["x-message-ttl", "x-max-length", "x-expires"])
def test_r15_a_queue_that_drops_messages_by_itself_is_warned_about(
    broker: FakeBroker, connection: FakeConnection, warnings: Any, limit: str
) -> None:
    broker.make_queue(NAMES.queue, arguments={**ARGUMENTS, limit: 1000})
    Topology(NAMES).declare(connection, now=0.0)
    (warning,) = warnings()
    assert "gets no result" in warning.getMessage()


def test_r16_without_configure_right_what_is_there_is_taken_and_the_dead_letter_queue_still_bound(
    broker: FakeBroker, connection: FakeConnection, warnings: Any
) -> None:
    broker.make_queue(NAMES.queue)
    broker.make_queue(NAMES.dlq)
    broker.make_exchange(NAMES.dlx)
    broker.may_configure = False
    topology = Topology(NAMES)
    assert topology.declare(connection, now=0.0) is True
    assert topology.declare(connection, now=0.0) is True
    assert sorted(warning.object for warning in warnings()) == [
        f"exchange {NAMES.dlx}",
        f"queue {NAMES.dlq}",
        f"queue {NAMES.queue}",
    ]


@pytest.mark.parametrize("missing", ["queue", "dlq", "dlx"])
def test_r16_what_is_missing_and_may_not_be_declared_needs_a_person(
    broker: FakeBroker, connection: FakeConnection, missing: str
) -> None:
    for name in {"queue", "dlq"} - {missing}:
        broker.make_queue(getattr(NAMES, name))
    if missing != "dlx":
        broker.make_exchange(NAMES.dlx)
    broker.may_configure = False
    with pytest.raises(BrokerUnusable):
        Topology(NAMES).declare(connection, now=0.0)
    assert connection.is_open


def test_a_dead_letter_exchange_of_another_kind_is_taken_as_it_is(
    broker: FakeBroker, connection: FakeConnection, warnings: Any
) -> None:
    broker.make_exchange(NAMES.dlx, "fanout")
    assert Topology(NAMES).declare(connection, now=0.0) is False
    assert [warning.object for warning in warnings()] == [f"exchange {NAMES.dlx}"]


def test_the_dead_letter_side_is_declared_again_unless_that_was_done_in_the_last_second(
    broker: FakeBroker, connection: FakeConnection
) -> None:
    topology = Topology(NAMES)
    topology.declare(connection, now=100.0)
    broker.delete_exchange(NAMES.dlx)
    topology.ensure_dead_letter(connection, now=100.9)
    assert not broker.has_exchange(NAMES.dlx)
    broker.delete_queue(NAMES.dlq)
    topology.ensure_dead_letter(connection, now=101.1)
    assert broker.has_exchange(NAMES.dlx)
    assert broker.has_queue(NAMES.dlq)
    broker.delete_exchange(NAMES.dlx)
    topology.ensure_dead_letter(connection, now=102.0)
    assert not broker.has_exchange(NAMES.dlx)
