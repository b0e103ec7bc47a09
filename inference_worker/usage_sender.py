"""Usage events to Croesus, until it has accepted them: rounds, what a status means, and what is set aside.

Owned by the thread of the reporter; a round runs on a helper thread of its own. No library is known here: HTTP is
handed in, events are bytes from `usage_events`.
Sources: design section 10 ("Usage is money"); field reports R70-R74.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Protocol

from inference_worker.documents import UsageEvent
from inference_worker.errors import HttpError
from inference_worker.helper_thread import HelperThread
from inference_worker.http_request import Body
from inference_worker.metrics_buffer import MetricsBuffer
from inference_worker.trouble import Trouble
from inference_worker.usage_events import encode_batch, encode_event

logger = logging.getLogger(__name__)

#: so many refusals one after the other are no fault of the events: the round ends
_REFUSALS_PER_ROUND = 10
#: the longest pause between two events of a round that has time: 100 events still go within half a second
_MAX_PAUSE_S = 0.002
#: a failing Croesus is logged again at every tenth failure in a row
_REPEATS = 10


class HttpAnswer(Protocol):
    """A whole answer."""

    @property
    def status_code(self) -> int: ...

    @property
    def body(self) -> bytes: ...


class HttpExchange(Protocol):
    """One bounded exchange. Called from several threads at once."""

    def exchange(
        self, method: str, url: str, *, headers: Mapping[str, str], body: Body | None, timeout_s: float
    ) -> HttpAnswer:
        """Send one request and read the whole answer; redirects are not followed.

        Units:   timeout_s seconds, over the whole exchange
        Raises:  HttpError; its text names no URL, since it is logged
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSettings:
    """The part of the configuration that the billing needs."""

    #: the full URL, path included
    events_url: str
    #: "" = none is sent
    events_token: str = field(default="", repr=False)
    #: the bound on one exchange
    http_timeout_s: float
    #: 1 = one event a request, structured; more = batched
    batch_size: int


class Verdict(StrEnum):
    """What a status of Croesus means for the events that were offered."""

    #: it has them
    ACCEPTED = "accepted"
    #: it will not take these, whenever they come; others it may
    REFUSED = "refused"
    #: it takes nothing now
    UNAVAILABLE = "unavailable"


def classify_croesus_status(status_code: int, *, event_count: int = 1) -> Verdict:
    """Tell a fault of the events from one of Croesus, of the way there, or of our login."""
    # 409 for one event: it has it already, and says so more loudly than it has to; of a batch each is offered alone
    if 200 <= status_code < 300 or (status_code == 409 and event_count == 1):
        return Verdict.ACCEPTED
    if status_code in (400, 409, 413, 422):
        return Verdict.REFUSED
    return Verdict.UNAVAILABLE


