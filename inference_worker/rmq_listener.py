"""The consumer: its connection, consuming and suspending, and every settlement.

Runs on the thread `rmq-listener`, which alone touches the connection and pumps it at all times: while slots work,
while suspended, while Redis is down, while draining (law 4). Slots hand settlements in from their own threads. Knows
pika, and tenacity for the backoff. Sources: specification ("RabbitMQ Listener"), design sections 2, 5 and 6.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, assert_never

import pika.exceptions
import tenacity

from inference_worker.amqp_connection import LIBRARY_ERRORS, close_connection, describe, send_now, shut_down, unflushed
from inference_worker.amqp_topology import Topology, TopologyNames
from inference_worker.deadlines import Bound, Bounded, Deadlines
from inference_worker.delivery import Delivery, Session, Settlement
from inference_worker.disposition import NAMES, Ack, Reject, Republish, Requeue
from inference_worker.documents import QueueDepth
from inference_worker.errors import BrokerError, BrokerUnusable
from inference_worker.holds import Holds, ListenerState
from inference_worker.slots import Slots

logger = logging.getLogger(__name__)

#: a turn lasts this long at the most when nothing happens: a vanished consumer is noticed within a second
_PUMP_S = 0.5
#: pika has calls without a bound on a stalled link; then the supervisor shuts the socket down (law 5)
_TURN_LIMIT_S = 30.0
#: the longest pause between two tries to connect (specification)
_BACKOFF_MAX_S = 30.0
_JITTER = 0.2
#: a settlement, or consuming for so long, ends a row of failures; a session that is lost sooner is one more of them
_STABLE_S = 3.0
#: so many sessions lost in a row, right after they began to consume, are no accident of the network
_SUSPICIOUS_FAILURES = 3
#: many producers send no headers; one empty table serves them all
_NO_HEADERS: dict[Any, Any] = {}


class RmqListener:
    """Consumes, feeds the slots, settles. `tick` and `close` on the listener thread, the rest as each says."""

    name = "rmq-listener"

    def __init__(
        self,
        names: TopologyNames,
        *,
        connect: Callable[[], Any],
        prefetch: int,
        holds: Holds,
        slots: Slots,
        deadlines: Deadlines,
    ) -> None:
        self._names = names
        self._topology = Topology(names)
        self._connect = connect
        self._prefetch = prefetch
        self._holds = holds
        self._slots = slots
        self._deadlines = deadlines
        self.wakeup = threading.Event()
        self._settlements: deque[Settlement] = deque()
        #: one of the settlements has woken the listener already
        self._is_woken = False
        self._connection: Any = None
        self._channel: Any = None
        #: the channel, for acks and nacks
        self._settling: Any = None
        self._session = Session(0, ended=True)
        #: monotonic, of the consumer that lives
        self._consuming_since = float("inf")
        self._consumer_tag: str | None = None
        #: the prefetch of the consumer that lives; 0 without one
        self._granted = 0
        #: what slots worked on when this consumer began
        self._before: set[Delivery] = set()
        self._unsettled: set[int] = set()
        self._failures = 0
        #: in a row; not `_failures`, which a lost session counts in: the first failed connect after it is news
        self._failed_connects = 0
        self._retry_at = float("-inf")
        self._is_draining = False
        self._depth_channel: Any = None
        self._depth_wanted = False
        self._depth_ready = threading.Event()
        self._depth: QueueDepth | None = None
        #: settlements that meant nothing any more: of an ended session, or second ones (laws 3 and 8)
        self.stale_settlements_total = 0
        self.reconnects_total = 0

    # -- from any thread ----------------------------------------------------------------------------------------------

    def hand_in(self, settlement: Settlement) -> None:
        """Give a settlement to the listener and wake it."""
        self._settlements.append(settlement)
        if not self._is_woken:
            self._is_woken = True
            self.wake()

    def wake(self) -> None:
        """End the listener's wait, wherever it waits."""
        connection = self._connection
        if connection is None:
            self.wakeup.set()
            return
        with suppress(pika.exceptions.AMQPError):
            connection.add_callback_threadsafe(_do_nothing)

    def drain(self) -> None:
        """Ask for the end: no new connection, no new consumer; what is in work is settled."""
        self._is_draining = True
        self.wake()

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to settle; what belongs to an ended session cannot be."""
        return self._session.ended or (not self._unsettled and not self._settlements)

    @property
    def state(self) -> ListenerState:
        if self._is_draining:
            return ListenerState.DRAINING
        if self._session.ended:
            return ListenerState.CONNECTING
        return ListenerState.CONSUMING if self._consumer_tag is not None else ListenerState.HELD

    def queue_depth(self, timeout_s: float) -> QueueDepth | None:
        """Ask how many messages wait; None when the listener has no answer within the time."""
        if self._session.ended:
            return None
        self._depth_ready.clear()
        self._depth_wanted = True
        self.wake()
        return self._depth if self._depth_ready.wait(timeout_s) else None

    # -- one turn -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Do one turn: connect, or pump and settle. Returns the seconds to wait before the next."""
        if self._session.ended:
            return self._open_session(now)
        with self._bound_turn():
            try:
                self._connection.process_data_events(time_limit=0 if self._settlements else _PUMP_S)
                self._follow_holds()
                self._settle_ready()
                self._measure_depth()
                self._check_consumer()
            except (BrokerError, *LIBRARY_ERRORS) as err:
                self._end_session(describe(err) if not isinstance(err, BrokerError) else str(err))
                return self._schedule_retry(monotonic())
            return 0.0

    def close(self) -> None:
        """End the last session. What is unsettled goes back to the queue with it."""
        with self._bound_turn():
            if not self._session.ended:
                self._session.ended = True
                close_connection(self._connection)

    def _bound_turn(self) -> Bound:
        return self._deadlines.bound(Bounded.BROKER_CALL, _TURN_LIMIT_S, self._shut_down)

    def _shut_down(self) -> None:
        shut_down(self._connection)

    # -- sessions -----------------------------------------------------------------------------------------------------

    def _open_session(self, now: float) -> float:
        if self._is_draining:
            self._drop_stale()
            return _PUMP_S
        if now < self._retry_at:
            self._drop_stale()
            return self._retry_at - now
        try:
            # bounds itself; there is no socket yet that could be shut down
            self._connection = self._connect()
            with self._bound_turn():
                rejects_by_copy = self._topology.declare(self._connection, now=now)
                self._channel = self._connection.channel()
            self._settling = unflushed(self._channel)
        except (BrokerError, *LIBRARY_ERRORS) as err:
            self._report_failure(err)
            if self._connection is not None:
                # left to the garbage collector, its sockets would pile up over a long outage
                close_connection(self._connection)
            self._connection = None
            return self._schedule_retry(monotonic())
        self._failed_connects = 0
        number = self._session.number + 1
        self._session = Session(number, rejects_by_copy=rejects_by_copy)
        self._unsettled = set()
        self._depth_channel = None
        logger.info("connected to RabbitMQ", extra={"event": "connected", "session": number})
        self._drop_stale()
        # the first pump would wait for half a second, and only then the consuming begin
        self.wake()
        return 0.0

    def _report_failure(self, err: Exception) -> None:
        # the first of a row and then every tenth: an outage of an hour is no thousand lines
        self._failed_connects += 1
        if self._failed_connects % 10 == 1:
            level = logging.ERROR if isinstance(err, BrokerUnusable) else logging.WARNING
            text = str(err) if isinstance(err, BrokerError) else describe(err)
            extra = {"event": "connect_failed", "attempt": self._failed_connects}
            logger.log(level, "cannot use RabbitMQ, trying again: %s", text, extra=extra)

    def _end_session(self, reason: str) -> None:
        session = self._session
        session.ended = True
        if monotonic() - self._consuming_since > _STABLE_S:
            self._failures = 0
        self.reconnects_total += 1
        extra = {"event": "session_ended", "session": session.number, "reason": reason}
        # one message that the library cannot read ends every session right after it began (field report R29)
        level = logging.ERROR if self._failures >= _SUSPICIOUS_FAILURES else logging.WARNING
        logger.log(level, "the RabbitMQ session ended, connecting again: %s", reason, extra=extra)
        self._consumer_tag, self._granted = None, 0
        self._consuming_since = float("inf")
        self._slots.forget(session)
        self._unsettled = set()
        self._depth_wanted = False
        close_connection(self._connection)
        self._connection = None

    def _schedule_retry(self, now: float) -> float:
        delay_s = _backoff_s(self._failures)
        self._failures += 1
        self._retry_at = now + delay_s
        return delay_s

    def _drop_stale(self) -> None:
        self._is_woken = False
        while self._settlements:
            settlement = self._settlements.popleft()
            _log_settlement(settlement, self.settle(settlement))

    def _check_consumer(self) -> None:
        # pika is silent when the broker closes the channel (an ack timeout) or cancels the consumer (a deleted queue);
        # unlooked for, we would idle for ever
        if not self._channel.is_open:
            raise BrokerError("the broker closed the channel")
        if self._consumer_tag is not None and self._consumer_tag not in self._channel.consumer_tags:
            raise BrokerError("the broker cancelled the consumer")

    # -- consuming ----------------------------------------------------------------------------------------------------

    def _follow_holds(self) -> None:
        if self._holds.suspended.is_set():
            if self._consumer_tag is not None:
                self.suspend_consuming()
            return
        if self._is_draining or self._granted == self._prefetch:
            return
        grant = self._next_grant()
        if grant > self._granted:
            if self._consumer_tag is not None:
                self._cancel_consumer()
            self.resume_consuming(grant)

    def _next_grant(self) -> int:
        """Decide how much a consumer may have in hand while calls of before still occupy slots.

        The broker counts what is unacked for each consumer apart, and knows nothing of calls that outlived a session: a
        new consumer with the whole prefetch would take messages that wait here for a slot while others are idle (R12).
        So it gets what is free. Its own calls are no reason for less: once those of before have ended it gets the
        whole, or a busy worker would stay at half its slots; what is too much then, once, is less than it had.
        """
        if self._consumer_tag is not None and not self._slots.are_in_work(self._before):
            return self._prefetch
        return self._prefetch - self._slots.load_count

    def suspend_consuming(self) -> None:
        """Cancel the consumer, then give back what no slot has begun; what has begun runs on."""
        unbegun_count = self._cancel_consumer()
        extra = {"event": "consuming_suspended", "session": self._session.number, "given_back": unbegun_count}
        logger.info("suspended, %d deliveries given back", unbegun_count, extra=extra)

    def _cancel_consumer(self) -> int:
        tag, self._consumer_tag, self._granted = self._consumer_tag, None, 0
        self._channel.basic_cancel(tag)
        unbegun = self._slots.take_back()
        for delivery in unbegun:
            settlement = Settlement(delivery, Requeue("not_begun"))
            _log_settlement(settlement, self.settle(settlement))
        return len(unbegun)

    def resume_consuming(self, prefetch: int) -> None:
        """Begin with a new consumer, which may have so many messages in hand."""
        self._channel.basic_qos(prefetch_count=prefetch)
        self._consumer_tag = self._channel.basic_consume(self._names.queue, self._on_message, auto_ack=False)
        self._granted = prefetch
        self._before = self._slots.in_work() if prefetch < self._prefetch else set()
        self._consuming_since = monotonic()
        extra = {
            "event": "consuming",
            "session": self._session.number,
            "queue": self._names.queue,
            "prefetch": prefetch,
        }
        logger.info("consuming from %s", self._names.queue, extra=extra)

    def _on_message(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        """Take one delivery. Called by pika; must not raise, since pika would leave further ones undispatched."""
        self._unsettled.add(method.delivery_tag)
        self._slots.submit(
            Delivery(
                session=self._session,
                tag=method.delivery_tag,
                redelivered=method.redelivered,
                body=body,
                properties=properties,
                headers=properties.headers or _NO_HEADERS,
                arrived_at=monotonic(),
            )
        )

    # -- settling -----------------------------------------------------------------------------------------------------

    def _settle_ready(self) -> None:
        # before the look: what is handed in after it wakes us again
        self._is_woken = False
        if not self._settlements:
            return
        settled: list[tuple[Settlement, str]] = []
        try:
            while self._settlements:
                # a slot raises its hold before it hands in: settled before the cancel, its message comes straight back
                self._follow_holds()
                if isinstance(self._settlements[0].disposition, Reject):
                    self._topology.ensure_dead_letter(self._connection, now=monotonic())
                settlement = self._settlements.popleft()
                settled.append((settlement, self.settle(settlement)))
            # first the acks, then the lines about them: the next delivery comes sooner by what the formatting takes
            send_now(self._connection)
        finally:
            for settlement, disposition in settled:
                _log_settlement(settlement, disposition)

    def settle(self, settlement: Settlement) -> str:
        """Carry one disposition out on the channel: the only caller of ack and nack. Returns what was done.

        Runs on the listener thread. A settlement of another session, and a second one, do nothing and are counted.

        Source: laws 2 and 3
        """
        delivery, disposition = settlement.delivery, settlement.disposition
        if delivery.session is not self._session or self._session.ended or delivery.tag not in self._unsettled:
            self.stale_settlements_total += 1
            return "stale"
        self._unsettled.discard(delivery.tag)
        self._failures = 0
        match disposition:
            case Ack():
                self._settling.basic_ack(delivery.tag)
            case Republish() | Reject() if settlement.copy_confirmed:
                self._settling.basic_ack(delivery.tag)
            case Reject() if settlement.copy_refused or not delivery.session.rejects_by_copy:
                self._settling.basic_nack(delivery.tag, requeue=False)
            case Requeue() | Republish() | Reject():
                # without its copy a message must stay: a nack might drop it from a queue that is not ours
                self._settling.basic_nack(delivery.tag, requeue=True)
            case _ as unreachable:
                assert_never(unreachable)
        return NAMES[type(disposition)]

    # -- the queue's depth --------------------------------------------------------------------------------------------

    def _measure_depth(self) -> None:
        if not self._depth_wanted:
            return
        self._depth_wanted = False
        queue = self._look_at(self._names.queue)
        dead = self._look_at(self._names.dlq)
        self._depth = QueueDepth(
            depth=queue.message_count if queue else None,
            consumers=queue.consumer_count if queue else None,
            dead_letter_depth=dead.message_count if dead else None,
        )
        self._depth_ready.set()

    def _look_at(self, queue: str) -> Any:
        """Declare passively on a channel of its own, which a missing queue closes (field report R21)."""
        if self._depth_channel is None or not self._depth_channel.is_open:
            self._depth_channel = self._connection.channel()
        try:
            return self._depth_channel.queue_declare(queue, passive=True).method
        except pika.exceptions.ChannelClosedByBroker:
            return None


def _do_nothing() -> None:
    """Wake `process_data_events`, which returns when a callback has run."""


_EXPONENTIAL = tenacity.wait_exponential(multiplier=1, max=_BACKOFF_MAX_S)
_RETRYING = tenacity.Retrying(wait=_EXPONENTIAL)


def _backoff_s(failures: int) -> float:
    """1, 2, 4, 8, 16, 30, 30 ... seconds, less up to 20 % so that a fleet does not come back in step."""
    state = tenacity.RetryCallState(_RETRYING, None, (), {})
    state.attempt_number = failures + 1
    return _EXPONENTIAL(state) * (1 - random.uniform(0, _JITTER))


def _log_settlement(settlement: Settlement, disposition: str) -> None:
    """Write the one line of a message."""
    delivery = settlement.delivery
    if not logger.isEnabledFor(logging.INFO):
        return
    fields = {
        "event": "request_settled",
        "session": delivery.session.number,
        "retry_count": delivery.retry_count,
        "disposition": disposition,
        "reason": settlement.disposition.reason,
        "elapsed_s": round(monotonic() - delivery.arrived_at, 4),
        **settlement.log_fields,
    }
    logger.info("%s: %s", disposition, settlement.disposition.reason, extra=fields)
