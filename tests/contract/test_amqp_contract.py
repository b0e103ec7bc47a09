"""What the worker relies on in pika and RabbitMQ, asked of the fake always and of the real broker when there is one.

A fake that drifts from the real thing fails here.
"""

from __future__ import annotations

import struct
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import pika
import pytest
from pika import exceptions

from inference_worker.amqp_connection import shut_down
from tests.fakes.amqp import FakeBroker
from tests.timeouts import LONG_TIMEOUT_S as LONG_S

#: for what must not happen: long enough for a broker on the same machine to have done it
QUIET_S = 0.15


@dataclass
class Broker:
    """A broker, fake or real: connections to it, and names that nobody else uses."""

    open_connection: Callable[[], Any]
    connections: list[Any] = field(default_factory=list)
    queues: list[str] = field(default_factory=list)
    exchanges: list[str] = field(default_factory=list)

    def connect(self) -> Any:
        connection = self.open_connection()
        self.connections.append(connection)
        return connection

    def name(self) -> str:
        """A name for a queue, which is deleted after the test."""
        name = f"contract-{uuid.uuid4().hex[:12]}"
        self.queues.append(name)
        return name

    def queue(self, **arguments: Any) -> str:
        """An empty queue; `x_max_length=1` is the argument x-max-length."""
        name = self.name()
        channel = self.connect().channel()
        channel.queue_declare(name, durable=True, arguments={k.replace("_", "-"): v for k, v in arguments.items()})
        return name

    def exchange(self) -> str:
        name = f"contract-x-{uuid.uuid4().hex[:12]}"
        self.exchanges.append(name)
        self.connect().channel().exchange_declare(name, "direct", durable=True)
        return name

    def send(self, queue: str, *bodies: bytes, properties: pika.BasicProperties | None = None) -> None:
        channel = self.connect().channel()
        channel.confirm_delivery()
        for body in bodies:
            channel.basic_publish("", queue, body, properties, mandatory=True)

    def depth(self, queue: str) -> int:
        return self.connect().channel().queue_declare(queue, passive=True).method.message_count

    def clean_up(self) -> None:
        for connection in self.connections:
            if connection.is_open:
                connection.close()
        self.connections.clear()
        channel = self.connect().channel()
        for name in self.queues:
            channel.queue_delete(name)
        for name in self.exchanges:
            channel.exchange_delete(name)
        self.connections[0].close()


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.integration)])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    if request.param == "fake":
        fake = FakeBroker()
        broker = Broker(fake.connect)
        yield broker
        broker.clean_up()
        fake.close()
    else:
        broker = Broker(request.getfixturevalue("rabbitmq").connect)
        yield broker
        broker.clean_up()


