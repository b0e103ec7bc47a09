"""Confirmed copies: what is equal, what is not, and what every refusal of the broker means."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pika
import pytest
from pika import exceptions

from inference_worker.deadlines import Deadlines
from inference_worker.errors import BrokerError, CopyNotConfirmed, CopyRefusedForGood
from inference_worker.message_publisher import MessagePublisher
from tests.fakes.amqp import FakeBroker
from tests.fakes.steps import make_delivery
from tests.timeouts import LONG_TIMEOUT_S

QUEUE, DLX, DLQ = "infer_req.d-1", "infer.dlx", "infer.dlq"


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    broker = FakeBroker()
    broker.make_queue(QUEUE)
    broker.make_queue(DLQ)
    broker.make_exchange(DLX)
    broker.connect("set-up").channel().queue_bind(DLQ, DLX, "dead")
    yield broker
    broker.close()


@pytest.fixture
def deadlines() -> Deadlines:
    return Deadlines()


@pytest.fixture
def publisher(broker: FakeBroker, deadlines: Deadlines) -> MessagePublisher:
    return MessagePublisher(lambda: broker.connect("copies"), deadlines, queue=QUEUE, dlx=DLX, dlx_key="dead")


FULL = pika.BasicProperties(
    content_type="application/json",
    content_encoding="utf-8",
    headers={"a": 1, "b": "two", "c": [True, None], "x-retry-count": "junk"},
    delivery_mode=1,
    priority=7,
    correlation_id="corr",
    reply_to="reply",
    expiration="60000",
    message_id="m-1",
    timestamp=1_772_000_000_000,
    type="kind",
    user_id="guest",
    app_id="producer",
)


def test_r24_the_copy_is_equal_in_every_property_and_header_but_the_count_the_expiration_and_the_login(
    broker: FakeBroker, publisher: MessagePublisher
) -> None:
    publisher.publish_retry(make_delivery(b"body", properties=FULL), retry_count=1)
    (copy,) = broker.ready(QUEUE)
    assert copy.body == b"body"
    assert vars(copy.properties) == {
        **vars(FULL),
        "headers": {"a": 1, "b": "two", "c": [True, None], "x-retry-count": 1},
        "delivery_mode": 2,
        "expiration": None,
        "user_id": None,
    }


def test_r24_every_property_that_amqp_has_is_kept_or_dropped_on_purpose() -> None:
    assert set(vars(FULL)) - {"cluster_id"} == set(vars(pika.BasicProperties())) - {"cluster_id"}
    assert all(value is not None for name, value in vars(FULL).items() if name != "cluster_id")


def test_r25_the_brokers_own_headers_do_not_go_into_the_copy(broker: FakeBroker, publisher: MessagePublisher) -> None:
    headers = {
        "x-death": [{"count": 4}],
        "x-first-death-queue": "q",
        "x-first-death-reason": "rejected",
        "x-last-death-queue": "q",
        "x-delivery-count": 7,
        "x-acquired-count": 9,
        "CC": ["another"],
        "BCC": ["another"],
        "x-retry-count": 3,
        "x-mine": "kept",
    }
    publisher.publish_retry(make_delivery(headers=headers), retry_count=4)
    (copy,) = broker.ready(QUEUE)
    assert copy.properties.headers == {"x-retry-count": 4, "x-mine": "kept"}


@pytest.mark.parametrize("properties", [pika.BasicProperties(), pika.BasicProperties(headers={})])
def test_r28_a_message_without_headers_can_be_copied_both_ways(
    broker: FakeBroker, publisher: MessagePublisher, properties: pika.BasicProperties
) -> None:
    delivery = make_delivery(properties=properties)
    publisher.publish_retry(delivery, retry_count=1)
    publisher.publish_dead_letter(delivery, reason="malformed_request")
    assert broker.ready(QUEUE)[0].properties.headers == {"x-retry-count": 1}
    assert broker.ready(DLQ)[0].properties.headers == {"x-dead-letter-reason": "malformed_request"}


def test_headers_under_keys_of_bytes_are_kept(broker: FakeBroker, publisher: MessagePublisher) -> None:
    publisher.publish_retry(make_delivery(headers={b"\xff": "odd"}), retry_count=1)
    assert broker.ready(QUEUE)[0].properties.headers == {b"\xff": "odd", "x-retry-count": 1}


def test_a_dead_letter_copy_keeps_the_retry_count_and_tells_the_reason(
    broker: FakeBroker, publisher: MessagePublisher
) -> None:
    publisher.publish_dead_letter(make_delivery(b"b", headers={"x-retry-count": 1}), reason="retries_used_up")
    (copy,) = broker.ready(DLQ)
    assert copy.properties.headers == {"x-retry-count": 1, "x-dead-letter-reason": "retries_used_up"}
    assert (copy.exchange, copy.routing_key) == (DLX, "dead")


def test_r23_a_copy_whose_queue_is_gone_is_not_confirmed(broker: FakeBroker, publisher: MessagePublisher) -> None:
    broker.delete_queue(QUEUE)
    with pytest.raises(CopyNotConfirmed):
        publisher.publish_retry(make_delivery(), retry_count=1)


def test_r23_a_copy_that_a_full_queue_rejects_is_not_confirmed(broker: FakeBroker, publisher: MessagePublisher) -> None:
    broker.make_queue(QUEUE, arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
    with pytest.raises(CopyNotConfirmed) as caught:
        publisher.publish_retry(make_delivery(), retry_count=1)
    assert isinstance(caught.value.__cause__, exceptions.NackError)


def test_r23_a_copy_whose_link_is_cut_after_the_publish_is_not_confirmed_though_it_may_be_there(
    broker: FakeBroker, publisher: MessagePublisher
) -> None:
    broker.drop_links_after_publish(1)
    with pytest.raises(CopyNotConfirmed):
        publisher.publish_retry(make_delivery(), retry_count=1)
    assert len(broker.ready(QUEUE)) == 1


def test_r11_a_dead_letter_copy_whose_exchange_is_missing_is_not_confirmed(
    broker: FakeBroker, publisher: MessagePublisher
) -> None:
    broker.delete_exchange(DLX)
    with pytest.raises(CopyNotConfirmed):
        publisher.publish_dead_letter(make_delivery(), reason="malformed_request")
    broker.make_exchange(DLX)
    broker.connect("set-up").channel().queue_bind(DLQ, DLX, "dead")
    publisher.publish_dead_letter(make_delivery(), reason="malformed_request")
    assert len(broker.ready(DLQ)) == 1


def test_a_copy_larger_than_the_brokers_limit_is_refused_for_good(
    broker: FakeBroker, publisher: MessagePublisher
) -> None:
    broker.max_message_bytes = 10
    with pytest.raises(CopyRefusedForGood):
        publisher.publish_retry(make_delivery(b"x" * 11), retry_count=1)


def test_a_broker_that_cannot_be_reached_confirms_nothing(broker: FakeBroker, publisher: MessagePublisher) -> None:
    broker.connect_errors.append(BrokerError("refused"))
    with pytest.raises(CopyNotConfirmed):
        publisher.publish_retry(make_delivery(), retry_count=1)


@pytest.mark.parametrize("headers", [{"odd": 2**63}, {"odd": (1,)}, {"k" * 256: 1}, {None: 1}])
def test_a_header_that_cannot_be_sent_on_is_refused_for_good_and_not_tried_again(
    publisher: MessagePublisher, headers: dict[Any, Any]
) -> None:
    with pytest.raises(CopyRefusedForGood):
        publisher.publish_retry(make_delivery(headers=headers), retry_count=1)


def test_copies_are_published_with_confirms_and_mandatory_on_a_connection_that_is_closed_again(
    broker: FakeBroker, publisher: MessagePublisher
) -> None:
    for retry_count in (1, 2):
        publisher.publish_retry(make_delivery(), retry_count=retry_count)
    copies = [connection for connection in broker.connections if connection.purpose == "copies"]
    assert len(copies) == 2
    assert not any(connection.is_open for connection in copies)
    methods = [call.method for call in broker.calls if call.purpose == "copies"][:4]
    assert methods == ["connect", "channel", "confirm_delivery", "basic_publish"]


def test_the_connection_is_closed_after_a_refusal_too(broker: FakeBroker, publisher: MessagePublisher) -> None:
    broker.refuse_confirms(1)
    with pytest.raises(CopyNotConfirmed):
        publisher.publish_retry(make_delivery(), retry_count=1)
    assert not broker.connections[-1].is_open


def test_r20_a_publish_that_the_broker_never_answers_ends_when_its_time_is_over(
    broker: FakeBroker, deadlines: Deadlines
) -> None:
    def connect() -> Any:
        connection = broker.connect("copies")
        broker.stall(connection)
        return connection

    publisher = MessagePublisher(connect, deadlines, queue=QUEUE, dlx=DLX, dlx_key="dead")
    errors: list[Exception] = []

    def publish() -> None:
        try:
            publisher.publish_retry(make_delivery(), retry_count=1)
        except CopyNotConfirmed as err:
            errors.append(err)

    slot = threading.Thread(target=publish)
    slot.start()
    broker.wait_until(lambda: broker.methods("channel", purpose="copies"), what="the publisher waits for an answer")
    deadlines.cut_overdue(monotonic() + 29.0)
    assert slot.is_alive()
    deadlines.cut_overdue(monotonic() + 31.0)
    slot.join(LONG_TIMEOUT_S)
    assert not slot.is_alive()
    assert len(errors) == 1
    assert broker.ready(QUEUE) == []


def test_one_copy_at_a_time_in_a_process(broker: FakeBroker, deadlines: Deadlines) -> None:
    open_count: list[int] = []

    def connect() -> Any:
        others = [each for each in broker.connections if each.purpose == "copies" and each.is_open]
        open_count.append(len(others))
        return broker.connect("copies")

    publisher = MessagePublisher(connect, deadlines, queue=QUEUE, dlx=DLX, dlx_key="dead")
    slots = [threading.Thread(target=lambda: publisher.publish_retry(make_delivery(), retry_count=1)) for _ in range(8)]
    for slot in slots:
        slot.start()
    for slot in slots:
        slot.join(LONG_TIMEOUT_S)
    assert open_count == [0] * 8
    assert len(broker.ready(QUEUE)) == 8
