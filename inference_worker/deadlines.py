"""Bounds on calls that have none: a register of what is running, until when it may, and how to end it.

Safe from any thread; the supervisor's loop calls `cut_overdue` several times a second. Two libraries need it: the
timeout of requests is per read, so a trickling answer would never end, and pika waits without a bound on a stalled
link (law 5). Cutting means shutting a socket down, which wakes its reader; `close()` would not. A call that has a name
can be cancelled by it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic


class Bounded(StrEnum):
    """What kind of call runs; a stop shortens or ends one kind at a time."""

    #: a request on its way through the model
    MODEL_CALL = "model_call"
    #: a probe, a scrape, a request to a sink
    SIDE_CALL = "side_call"
    #: one turn of the listener
    BROKER_CALL = "broker_call"
    #: one copy being published
    COPY = "copy"


@dataclass(slots=True, eq=False)
class Bound:
    """One call while it runs, as the context of the code that makes it."""

    register: Deadlines
    kind: Bounded
    limit_s: float
    cut: Callable[[], None]
    #: by which it can be cancelled: the request_id of a model call
    name: str | None = None
    #: monotonic
    began_at: float = 0.0
    was_cut: bool = False
    was_cancelled: bool = False

    def __enter__(self) -> Bound:
        self.began_at = monotonic()
        self.register.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.register.remove(self)


class Deadlines:
    """The register. Lives as long as the process; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Bound] = set()
        #: upper limits that came later than the calls: a stop gives the broker one more second
        self._caps_s: dict[Bounded, float] = {}
        self._ended_kinds: set[Bounded] = set()

    def bound(self, kind: Bounded, limit_s: float, cut: Callable[[], None], *, name: str | None = None) -> Bound:
        """Run the body of a `with` for at most `limit_s` seconds; then `cut` is called, once, from another thread.

        `cut` must not wait for anything: it runs under the register's lock.
        """
        return Bound(self, kind, limit_s, cut, name)

    def add(self, bound: Bound) -> None:
        """Begin to watch a call."""
        with self._lock:
            self._running.add(bound)

    def remove(self, bound: Bound) -> None:
        """Stop watching it. Waits while it is being cut, so that the next call on its socket is not cut instead."""
        with self._lock:
            self._running.discard(bound)

    def is_ended(self, kind: Bounded) -> bool:
        """Tell whether calls of this kind were ended for good."""
        return kind in self._ended_kinds

    def shorten(self, kind: Bounded, limit_s: float) -> None:
        """Let no call of this kind last longer than this, those that run already included."""
        with self._lock:
            self._caps_s[kind] = limit_s

    def end(self, kind: Bounded) -> None:
        """Cut off every call of this kind now, and let no later one begin to wait."""
        self._ended_kinds.add(kind)
        self.shorten(kind, 0)
        self.cut_overdue(monotonic())

    def running_names(self) -> set[str]:
        """Return the names of the calls that run now and can be cancelled."""
        with self._lock:
            return {running.name for running in self._running if running.name is not None and not running.was_cut}

    def cancel(self, names: set[str]) -> None:
        """Cut off the calls of these names; each learns by `was_cancelled` that it was not its time that ran out."""
        with self._lock:
            for running in self._running:
                if running.name in names and not running.was_cut:
                    running.was_cut = running.was_cancelled = True
                    running.cut()

    def cut_overdue(self, now: float) -> None:
        """Cut off what has run out of time. Called by the supervisor."""
        with self._lock:
            for running in self._running:
                limit_s = min(running.limit_s, self._caps_s.get(running.kind, running.limit_s))
                if not running.was_cut and now - running.began_at >= limit_s:
                    running.was_cut = True
                    # under the lock, so that the call cannot end meanwhile and the next one on its socket be cut
                    running.cut()
