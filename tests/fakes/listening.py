"""A listener on a fake broker with real slots, driven turn by turn on the thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from inference_worker.amqp_topology import TopologyNames
from inference_worker.deadlines import Deadlines
from inference_worker.delivery import Delivery, Settlement
from inference_worker.disposition import Ack, Disposition
from inference_worker.holds import Holds
from inference_worker.rmq_listener import RmqListener
from inference_worker.slots import Slots
from tests.fakes.amqp import FakeBroker, FakeChannel, FakeConnection
from tests.timeouts import LONG_TIMEOUT_S

NAMES = TopologyNames("infer_req.d-1", "", "infer.dlx", "infer.dlq", "dead")
#: longer than any backoff: a turn "then" may connect again
LATER_S = 100.0


class ListenerBench:
    """Slots begin what they are given and end it when `may_end` is set; the test hands the settlements in."""

    def __init__(
        self, *, prefetch: int = 2, slot_count: int | None = None, work: Callable[[Delivery], None] | None = None
    ) -> None:
        self.broker = FakeBroker()
        self.holds = Holds()
        self.deadlines = Deadlines()
        self.begun: list[Delivery] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self._begun_changed = threading.Condition()
        self.slots = Slots(slot_count or prefetch, work or self._work)
        self.slots.start()
        self.listener = RmqListener(
            NAMES,
            connect=lambda: self.broker.connect("consumer"),
            prefetch=prefetch,
            holds=self.holds,
            slots=self.slots,
            deadlines=self.deadlines,
        )
        self.holds.watch(self.listener.wake)

    def _work(self, delivery: Delivery) -> None:
        with self._begun_changed:
            self.begun.append(delivery)
            self._begun_changed.notify_all()
        assert self.may_end.wait(LONG_TIMEOUT_S)

    @property
    def connection(self) -> FakeConnection:
        """The consumer's connection, the newest one."""
        return next(each for each in reversed(self.broker.connections) if each.purpose == "consumer")

    @property
    def channel(self) -> FakeChannel:
        channel: Any = self.listener._channel
        return channel

    def turn(self, *, later_s: float = 0.0) -> float:
        """One turn that does not wait for half a second when nothing happens."""
        self.listener.wake()
        return self.listener.tick(monotonic() + later_s)

    def turn_until(self, condition: Callable[[], Any], *, later_s: float = LATER_S) -> None:
        ends_at = monotonic() + LONG_TIMEOUT_S
        while not condition():
            assert monotonic() < ends_at, "not in time"
            self.turn(later_s=later_s)

    def consume(self) -> None:
        """Connect and begin to consume."""
        self.turn_until(lambda: self.consumer_count == 1)

    @property
    def consumer_count(self) -> int:
        return self.broker.consumer_count(NAMES.queue) if self.broker.has_queue(NAMES.queue) else 0

    def publish(self, *bodies: bytes) -> None:
        for body in bodies:
            self.broker.publish(NAMES.queue, body)

    def take(self, count: int) -> list[Delivery]:
        """Turn until slots have begun so many deliveries in all."""
        self.turn_until(lambda: len(self.begun) >= count)
        return self.begun

    def settle(self, delivery: Delivery, disposition: Disposition, *, copy_confirmed: bool = False) -> None:
        """Hand a settlement in, as a slot does, and let the listener carry it out."""
        self.listener.hand_in(Settlement(delivery, disposition, copy_confirmed))
        self.turn()

    def done(self, delivery: Delivery) -> None:
        self.settle(delivery, Ack("completed"))

    def ready(self) -> list[bytes]:
        return [message.body for message in self.broker.ready(NAMES.queue)]

    def unacked(self) -> list[bytes]:
        return [message.body for message in self.broker.unacked(NAMES.queue)]

    def dead(self) -> list[bytes]:
        return [message.body for message in self.broker.ready(NAMES.dlq)]

    def calls(self, *methods: str) -> list[tuple[Any, ...]]:
        """The calls of these methods on the consumer's connections: method and arguments."""
        return [(call.method, *call.arguments) for call in self.broker.methods(*methods, purpose="consumer")]

    def close(self) -> None:
        self.may_end.set()
        self.slots.stop()
        for thread in self.slots._threads:
            thread.join(LONG_TIMEOUT_S)
        self.broker.close()
