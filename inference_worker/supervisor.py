"""Starting, watching and stopping the service threads, in order.

Main thread. Knows threads and signals; no adapter, no library. It also ends calls that ran out of time.
Source: design sections 2 and 9.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Protocol

from inference_worker.deadlines import Bounded, Deadlines
from inference_worker.holds import HoldName, Holds

logger = logging.getLogger(__name__)

#: how often calls out of time are looked for, and how late a signal is seen at the most
_WATCH_S = 0.1
#: one more second for a broker that does not answer, once a stop was asked (law 5)
_BROKER_CALL_LIMIT_WHEN_STOPPING_S = 1.0
#: what was cut off has this long to be given back
_CUT_OFF_LIMIT_S = 5.0
#: the last flush bounds itself to 3 s; a little more, or what it says of lost usage would be cut off
_LAST_FLUSH_S = 3.5
#: a listener without a session may be inside a connect that nothing can interrupt; it owns nothing then
_LISTENER_CLOSE_S = 1.5
#: a thread whose turn takes so long is stuck; the longest is a stalled broker call of 30 s
_STUCK_AFTER_S = 90.0


class ExitCode(IntEnum):
    """What the process ends with (design section 9)."""

    #: asked to stop, also when calls had to be cut off
    STOPPED = 0
    #: a service thread died: a bug
    SERVICE_DIED = 70
    #: what was cut off could not be given back in time; the broker does that when the connection is gone
    NOT_SETTLED = 75
    #: bad configuration
    BAD_CONFIG = 78


class Service(Protocol):
    """One service thread. `tick` does one turn and returns the seconds to wait; `wakeup` ends the wait."""

    name: str
    wakeup: threading.Event

    def tick(self, now: float) -> float: ...
    def close(self) -> None: ...


class Listener(Service, Protocol):
    """The listener as the supervisor sees it."""

    def drain(self) -> None: ...
    @property
    def is_settled(self) -> bool: ...


class Reporter(Service, Protocol):
    """The metrics reporter as the supervisor sees it. Its `close` sends what is left."""

    def drain(self) -> None: ...


class SlotPool(Protocol):
    """The slots as the supervisor sees them."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    @property
    def in_work_count(self) -> int: ...
    @property
    def are_alive(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What is supervised."""

    listener: Listener
    health: Service
    reporter: Reporter
    slots: SlotPool


class _ServiceThread:
    """Runs one service's turns until told to stop, then closes it. A dead one is noticed by the supervisor."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stop = threading.Event()
        #: monotonic; later than this without a new turn it is stuck. An hour between two probes is no standstill
        self.stuck_at = monotonic() + _STUCK_AFTER_S
        self._failed = False
        self.thread = threading.Thread(target=self._run, name=service.name, daemon=True)

    @property
    def has_died(self) -> bool:
        """Whether it ended without having been told to, by whatever exception."""
        return self._failed or (
            self.thread.ident is not None and not self.thread.is_alive() and not self._stop.is_set()
        )

    def ask_to_stop(self) -> None:
        self._stop.set()
        self._service.wakeup.set()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                now = monotonic()
                self.stuck_at = now + _STUCK_AFTER_S
                wait_s = self._service.tick(now)
                if wait_s > 0:
                    self.stuck_at = monotonic() + wait_s + _STUCK_AFTER_S
                    self._service.wakeup.wait(wait_s)
                self._service.wakeup.clear()
            self._service.close()
        except Exception:
            # nothing looks alive while it does nothing (law 6): the supervisor ends the process
            self._failed = True
            extra = {"event": "service_died", "service": self._service.name}
            logger.critical("%s died, a bug; the process ends", self._service.name, exc_info=True, extra=extra)


class Supervisor:
    """Owns the threads of the process. `run` on the main thread, once."""

    def __init__(
        self,
        parts: Parts,
        *,
        signals: SimpleQueue[int],
        holds: Holds,
        deadlines: Deadlines,
        cut_off: Callable[[], None],
        grace_s: float,
        helpers: Mapping[str, Callable[[], bool]] | None = None,
        cut_off_limit_s: float = _CUT_OFF_LIMIT_S,
    ) -> None:
        self._parts = parts
        self._signals = signals
        self._holds = holds
        self._deadlines = deadlines
        self._cut_off = cut_off
        self._grace_s = grace_s
        #: whether each thread lives that is neither a service's nor a slot
        self._helpers = helpers or {}
        self._cut_off_limit_s = cut_off_limit_s
        self._listener = _ServiceThread(parts.listener)
        self._health = _ServiceThread(parts.health)
        self._reporter = _ServiceThread(parts.reporter)
        self._services = (self._reporter, self._health, self._listener)

    def run(self) -> ExitCode:
        """Run until a signal or the death of a thread; return the exit code."""
        self._parts.slots.start()
        for service in self._services:
            service.thread.start()
        while (signal_number := self._watch()) is None:
            if self._has_died:
                self._report_deaths()
                self._stop(grace_s=0.0)
                return ExitCode.SERVICE_DIED
        extra = {"event": "draining", "in_work": self._parts.slots.in_work_count, "grace_s": self._grace_s}
        logger.info("%s: draining", signal.Signals(signal_number).name, extra=extra)
        is_settled = self._stop(grace_s=self._grace_s)
        if self._has_died:
            return ExitCode.SERVICE_DIED
        return ExitCode.STOPPED if is_settled else ExitCode.NOT_SETTLED

    def is_alive(self) -> bool:
        """Whether every thread lives and ticks. Safe from any thread."""
        now = monotonic()
        return self._parts.slots.are_alive and all(
            service.thread.is_alive() and now < service.stuck_at for service in self._services
        )

    @property
    def _has_died(self) -> bool:
        return any(service.has_died for service in self._services) or bool(self._dead_threads())

    def _dead_threads(self) -> list[str]:
        dead = [name for name, is_alive in self._helpers.items() if not is_alive()]
        return dead if self._parts.slots.are_alive else [*dead, "slot"]

    def _report_deaths(self) -> None:
        """Name what died without a word of its own; a service has logged its traceback."""
        for name in self._dead_threads():
            extra = {"event": "service_died", "service": name}
            logger.critical("a thread died, a bug; the process ends: %s", name, extra=extra)

    def _watch(self) -> int | None:
        """Wait a moment for a signal, and end what ran out of time."""
        self._deadlines.cut_overdue(monotonic())
        try:
            return self._signals.get(timeout=_WATCH_S)
        except Empty:
            return None

    def _stop(self, *, grace_s: float) -> bool:
        """Drain, cut off what outlasts the grace, close everything; True when nothing was left unsettled."""
        self._holds.raise_hold(HoldName.DRAINING, "stop was asked for", level=logging.INFO)
        for kind in (Bounded.BROKER_CALL, Bounded.COPY):
            self._deadlines.shorten(kind, _BROKER_CALL_LIMIT_WHEN_STOPPING_S)
        self._parts.listener.drain()
        self._parts.reporter.drain()
        is_settled = self._drain(grace_s)
        if not is_settled:
            in_work = self._parts.slots.in_work_count
            extra = {"event": "cutting_off", "in_work": in_work}
            logger.warning("cutting %d requests off; they go back to the queue", in_work, extra=extra)
            self._cut_off()
            self._deadlines.end(Bounded.MODEL_CALL)
            self._deadlines.end(Bounded.COPY)
            is_settled = self._wait(lambda: self._is_idle, self._cut_off_limit_s)
        self._parts.slots.stop()
        self._end(self._listener, _LISTENER_CLOSE_S)
        self._end(self._health, _WATCH_S)
        self._end(self._reporter, _LAST_FLUSH_S)
        logger.info("stopped", extra={"event": "stopped", "settled": is_settled})
        return is_settled

    @property
    def _is_idle(self) -> bool:
        listener_is_done = self._listener.has_died or self._parts.listener.is_settled
        return self._parts.slots.in_work_count == 0 and listener_is_done

    def _drain(self, grace_s: float) -> bool:
        """Wait for what is in work; a second signal ends the waiting."""
        ends_at = monotonic() + grace_s
        while not self._is_idle:
            if monotonic() >= ends_at or self._has_died:
                return False
            if self._watch() is not None:
                logger.warning("a second signal: not waiting any longer", extra={"event": "second_signal"})
                return False
        return True

    def _wait(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        ends_at = monotonic() + limit_s
        while not is_done():
            if monotonic() >= ends_at:
                return False
            self._watch()
        return True

    def _end(self, service: _ServiceThread, limit_s: float) -> None:
        service.ask_to_stop()
        ends_at = monotonic() + limit_s
        while service.thread.is_alive() and monotonic() < ends_at:
            service.thread.join(_WATCH_S)
            self._deadlines.cut_overdue(monotonic())
