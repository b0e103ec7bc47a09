"""Is the model there, can a result be kept: probes, and the holds that follow from them.

`tick` runs on the thread `health-checker`; the reports come from slot threads. Knows no library: the probes are handed
in. Sources: specification ("Health Checker"), design section 7.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, time
from typing import assert_never

from inference_worker.documents import HealthSnapshot
from inference_worker.errors import HttpError, StoreDown, StoreLoginRefused
from inference_worker.growing_pause import GrowingPause
from inference_worker.holds import HoldName, Holds
from inference_worker.model_client import ModelReply, Sign
from inference_worker.stall_watch import StallWatch

logger = logging.getLogger(__name__)

_HEALTHY = 200
#: a model that says it is going away may answer one more probe
_LEAVING_S = 1.0
_BUSY_MAX_S = 60.0
_STORE_PAUSE_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """What the checker has to know of the configuration."""

    interval_s: float
    #: the first pause while Redis is down
    store_retry_delay_s: float
    #: bad probes in a row that stop the consuming, and good ones in a row that let it begin again
    failure_threshold: int = 1
    success_threshold: int = 1
    #: 0: off
    stall_timeout_s: float = 0.0


class HealthChecker:
    """Owns the last health snapshot, and all holds but `draining` and `publish_refused`."""

    name = "health-checker"

    def __init__(
        self,
        settings: HealthSettings,
        *,
        holds: Holds,
        probe_model: Callable[[], int],
        probe_store: Callable[[], None],
        count_tokens: Callable[[], float | None] = lambda: None,
        count_in_work: Callable[[], int] = lambda: 0,
    ) -> None:
        self._settings = settings
        self._holds = holds
        #: GET /health: the status code, or an HttpError
        self._probe_model = probe_model
        #: one small write, or a StoreDown
        self._probe_store = probe_store
        #: tokens read and made since the model began, or None
        self._count_tokens = count_tokens
        self._count_in_work = count_in_work
        self._stall_watch = StallWatch(settings.stall_timeout_s)
        #: seconds, while the model stands still; for people, and None otherwise
        self._stalled_s: float | None = None
        #: probes of one kind in a row: bad ones are negative
        self._row = 0
        self.wakeup = threading.Event()
        self._lock = threading.Lock()
        self._snapshot = HealthSnapshot(False, time(), "not probed yet")
        self._next_probe_at = float("-inf")
        #: monotonic, when the model was last reported: an answer to a probe begun before it proves nothing
        self._reported_at = float("-inf")
        #: a hold is not lifted before, whatever the probe says
        self._unhealthy_until = float("-inf")
        #: after calls that failed although the probe before them was good: none, 1, 2, 4 ... s, or a refusing port
        #: would burn a whole queue's retries
        self._deceived = GrowingPause(1.0, max_s=settings.interval_s, free_count=1)
        self._busy = GrowingPause(1.0, max_s=_BUSY_MAX_S)
        self._store_pause = GrowingPause(settings.store_retry_delay_s, max_s=_STORE_PAUSE_MAX_S)
        self._next_store_probe_at = float("-inf")
        self._login_refusal_said = False
        # nothing is consumed before the first good probe and the first good write: a model that loads for ten minutes
        # must cost no message its retries, and no answer is computed that cannot be kept
        holds.raise_hold(HoldName.MODEL_UNHEALTHY, "not probed yet", level=logging.INFO)
        holds.raise_hold(HoldName.RESULT_STORE_DOWN, "not written to yet", level=logging.INFO)

    @property
    def snapshot(self) -> HealthSnapshot:
        return self._snapshot

    # -- one turn -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Make the probes that are due. Returns the seconds to wait before the next."""
        if self._holds.is_raised(HoldName.RESULT_STORE_DOWN) and now >= self._next_store_probe_at:
            self._check_store()
        if now >= self._next_probe_at:
            self._look_for_stall(now)
            self.check_model()
        next_expiry_s = self._holds.expire(monotonic())
        due_at = self._next_probe_at
        if self._holds.is_raised(HoldName.RESULT_STORE_DOWN):
            due_at = min(due_at, self._next_store_probe_at)
        wait_s = max(0.0, due_at - monotonic())
        return wait_s if next_expiry_s is None else min(wait_s, next_expiry_s)

    def close(self) -> None:
        """Nothing is kept open here."""

    def check_model(self) -> None:
        """Probe the model now and let the holds follow."""
        began_at = monotonic()
        with self._lock:
            self._next_probe_at = began_at + self._settings.interval_s
        is_healthy, detail = self._probe()
        if is_healthy and self._stalled_s is not None:
            is_healthy, detail = False, f"requests are in work, and no token was made for {self._stalled_s:.0f} s"
        with self._lock:
            self._snapshot = HealthSnapshot(is_healthy, time(), detail)
            self._row = max(self._row, 0) + 1 if is_healthy else min(self._row, 0) - 1
            if not is_healthy:
                if self._row <= -self._settings.failure_threshold:
                    self._holds.raise_hold(HoldName.MODEL_UNHEALTHY, detail)
                    self._holds.lift(HoldName.MODEL_SUSPECT)
            elif self._reported_at > began_at:
                # a call failed after this probe began: its answer proves nothing any more
                self._next_probe_at = float("-inf")
            elif self._row >= self._settings.success_threshold:
                self._lift_model_holds()

    def _lift_model_holds(self) -> None:
        self._holds.lift(HoldName.MODEL_SUSPECT)
        if monotonic() < self._unhealthy_until:
            self._next_probe_at = self._unhealthy_until
        else:
            self._holds.lift(HoldName.MODEL_UNHEALTHY)

    def _probe(self) -> tuple[bool, str]:
        try:
            status = self._probe_model()
        except HttpError as err:
            return False, f"GET /health: {err}"
        return status == _HEALTHY, f"GET /health answered {status}"

    def confirm_model(self) -> bool:
        """Probe the model before a retry is spent on it. A bad answer stops the consuming until the next probe.

        Runs on a slot thread. It counts for no threshold: retries that come in a row would use one up in milliseconds.
        """
        is_healthy, detail = self._probe()
        if not is_healthy:
            with self._lock:
                self._holds.raise_hold(HoldName.MODEL_SUSPECT, detail)
                self._ask_for_probe()
        return is_healthy

    def _look_for_stall(self, now: float) -> None:
        if self._settings.stall_timeout_s > 0:
            in_work_count = self._count_in_work()
            tokens = self._count_tokens() if in_work_count else None
            self._stalled_s = self._stall_watch.observe(now, in_work_count=in_work_count, tokens=tokens)

    def _check_store(self) -> None:
        try:
            self._probe_store()
        except StoreDown as err:
            self._next_store_probe_at = monotonic() + self._settings.store_retry_delay_s
            self._say_store_down(err)
        else:
            self._login_refusal_said = False
            self._holds.lift(HoldName.RESULT_STORE_DOWN)

    # -- reports, from slot threads -----------------------------------------------------------------------------------

    def report(self, reply: ModelReply) -> None:
        """Take a call's sign of the model's health; a bad one stops the consuming at once."""
        match reply.sign:
            case Sign.WELL:
                self._deceived.reset()
                self._busy.reset()
            case Sign.UNREACHABLE:
                self._raise_unhealthy(reply.detail, least_s=0.0)
            case Sign.LEAVING:
                self._raise_unhealthy(reply.detail, least_s=_LEAVING_S)
            case Sign.SUSPECT:
                with self._lock:
                    self._holds.raise_hold(HoldName.MODEL_SUSPECT, reply.detail)
                    self._ask_for_probe()
            case Sign.BUSY:
                self._raise_busy(reply)
            case Sign.NONE:
                pass
            case _ as unreachable:
                assert_never(unreachable)

    def _raise_unhealthy(self, detail: str, *, least_s: float) -> None:
        with self._lock:
            pause_s = least_s
            if not self._holds.is_raised(HoldName.MODEL_UNHEALTHY):
                # the probe had said healthy
                pause_s = max(least_s, self._deceived.next_s())
            self._unhealthy_until = max(self._unhealthy_until, monotonic() + pause_s)
            self._holds.raise_hold(HoldName.MODEL_UNHEALTHY, detail)
            self._ask_for_probe()

    def _ask_for_probe(self) -> None:
        self._reported_at = monotonic()
        self._next_probe_at = float("-inf")
        self.wakeup.set()

    def _raise_busy(self, reply: ModelReply) -> None:
        with self._lock:
            # what was sent before the hold comes back busy as well: a burst of 16 would hold for a minute
            growing_s = 0.0 if self._holds.is_raised(HoldName.MODEL_BUSY) else self._busy.next_s()
        # a Retry-After of 0 is no busy loop
        pause_s = min(max(reply.retry_after_s or 0.0, growing_s), _BUSY_MAX_S)
        self._holds.raise_hold(HoldName.MODEL_BUSY, reply.detail, for_s=pause_s, never_shorter=True)
        self.wakeup.set()

    def report_store_down(self, err: StoreDown) -> None:
        """Stop consuming until a small write succeeds; the pause doubles while saves fail all the same."""
        with self._lock:
            if not self._holds.is_raised(HoldName.RESULT_STORE_DOWN):
                self._next_store_probe_at = monotonic() + self._store_pause.next_s()
            self._say_store_down(err)
        self.wakeup.set()

    def report_saved(self) -> None:
        """A result was written: the next outage begins with the short pause again."""
        self._store_pause.reset()

    def _say_store_down(self, err: StoreDown) -> None:
        self._holds.raise_hold(HoldName.RESULT_STORE_DOWN, str(err))
        if isinstance(err, StoreLoginRefused) and not self._login_refusal_said:
            self._login_refusal_said = True
            logger.error("%s", err, extra={"event": "store_login_refused"})