class Inbox:
    """What a consumer was given."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.deliveries: list[tuple[int, bool, bytes]] = []
        self.properties: list[pika.BasicProperties] = []

    def take(self, _channel: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        self.deliveries.append((method.delivery_tag, method.redelivered, body))
        self.properties.append(properties)

    @property
    def tags(self) -> list[int]:
        return [tag for tag, _, _ in self.deliveries]

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, _, body in self.deliveries]

    def pump_until(self, condition: Callable[[], Any]) -> None:
        ends_at = monotonic() + LONG_S
        while not condition():
            assert monotonic() < ends_at, f"not in time; delivered: {self.deliveries}"
            self.connection.process_data_events(time_limit=0.05)

    def pump(self) -> None:
        """Give what must not come time to come."""
        ends_at = monotonic() + QUIET_S
        while monotonic() < ends_at:
            self.connection.process_data_events(time_limit=0.05)


def consume(broker: Broker, queue: str, *, prefetch: int = 10) -> tuple[Any, Any, Inbox, str]:
    connection = broker.connect()
    channel = connection.channel()
    channel.basic_qos(prefetch_count=prefetch)
    inbox = Inbox(connection)
    tag = channel.basic_consume(queue, inbox.take, auto_ack=False)
    return connection, channel, inbox, tag


# -- consuming --------------------------------------------------------------------------------------------------------


def test_messages_come_in_order_with_tags_from_1_up_to_the_prefetch(broker: Broker) -> None:
    queue = broker.queue()
    broker.send(queue, b"a", b"b", b"c")
    _, channel, inbox, _ = consume(broker, queue, prefetch=2)
    inbox.pump_until(lambda: len(inbox.deliveries) == 2)
    inbox.pump()
    assert inbox.deliveries == [(1, False, b"a"), (2, False, b"b")]
    channel.basic_ack(1)
    inbox.pump_until(lambda: len(inbox.deliveries) == 3)
    assert inbox.deliveries[2] == (3, False, b"c")


def test_no_message_is_dispatched_outside_process_data_events(broker: Broker) -> None:
    queue = broker.queue()
    broker.send(queue, b"a")
    connection, channel, inbox, _ = consume(broker, queue)
    channel.queue_declare(queue, passive=True)
    connection.channel()
    assert inbox.deliveries == []
    inbox.pump_until(lambda: inbox.deliveries)


def test_a_message_given_back_comes_again_as_redelivered_under_a_new_tag(broker: Broker) -> None:
    queue = broker.queue()
    broker.send(queue, b"a")
    _, channel, inbox, _ = consume(broker, queue)
    inbox.pump_until(lambda: inbox.deliveries)
    channel.basic_nack(1, requeue=True)
    inbox.pump_until(lambda: len(inbox.deliveries) == 2)
    assert inbox.deliveries == [(1, False, b"a"), (2, True, b"a")]


def test_what_is_unacked_when_its_link_ends_comes_again_and_tags_begin_at_1(broker: Broker) -> None:
    queue = broker.queue()
    broker.send(queue, b"a", b"b")
    connection, _, inbox, _ = consume(broker, queue)
    inbox.pump_until(lambda: len(inbox.deliveries) == 2)
    shut_down(connection)
    with pytest.raises(exceptions.AMQPError):
        inbox.pump()
    assert not connection.is_open
    _, _, second, _ = consume(broker, queue)
    second.pump_until(lambda: len(second.deliveries) == 2)
    assert second.deliveries == [(1, True, b"a"), (2, True, b"b")]


def test_the_prefetch_counts_for_each_consumer_alone(broker: Broker) -> None:
    """A consumer that was cancelled with a message in work does not count for its successor."""
    queue = broker.queue()
    broker.send(queue, b"a", b"b")
    _, channel, inbox, tag = consume(broker, queue, prefetch=1)
    inbox.pump_until(lambda: inbox.deliveries)
    channel.basic_cancel(tag)
    channel.basic_consume(queue, inbox.take, auto_ack=False)
    inbox.pump_until(lambda: len(inbox.deliveries) == 2)


def test_an_exception_of_a_consumer_comes_out_and_leaves_the_rest_undispatched(broker: Broker) -> None:
    queue = broker.queue()
    broker.send(queue, b"a", b"b")
    connection = broker.connect()
    channel = connection.channel()
    seen: list[bytes] = []

    def raise_once(_channel: Any, _method: Any, _properties: Any, body: bytes) -> None:
        seen.append(body)
        if len(seen) == 1:
            raise RuntimeError("a bug in a callback")

    channel.basic_consume(queue, raise_once, auto_ack=False)
    # a round trip on another channel: both deliveries have been received when it is over
    ends_at = monotonic() + LONG_S
    while connection.channel().queue_declare(queue, passive=True).method.message_count:
        assert monotonic() < ends_at
    with pytest.raises(RuntimeError):
        connection.process_data_events(time_limit=LONG_S)
    connection.process_data_events(time_limit=QUIET_S)
    assert seen == [b"a"]
    broker.send(queue, b"c")
    ends_at = monotonic() + LONG_S
    while len(seen) < 3:
        assert monotonic() < ends_at
        connection.process_data_events(time_limit=0.05)
    assert seen == [b"a", b"b", b"c"]


# -- cancelling -------------------------------------------------------------------------------------------------------


def test_a_cancel_gives_back_what_was_not_dispatched_and_leaves_what_was(broker: Broker) -> None:
    queue = broker.queue()
    broker.send(queue, b"a")
    connection, channel, inbox, tag = consume(broker, queue)
    inbox.pump_until(lambda: inbox.deliveries)
    broker.send(queue, b"b", b"c")
    # received by the time of the answer, and not dispatched
    connection.channel().queue_declare(queue, passive=True)
    assert channel.basic_cancel(tag) == []
    assert channel.consumer_tags == []
    channel.basic_ack(1)
    inbox.pump()
    assert inbox.bodies == [b"a"]
    assert broker.depth(queue) == 2
    assert channel.is_open


def test_a_cancel_of_a_consumer_that_the_broker_cancelled_returns_nothing(broker: Broker) -> None:
    queue = broker.queue()
    _, channel, inbox, tag = consume(broker, queue)
    broker.connect().channel().queue_delete(queue)
    inbox.pump_until(lambda: not channel.consumer_tags)
    assert channel.basic_cancel(tag) == []
    assert channel.is_open


# -- silence ----------------------------------------------------------------------------------------------------------


def test_a_consumer_that_the_broker_cancels_is_gone_without_a_word(broker: Broker) -> None:
    queue = broker.queue()
    connection, channel, inbox, tag = consume(broker, queue)
    assert channel.consumer_tags == [tag]
    broker.connect().channel().queue_delete(queue)
    inbox.pump_until(lambda: not channel.consumer_tags)
    assert channel.is_open
    assert connection.is_open


@pytest.mark.parametrize("tag", [0, 99])
def test_a_tag_that_was_never_given_closes_the_channel_without_a_word(broker: Broker, tag: int) -> None:
    queue = broker.queue()
    broker.send(queue, b"a")
    connection, channel, inbox, _ = consume(broker, queue)
    inbox.pump_until(lambda: inbox.deliveries)
    channel.basic_ack(tag)
    inbox.pump_until(lambda: not channel.is_open)
    assert connection.is_open
    assert channel.consumer_tags == []
    assert broker.depth(queue) == 1


def test_a_second_ack_closes_the_channel_without_a_word(broker: Broker) -> None:
    queue = broker.queue()
    broker.send(queue, b"a", b"b")
    connection, channel, inbox, _ = consume(broker, queue)
    inbox.pump_until(lambda: len(inbox.deliveries) == 2)
    channel.basic_ack(1)
    channel.basic_ack(1)
    inbox.pump_until(lambda: not channel.is_open)
    assert connection.is_open
    with pytest.raises(exceptions.ChannelWrongStateError):
        channel.basic_ack(2)
    with pytest.raises(exceptions.ChannelWrongStateError):
        channel.queue_declare(queue, passive=True)
    assert broker.depth(queue) == 1


# -- waking up --------------------------------------------------------------------------------------------------------


def test_a_callback_from_another_thread_ends_the_wait_and_runs_on_the_pumping_thread(broker: Broker) -> None:
    connection = broker.connect()
    connection.process_data_events(time_limit=0)
    ran_on: list[str] = []
    began = threading.Event()

    def wake() -> None:
        began.wait(LONG_S)
        connection.add_callback_threadsafe(lambda: ran_on.append(threading.current_thread().name))

    waker = threading.Thread(target=wake)
    waker.start()
    began_at = monotonic()
    began.set()
    while not ran_on:
        connection.process_data_events(time_limit=LONG_S)
    assert monotonic() - began_at < LONG_S / 2
    waker.join()
    assert ran_on == [threading.current_thread().name]


def test_process_data_events_waits_for_its_limit_when_nothing_happens(broker: Broker) -> None:
    connection = broker.connect()
    connection.process_data_events(time_limit=0)
    began_at = monotonic()
    connection.process_data_events(time_limit=0.2)
    assert monotonic() - began_at >= 0.19


def test_a_callback_for_a_closed_connection_is_refused(broker: Broker) -> None:
    connection = broker.connect()
    connection.close()
    with pytest.raises(exceptions.ConnectionWrongStateError):
        connection.add_callback_threadsafe(lambda: None)
    with pytest.raises(exceptions.ConnectionWrongStateError):
        connection.close()
    # no AMQPError: nobody may pump a connection that is known to be closed
    with pytest.raises(ValueError):
        connection.process_data_events(time_limit=0)


def test_a_callback_accepted_before_the_link_was_lost_is_never_run(broker: Broker) -> None:
    connection = broker.connect()
    ran: list[bool] = []
    shut_down(connection)
    connection.add_callback_threadsafe(lambda: ran.append(True))

    def pump_until_lost() -> None:
        for _ in range(3):
            connection.process_data_events(time_limit=LONG_S)

    with pytest.raises(exceptions.AMQPError):
        pump_until_lost()
    assert connection.is_closed
    assert ran == []


# -- declaring --------------------------------------------------------------------------------------------------------


def test_a_passive_declare_of_a_missing_queue_closes_its_channel_only(broker: Broker) -> None:
    connection = broker.connect()
    channel = connection.channel()
    with pytest.raises(exceptions.ChannelClosedByBroker) as caught:
        channel.queue_declare(broker.name(), passive=True)
    assert caught.value.reply_code == 404
    assert not channel.is_open
    assert connection.channel().is_open


def test_a_passive_declare_tells_ready_messages_and_consumers(broker: Broker) -> None:
    queue = broker.queue()
    broker.send(queue, b"a", b"b", b"c")
    _, _, inbox, _ = consume(broker, queue, prefetch=1)
    inbox.pump_until(lambda: inbox.deliveries)
    answer = broker.connect().channel().queue_declare(queue, passive=True).method
    assert (answer.message_count, answer.consumer_count) == (2, 1)


@pytest.mark.parametrize(
    ("existing", "declared", "named"),
    [
        ({}, {"x-dead-letter-exchange": "dlx"}, "x-dead-letter-exchange"),
        ({"x-dead-letter-exchange": "other"}, {"x-dead-letter-exchange": "dlx"}, "x-dead-letter-exchange"),
        ({"x-max-priority": 5}, {}, "x-max-priority"),
        ({"x-max-length": 5}, {"x-max-length": 6}, "x-max-length"),
    ],
)
def test_a_declaration_with_other_arguments_is_refused_and_names_the_argument(
    broker: Broker, existing: dict[str, Any], declared: dict[str, Any], named: str
) -> None:
    queue = broker.name()
    broker.connect().channel().queue_declare(queue, durable=True, arguments=existing)
    channel = broker.connect().channel()
    with pytest.raises(exceptions.ChannelClosedByBroker) as caught:
        channel.queue_declare(queue, durable=True, arguments=declared)
    assert caught.value.reply_code == 406
    assert f"inequivalent arg '{named}'" in caught.value.reply_text
    assert not channel.is_open


@pytest.mark.parametrize("arguments", [{}, {"x-queue-type": "classic"}])
def test_the_same_declaration_is_accepted_again_classic_by_name_or_not(
    broker: Broker, arguments: dict[str, Any]
) -> None:
    queue = broker.queue()
    broker.connect().channel().queue_declare(queue, durable=True, arguments=arguments)


def test_an_exchange_of_another_kind_is_refused(broker: Broker) -> None:
    exchange = broker.exchange()
    broker.connect().channel().exchange_declare(exchange, "direct", durable=True)
    channel = broker.connect().channel()
    with pytest.raises(exceptions.ChannelClosedByBroker) as caught:
        channel.exchange_declare(exchange, "fanout", durable=True)
    assert caught.value.reply_code == 406
    broker.connect().channel().exchange_declare(exchange, passive=True)


def test_a_missing_exchange_can_neither_be_looked_at_nor_bound_to(broker: Broker) -> None:
    queue = broker.queue()
    for call in (
        lambda channel: channel.exchange_declare("contract-x-missing", passive=True),
        lambda channel: channel.queue_bind(queue, "contract-x-missing", "key"),
        lambda channel: channel.basic_consume("contract-missing", lambda *_: None),
    ):
        with pytest.raises(exceptions.ChannelClosedByBroker) as caught:
            call(broker.connect().channel())
        assert caught.value.reply_code == 404


# -- publishing with confirms -----------------------------------------------------------------------------------------


def confirming(broker: Broker) -> Any:
    channel = broker.connect().channel()
    channel.confirm_delivery()
    return channel


def test_a_confirmed_publish_is_in_the_queue(broker: Broker) -> None:
    queue = broker.queue()
    confirming(broker).basic_publish("", queue, b"a", mandatory=True)
    assert broker.depth(queue) == 1


def test_a_mandatory_publish_that_no_queue_gets_is_unroutable_and_the_channel_stays_open(broker: Broker) -> None:
    channel = confirming(broker)
    with pytest.raises(exceptions.UnroutableError):
        channel.basic_publish("", "contract-missing", b"a", mandatory=True)
    assert channel.is_open


def test_a_publish_that_no_queue_gets_is_lost_without_a_word_when_not_mandatory(broker: Broker) -> None:
    channel = confirming(broker)
    channel.basic_publish("", "contract-missing", b"a")
    assert channel.is_open


def test_a_full_queue_that_rejects_publishes_nacks_and_the_channel_stays_open(broker: Broker) -> None:
    queue = broker.queue(x_max_length=1, x_overflow="reject-publish")
    channel = confirming(broker)
    channel.basic_publish("", queue, b"a", mandatory=True)
    with pytest.raises(exceptions.NackError):
        channel.basic_publish("", queue, b"b", mandatory=True)
    assert channel.is_open
    assert broker.depth(queue) == 1


def test_a_publish_to_a_missing_exchange_closes_the_channel_only(broker: Broker) -> None:
    connection = broker.connect()
    channel = connection.channel()
    channel.confirm_delivery()
    with pytest.raises(exceptions.ChannelClosedByBroker) as caught:
        channel.basic_publish("contract-x-missing", "key", b"a", mandatory=True)
    assert caught.value.reply_code == 404
    assert not channel.is_open
    assert connection.is_open


def test_without_confirms_a_publish_to_a_missing_exchange_says_nothing(broker: Broker) -> None:
    connection = broker.connect()
    channel = connection.channel()
    channel.basic_publish("contract-x-missing", "key", b"a")
    inbox = Inbox(connection)
    inbox.pump_until(lambda: not channel.is_open)
    assert connection.is_open


@pytest.mark.parametrize(
    "properties",
    [
        pika.BasicProperties(user_id="somebody-else"),
        pika.BasicProperties(expiration="59999.5"),
        pika.BasicProperties(expiration="-1"),
    ],
)
def test_properties_that_the_broker_refuses_close_the_channel_with_406(
    broker: Broker, properties: pika.BasicProperties
) -> None:
    channel = confirming(broker)
    with pytest.raises(exceptions.ChannelClosedByBroker) as caught:
        channel.basic_publish("", broker.queue(), b"a", properties, mandatory=True)
    assert caught.value.reply_code == 406


def test_a_link_that_ends_before_the_confirm_raises_and_the_connection_is_closed(broker: Broker) -> None:
    connection = broker.connect()
    channel = connection.channel()
    channel.confirm_delivery()
    shut_down(connection)
    with pytest.raises(exceptions.AMQPError):
        channel.basic_publish("", broker.queue(), b"a", mandatory=True)
    assert not connection.is_open


# -- dead letters -----------------------------------------------------------------------------------------------------


def dead_letter_queue(broker: Broker) -> tuple[str, str, str]:
    """A queue, its dead-letter exchange, and the queue behind that."""
    exchange, dead = broker.exchange(), broker.queue()
    broker.connect().channel().queue_bind(dead, exchange, "dead")
    queue = broker.queue(x_dead_letter_exchange=exchange, x_dead_letter_routing_key="dead")
    return queue, exchange, dead


def wait_for_message(broker: Broker, queue: str) -> tuple[Any, pika.BasicProperties, bytes]:
    channel = broker.connect().channel()
    ends_at = monotonic() + LONG_S
    while True:
        method, properties, body = channel.basic_get(queue, auto_ack=True)
        if method is not None:
            return method, properties, body
        assert monotonic() < ends_at, f"no message in {queue}"


def test_a_nack_without_requeue_goes_through_the_dead_letter_exchange(broker: Broker) -> None:
    queue, exchange, dead = dead_letter_queue(broker)
    headers = {"x-retry-count": 1}
    broker.send(queue, b"a", properties=pika.BasicProperties(headers=headers, correlation_id="c"))
    _, channel, inbox, _ = consume(broker, queue)
    inbox.pump_until(lambda: inbox.deliveries)
    channel.basic_nack(1, requeue=False)
    inbox.pump()
    method, properties, body = wait_for_message(broker, dead)
    assert (body, method.exchange, method.routing_key) == (b"a", exchange, "dead")
    assert properties.correlation_id == "c"
    assert properties.headers["x-retry-count"] == 1
    assert properties.headers["x-first-death-reason"] == "rejected"
    assert properties.headers["x-death"][0]["queue"] == queue


def test_a_dead_letter_is_gone_without_a_word_when_its_exchange_is_missing(broker: Broker) -> None:
    queue, exchange, dead = dead_letter_queue(broker)
    broker.connect().channel().exchange_delete(exchange)
    broker.send(queue, b"a")
    connection, channel, inbox, _ = consume(broker, queue)
    inbox.pump_until(lambda: inbox.deliveries)
    channel.basic_nack(1, requeue=False)
    inbox.pump()
    assert channel.is_open
    assert connection.is_open
    assert (broker.depth(queue), broker.depth(dead)) == (0, 0)


def test_an_ack_after_the_queue_was_deleted_does_no_harm(broker: Broker) -> None:
    queue = broker.queue()
    broker.send(queue, b"a")
    _, channel, inbox, _ = consume(broker, queue)
    inbox.pump_until(lambda: inbox.deliveries)
    broker.connect().channel().queue_delete(queue)
    channel.basic_ack(1)
    inbox.pump()
    assert channel.is_open


# -- properties -------------------------------------------------------------------------------------------------------


def test_a_message_without_properties_has_no_header_table(broker: Broker) -> None:
    queue = broker.queue()
    broker.send(queue, b"a")
    broker.send(queue, b"b", properties=pika.BasicProperties(headers={}))
    _, _, inbox, _ = consume(broker, queue)
    inbox.pump_until(lambda: len(inbox.deliveries) == 2)
    assert [properties.headers for properties in inbox.properties] == [None, {}]


def test_properties_and_headers_come_as_they_went(broker: Broker) -> None:
    queue = broker.queue()
    headers = {"text": "ä", "number": 7, "flag": True, "list": [1, "two"], "table": {"a": None}}
    sent = pika.BasicProperties(
        headers=headers, priority=7, correlation_id="c", message_id="m", timestamp=1_772_000_000_000, delivery_mode=2
    )
    broker.send(queue, b"a", properties=sent)
    _, _, inbox, _ = consume(broker, queue)
    inbox.pump_until(lambda: inbox.deliveries)
    assert vars(inbox.properties[0]) == vars(sent)


@pytest.mark.parametrize(
    ("value", "error"),
    [(2**63, struct.error), ((1,), exceptions.UnsupportedAMQPFieldException)],
)
def test_a_header_that_pika_cannot_send_raises(broker: Broker, value: Any, error: type[Exception]) -> None:
    channel = confirming(broker)
    with pytest.raises(error):
        channel.basic_publish("", broker.queue(), b"a", pika.BasicProperties(headers={"h": value}), mandatory=True)
