"""The named reasons for not consuming; consuming means that there is none.

Safe from any thread. One lock guards the set, and the set owns the suspend `Event` of the design card: raising the
first hold sets it, lifting the last one clears it, and nobody else does (law: "not consuming is a set of named holds").
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic, time

logger = logging.getLogger(__name__)


class HoldName(StrEnum):
    """Why a worker does not consume (design section 1)."""

    #: the last probe failed, or a call could not reach the model
    MODEL_UNHEALTHY = "model_unhealthy"
    #: a 5xx or a timeout: a probe has been asked for and has not answered yet
    MODEL_SUSPECT = "model_suspect"
    #: a status in MODEL_RETRY_STATUS_CODES: the model asked for a pause
    MODEL_BUSY = "model_busy"
    #: Redis cannot be written
    RESULT_STORE_DOWN = "result_store_down"
    #: the broker did not confirm a copy
    PUBLISH_REFUSED = "publish_refused"
    #: a stop was asked for
    DRAINING = "draining"


class ListenerState(StrEnum):
    """What the listener does (`state` of /readyz)."""

    CONNECTING = "connecting"
    CONSUMING = "consuming"
    HELD = "held"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class RaisedHold:
    """One hold as `/readyz` shows it."""

    name: HoldName
    #: unix seconds
    since: float
    #: monotonic, the same moment
    raised_at: float
    detail: str
    #: monotonic; not lifted before, and lifted then by `expire` when the hold is only a pause
    until: float | None = None


class Holds:
    """The set of holds and the suspend `Event`. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._raised: dict[HoldName, RaisedHold] = {}
        self.suspended = threading.Event()
        self._watchers: tuple[Callable[[], None], ...] = ()

    def watch(self, *watchers: Callable[[], None]) -> None:
        """Have these called, on whatever thread, when a hold is raised or lifted, or ends at another time than before.

        Once, before the threads start.
        """
        self._watchers = watchers

    def raise_hold(
        self,
        name: HoldName,
        detail: str,
        *,
        for_s: float | None = None,
        never_shorter: bool = False,
        level: int = logging.WARNING,
    ) -> None:
        """Stop consuming for this reason.

        With `for_s` the hold ends by itself after so many seconds (see `expire`); raised again, the new time counts, or
        with `never_shorter` the longer one.
        """
        with self._lock:
            before = self._raised.get(name)
            now = monotonic()
            until = None if for_s is None else now + for_s
            if never_shorter and until is not None and before is not None and before.until is not None:
                until = max(until, before.until)
            since, raised_at = (before.since, before.raised_at) if before else (time(), now)
            self._raised[name] = RaisedHold(name, since, raised_at, detail, until)
            self.suspended.set()
        if before is None or before.detail != detail:
            extra = {"event": "hold_raised", "hold": name.value, "detail": detail}
            logger.log(level, "not consuming: %s (%s)", name, detail, extra=extra)
        if before is None or before.until != until:
            self._tell()

    def lift(self, name: HoldName) -> None:
        """End this reason; consuming goes on when it was the last one."""
        self._lift(name, lambda _: True)

    def _lift(self, name: HoldName, is_over: Callable[[RaisedHold], bool]) -> None:
        with self._lock:
            lifted = self._raised.get(name)
            if lifted is None or not is_over(lifted):
                return
            del self._raised[name]
            if not self._raised:
                self.suspended.clear()
        held_s = round(monotonic() - lifted.raised_at, 1)
        extra = {"event": "hold_lifted", "hold": name.value, "held_s": held_s}
        logger.info("%s is over after %.1f s", name, held_s, extra=extra)
        self._tell()

    def _tell(self) -> None:
        for watcher in self._watchers:
            watcher()

    def expire(self, now: float) -> float | None:
        """Lift the holds whose time is over; return the seconds until the next one is, or None.

        Called by the health thread.
        """
        with self._lock:
            timed = [(hold.name, hold.until) for hold in self._raised.values() if hold.until is not None]
        for name, until in timed:
            if until <= now:
                # looked at again under the lock: raised anew meanwhile, it is not over
                self._lift(name, lambda hold: hold.until is not None and hold.until <= now)
        return min((until - now for _, until in timed if until > now), default=None)

    def is_raised(self, name: HoldName) -> bool:
        return name in self._raised

    def snapshot(self) -> list[RaisedHold]:
        """List the holds, the oldest first."""
        with self._lock:
            return sorted(self._raised.values(), key=lambda hold: hold.raised_at)