class UsageSender:
    """Sends what the buffer holds of usage events, one round at a time. Owned by the reporter's thread."""

    def __init__(
        self,
        settings: UsageSettings,
        *,
        buffer: MetricsBuffer,
        http: HttpExchange,
        monotonic: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        self._settings = settings
        self._buffer = buffer
        self._http = http
        self._monotonic = monotonic
        self._wait = wait
        self._helper = HelperThread("croesus")
        self._trouble = Trouble("usage_flush", neighbour="Croesus", repeats=_REPEATS)
        self._round: Future[None] | None = None
        #: monotonic; the round on the helper thread reads it before each request, the last flush brings it forward
        self._ends_at = 0.0
        #: set while rounds have no time to rest, at the end of the process; a rest ends with it
        self._is_hurried = threading.Event()
        #: request_id of what is set aside → how often Croesus refused it or failed on it. These go after all others,
        #: alone, and the least often tried first: whatever is wrong with some, each of the others has its turn
        self._tries: dict[str, int] = {}
        #: request_ids whose refusal has been logged
        self._refused: set[str] = set()

    @property
    def failures_total(self) -> int:
        """Failed rounds since the start. Safe from any thread."""
        return self._trouble.failures_total

    def close(self) -> None:
        """Let the helper thread end after its call; does not wait for it."""
        self._helper.close()

    def begin(self, ends_at: float, *, is_paced: bool = False) -> bool:
        """Start a round on the helper thread; False when the one before still runs, or nothing waits.

        A paced round leaves the interpreter to the requests between two events, for as long as its time allows it; one
        that runs is hurried by a call that is not.

        Units:   ends_at in seconds of the monotonic clock, for a round that runs as well
        """
        if is_paced:
            self._is_hurried.clear()
        else:
            self._is_hurried.set()
        if self._round is not None and not self._round.done():
            self._ends_at = min(self._ends_at, ends_at)
            return False
        if self._round is not None:
            # neighbours' failures are dealt with in the round; what comes out of it is a bug, and ends this thread
            self._round.result(0)
        if not self._buffer.usage_depth:
            return False
        self._ends_at = ends_at
        self._round = self._helper.begin(self._send)
        return True

    def finish(self, ends_at: float, *, is_begun: bool) -> None:
        """Wait for the round; after one that had begun earlier, another takes what came since."""
        self._await_round(ends_at)
        if not is_begun and self.begin(ends_at):
            self._await_round(ends_at)
        if lost_count := self._buffer.usage_depth:
            logger.error(
                "%d usage events were not accepted by Croesus, and are lost with this process",
                lost_count,
                extra={"event": "usage_lost", "usage_events": lost_count},
            )

    def _await_round(self, ends_at: float) -> None:
        if self._round is not None:
            with suppress(TimeoutError):
                self._round.result(max(0.0, ends_at - self._monotonic()))

    def _send(self) -> None:
        """Offer what waits, oldest first, until Croesus is unavailable or the time is up; the rest waits on.

        Runs on the helper thread, one round at a time.
        """
        refusals = 0
        refused_batches: list[UsageEvent] = []
        began_at: float | None = None
        # the second is looked at when the first is through, and has then what the first has left to it
        for group in chain(self._groups(), ([event] for event in refused_batches)):
            if began_at is not None and not self._is_hurried.is_set():
                self._pause(began_at)
            began_at = self._monotonic()
            left_s = self._ends_at - began_at
            if left_s <= 0:
                return
            match self._offer(group, min(left_s, self._settings.http_timeout_s)):
                case Verdict.ACCEPTED:
                    refusals = 0
                    self._buffer.drop_usage(group)
                case Verdict.REFUSED:
                    refusals += 1
                    if refusals >= _REFUSALS_PER_ROUND:
                        return
                    if len(group) > 1:
                        # one of them, or their sum: each is offered alone
                        refused_batches += group
                case Verdict.UNAVAILABLE:
                    return

    def _pause(self, began_at: float) -> None:
        """Rest for as long as all that waits, what came since included, would need only half of the round's time.

        10,000 events one after the other keep the interpreter lock busy for seconds, and each request that runs beside
        them waits for it at every step: its p99 was twice as high (benchmarks/figures/flush.py). A round that paced
        itself by what it began with would leave more behind than it took, and memory would grow with the load.
        """
        now = self._monotonic()
        requests_left = max(1.0, self._buffer.usage_depth / self._settings.batch_size)
        pause_s = (self._ends_at - now) / (2 * requests_left) - (now - began_at)
        if pause_s > 0:
            self._wait(self._is_hurried, min(pause_s, _MAX_PAUSE_S))

    def _groups(self) -> Iterator[list[UsageEvent]]:
        """Yield what waits now, in batches, then each that was set aside before, then what came meanwhile.

        A batch has been dropped or set aside when the next is asked for. A round that left to the next what came
        meanwhile would rest under load while thousands wait.
        """
        aside = self._buffer.peek_usage_aside()
        request_ids = {event.data.request_id for event in aside}
        self._tries = {key: tries for key, tries in self._tries.items() if key in request_ids}
        self._refused &= request_ids
        aside.sort(key=lambda event: self._tries[event.data.request_id])
        left = self._buffer.usage_depth - len(aside)
        while left > 0 and (batch := self._buffer.peek_usage(min(left, self._settings.batch_size))):
            left -= len(batch)
            yield batch
        for event in aside:
            yield [event]
        while batch := self._buffer.peek_usage(self._settings.batch_size):
            yield batch

    def _offer(self, group: list[UsageEvent], timeout_s: float) -> Verdict:
        payload = encode_event(group[0]) if self._settings.batch_size == 1 else encode_batch(group)
        headers = {"Content-Type": payload.content_type}
        if self._settings.events_token:
            headers["Authorization"] = f"Bearer {self._settings.events_token}"
        try:
            status_code = self._http.exchange(
                "POST", self._settings.events_url, headers=headers, body=payload.body, timeout_s=timeout_s
            ).status_code
        except HttpError as err:
            self._trouble.failed(str(err), usage_events=self._buffer.usage_depth)
            return Verdict.UNAVAILABLE
        verdict = classify_croesus_status(status_code, event_count=len(group))
        if verdict is Verdict.UNAVAILABLE:
            self._trouble.failed(f"HTTP {status_code}", status_code=status_code, usage_events=self._buffer.usage_depth)
        else:
            self._trouble.ended()
        if verdict is Verdict.REFUSED or status_code == 500:
            # 500: Croesus may fail on this very event, which at the head would hold up all others for ever
            for event in group:
                self._tries[event.data.request_id] = self._tries.get(event.data.request_id, 0) + 1
            self._buffer.set_usage_aside(group)
        if verdict is Verdict.REFUSED and len(group) == 1:
            self._log_refused(group[0], status_code)
        return verdict

    def _log_refused(self, event: UsageEvent, status_code: int) -> None:
        request_id = event.data.request_id
        if request_id not in self._refused:
            self._refused.add(request_id)
            logger.error(
                "Croesus refuses the usage of request %s with HTTP %d: it stays, and is offered again",
                request_id,
                status_code,
                extra={"event": "usage_event_refused", "request_id": request_id, "status_code": status_code},
            )
