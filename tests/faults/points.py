"""The points of a request's way at which a fault can strike, and the traps that are set there.

A trap springs once: at the first request that reaches its point on one of its workers. What it does runs on the thread
of the wire, while the bytes at the point are held.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass


class Point(enum.Enum):
    """Where a request is. Its value is how the report names it."""

    RECEIVED = "after receipt: the model has the request"
    ANSWERED = "answered, before the SET"
    STORED = "between SET and ack"
    ACKING = "the ack is on its way"
    PUBLISHING = "the retry copy is on its way"
    PUBLISHED = "between the retry copy and its confirm"
    CONFIRMED = "between confirm and ack"


#: points that only a request reaches whose call failed
OF_A_RETRY = frozenset({Point.PUBLISHING, Point.PUBLISHED, Point.CONFIRMED})


@dataclass(frozen=True)
class Reached:
    """A request at a point."""

    point: Point
    seat: str
    request_id: str
    at: float


#: does the harm; returns whether what was held may pass
Action = Callable[[Reached], bool]


class Trap:
    """Waits at a point."""

    def __init__(self, point: Point, seats: Collection[str], action: Action) -> None:
        self.point, self.seats, self._action = point, frozenset(seats), action
        self.reached: Reached | None = None
        self._sprung = threading.Event()

    def wait(self, timeout_s: float) -> Reached | None:
        """Return what sprang it once its action has ended; None when nothing has within the time."""
        return self.reached if self._sprung.wait(timeout_s) else None

    def _spring(self, reached: Reached) -> bool:
        try:
            return self._action(reached)
        finally:
            self.reached = reached
            self._sprung.set()


class Traps:
    """The traps that are set. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set: list[Trap] = []

    def set(self, point: Point, seats: Collection[str], action: Action) -> Trap:
        """Set a trap."""
        trap = Trap(point, seats, action)
        with self._lock:
            self._set.append(trap)
        return trap

    def remove(self, trap: Trap) -> None:
        """Take a trap away that has not sprung."""
        with self._lock:
            if trap in self._set:
                self._set.remove(trap)

    def pass_by(self, point: Point, seat: str, request_id: str) -> bool:
        """Tell that a request is at a point; returns whether it may pass."""
        with self._lock:
            trap = next((each for each in self._set if each.point is point and seat in each.seats), None)
            if trap is None:
                return True
            self._set.remove(trap)
        return trap._spring(Reached(point, seat, request_id, time.time()))
