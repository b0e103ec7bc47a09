"""A confirmed copy of a message: to its queue for a retry, or to the dead-letter exchange.

Runs on slot threads. The only place that publishes. Copies are rare, so each has a short connection of its own, one at
a time in a process: a refused publish closes its channel and would void the tags of requests in flight, an alarm would
stall their acks, and an idle connection would have to be pumped (design section 5 "Retry copy").
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pika
import pika.exceptions

from inference_worker.amqp_connection import LIBRARY_ERRORS, close_connection, describe, shut_down
from inference_worker.deadlines import Bounded, Deadlines
from inference_worker.delivery import Delivery
from inference_worker.errors import BrokerError, CopyNotConfirmed, CopyRefusedForGood

#: the whole of it: connect, publish, confirm; then its socket is shut down
_PUBLISH_LIMIT_S = 30.0
#: how soon a slot that waits for its turn notices that it waits in vain
_LOOK_AGAIN_S = 0.25
_PRECONDITION_FAILED = 406
#: what pika raises for a header or property that it cannot write: trying again would not help
_ENCODING_ERRORS = (
    pika.exceptions.UnsupportedAMQPFieldException,
    pika.exceptions.ShortStringTooLong,
    struct.error,
    AssertionError,
    AttributeError,
    TypeError,
    ValueError,
)
#: what the broker wrote or would act on again: a copy that kept them would lie or be routed twice (R25)
_BROKER_HEADERS = frozenset({"x-death", "x-delivery-count", "x-acquired-count", "CC", "BCC"})
_BROKER_HEADER_PREFIXES = ("x-first-death-", "x-last-death-")
#: kept as they are; `expiration` goes (the deadline in the body governs), and `user_id` (the broker refuses another's)
_KEPT_PROPERTIES = (
    "content_type",
    "content_encoding",
    "priority",
    "correlation_id",
    "reply_to",
    "message_id",
    "timestamp",
    "type",
    "app_id",
)


class MessagePublisher:
    """Publishes copies, one at a time. Safe from any thread; a call may wait for the one before it."""

    def __init__(self, connect: Callable[[], Any], deadlines: Deadlines, *, queue: str, dlx: str, dlx_key: str) -> None:
        self._connect = connect
        self._deadlines = deadlines
        self._queue, self._dlx, self._dlx_key = queue, dlx, dlx_key
        self._one_at_a_time = threading.Lock()

    def publish_retry(self, delivery: Delivery, *, retry_count: int) -> None:
        """Put a copy with this `x-retry-count` into the queue and wait for the broker's confirm.

        Raises:  CopyRefusedForGood, CopyNotConfirmed (it may be in the queue all the same: a duplicate, not a loss)
        """
        self._publish("", self._queue, delivery, {"x-retry-count": retry_count})

    def publish_dead_letter(self, delivery: Delivery, *, reason: str) -> None:
        """Put a copy into the dead-letter exchange, where a nack might drop the message.

        Raises:  CopyRefusedForGood, CopyNotConfirmed
        """
        self._publish(self._dlx, self._dlx_key, delivery, {"x-dead-letter-reason": reason})

    def _publish(self, exchange: str, routing_key: str, delivery: Delivery, headers: dict[str, Any]) -> None:
        with self._turn(delivery), self._connection() as connection:
            try:
                properties = _copy_properties(delivery, headers)
                channel = connection.channel()
                channel.confirm_delivery()
                channel.basic_publish(exchange, routing_key, delivery.body, properties, mandatory=True)
            except pika.exceptions.ChannelClosedByBroker as err:
                if err.reply_code == _PRECONDITION_FAILED:
                    raise CopyRefusedForGood(f"the broker refuses the copy: {err.reply_text}") from err
                raise CopyNotConfirmed(f"the broker refuses the copy: {err.reply_text}") from err
            except pika.exceptions.UnroutableError as err:
                raise CopyNotConfirmed("the copy could not be routed") from err
            except pika.exceptions.NackError as err:
                raise CopyNotConfirmed("the broker refused the copy (a full queue?)") from err
            except _ENCODING_ERRORS as err:
                # a header that the library can read but not write; some of these are among LIBRARY_ERRORS, too
                raise CopyRefusedForGood(f"the copy cannot be encoded ({type(err).__name__})") from err
            except LIBRARY_ERRORS as err:
                raise CopyNotConfirmed(f"no confirm for the copy ({describe(err)})") from err

    @contextmanager
    def _turn(self, delivery: Delivery) -> Iterator[None]:
        """Wait for our turn, while there is a reason to."""
        while not self._one_at_a_time.acquire(timeout=_LOOK_AGAIN_S):
            self._give_up_in_vain(delivery)
        try:
            self._give_up_in_vain(delivery)
            yield
        finally:
            self._one_at_a_time.release()

    def _give_up_in_vain(self, delivery: Delivery) -> None:
        # minutes may pass while those before us connect to a broker that does not answer
        if delivery.session.ended:
            raise CopyNotConfirmed("the session has ended, the original is delivered again")
        if self._deadlines.is_ended(Bounded.COPY):
            raise CopyNotConfirmed("not begun: the process is about to end")

    @contextmanager
    def _connection(self) -> Any:
        try:
            connection = self._connect()
        except BrokerError as err:
            raise CopyNotConfirmed(str(err)) from err
        with self._deadlines.bound(Bounded.COPY, _PUBLISH_LIMIT_S, lambda: shut_down(connection)):
            try:
                yield connection
            finally:
                close_connection(connection)


def _copy_properties(delivery: Delivery, headers: dict[str, Any]) -> pika.BasicProperties:
    original = delivery.properties
    kept = {name: getattr(original, name) for name in _KEPT_PROPERTIES}
    return pika.BasicProperties(**kept, delivery_mode=2, headers={**_kept_headers(delivery), **headers})


def _kept_headers(delivery: Delivery) -> dict[Any, Any]:
    return {
        name: value
        for name, value in delivery.headers.items()
        if name not in _BROKER_HEADERS and not str(name).startswith(_BROKER_HEADER_PREFIXES)
    }
