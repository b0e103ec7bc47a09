"""The pool threads that work on requests, and the deliveries that none of them has begun.

Safe from any thread. A slot works on one delivery at a time and never touches the listener's connection. What no slot
has begun can be taken back, so that it does not starve other workers while this one is suspended (field report R12).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from inference_worker.delivery import Delivery, Session

#: no wait of ours is without an end (law 5); a notify ends it at once
_LOOK_AGAIN_S = 60.0


class Slots:
    """`count` threads, `slot-0` to `slot-(count-1)`. They live as long as the process."""

    def __init__(self, count: int, work: Callable[[Delivery], None]) -> None:
        self._work = work
        self._waiting: deque[Delivery] = deque()
        self._changed = threading.Condition()
        self._in_work: set[Delivery] = set()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"slot-{number}", daemon=True) for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let every slot end after the request that it works on."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def submit(self, delivery: Delivery) -> None:
        """Hand a delivery to the next free slot, in order."""
        with self._changed:
            self._waiting.append(delivery)
            self._changed.notify()

    def take_back(self) -> list[Delivery]:
        """Take every delivery that no slot has begun."""
        with self._changed:
            unbegun = list(self._waiting)
            self._waiting.clear()
            return unbegun

    def forget(self, session: Session) -> None:
        """Drop what came in a session that has ended: the broker delivers it again."""
        with self._changed:
            self._waiting = deque(delivery for delivery in self._waiting if delivery.session is not session)

    @property
    def in_work_count(self) -> int:
        return len(self._in_work)

    def in_work(self) -> set[Delivery]:
        """Return what slots work on now."""
        with self._changed:
            return set(self._in_work)

    def are_in_work(self, deliveries: set[Delivery]) -> bool:
        """Whether any of these is still being worked on."""
        return not self._in_work.isdisjoint(deliveries)

    @property
    def load_count(self) -> int:
        """Deliveries that are here: in work, or waiting for a slot."""
        with self._changed:
            return len(self._in_work) + len(self._waiting)

    @property
    def are_alive(self) -> bool:
        """Whether every slot lives, or was told to end."""
        return self._stopping or all(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (delivery := self._next()) is not None:
            try:
                self._work(delivery)
            finally:
                with self._changed:
                    self._in_work.discard(delivery)

    def _next(self) -> Delivery | None:
        with self._changed:
            while not self._waiting:
                if self._stopping:
                    return None
                self._changed.wait(_LOOK_AGAIN_S)
            delivery = self._waiting.popleft()
            self._in_work.add(delivery)
            return delivery
