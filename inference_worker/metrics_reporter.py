"""What the buffer holds goes to MetricServer, every flush, and to Croesus, until it is accepted.

The class runs on the thread `metrics-reporter`; each source and each sink has a helper thread of its own, because a
neighbour that hangs must not delay the others. No library is known here: HTTP is handed in, pages and events are text
and bytes from `metrics_scraper` and `usage_events`.
Sources: specification ("Metrics Reporter"), design section 10; field reports R68-R72.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from inference_worker.documents import (
    GpuMetrics,
    HealthSnapshot,
    MetricsDocument,
    ModelMetrics,
    QueueDepth,
    UsageEvent,
    Window,
    encode_document,
)
from inference_worker.errors import HttpError, WorkerError
from inference_worker.metrics_buffer import MetricsBuffer
from inference_worker.metrics_scraper import ModelScraper, read_gpus
from inference_worker.usage_events import encode_batch, encode_event

logger = logging.getLogger("inference_worker.metrics_reporter")

#: the bound on the last flush, in all (design section 9)
FINAL_FLUSH_S = 3.0
#: while draining, usage goes out this often (design section 9)
DRAIN_USAGE_INTERVAL_S = 1.0
#: so much longer than its own bound do we wait for an exchange, so that its own reason is the one that is logged
_GRACE_S = 0.5
#: so many refusals one after the other are no fault of the events: the round ends
_REFUSALS_PER_ROUND = 10
#: a small buffer is half full again and again: each time all neighbours would be asked for their numbers
_EARLY_FLUSH_SPACING_S = 1.0
#: a failing sink is logged again at every tenth failure in a row
_SINK_REPEATS = 10
#: a failing source at every 120th (an hour at 30 s): a model server without metrics is no emergency
_SOURCE_REPEATS = 120

T = TypeVar("T")


# -- what is handed in ------------------------------------------------------------------------------------------------


class HttpAnswer(Protocol):
    """A whole answer."""

    @property
    def status_code(self) -> int: ...

    @property
    def body(self) -> bytes: ...


class HttpExchange(Protocol):
    """One bounded exchange. Called from several threads at once."""

    def exchange(
        self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None, timeout_s: float
    ) -> HttpAnswer:
        """Send one request and read the whole answer; redirects are not followed.

        Units:   timeout_s seconds, over the whole exchange
        Raises:  HttpError; its text names no URL, since it is logged
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ReporterSettings:
    """The part of the configuration that the reporter needs."""

    deployment_id: str
    replica_id: str
    user_id: str
    org_id: str
    model: str
    worker_version: str
    #: the full URL, path included
    metrics_url: str
    metrics_token: str = field(repr=False)
    #: the full URL, path included
    events_url: str
    #: "" = none is sent
    events_token: str = field(default="", repr=False)
    flush_interval_s: float
    #: the bound on one exchange
    http_timeout_s: float
    #: "" = not scraped
    vllm_metrics_url: str
    #: "" = not scraped
    dcgm_metrics_url: str
    #: 1 = one event a request, structured; more = batched
    croesus_batch_size: int


# -- one neighbour, one thread ----------------------------------------------------------------------------------------


class _Helper:
    """A thread for one neighbour, so that its hanging is its own; one call at a time. Owned by the reporter's thread.

    The thread lives as long as the reporter, since the HTTP client keeps connections by thread. It is a daemon:
    a name lookup can outlast every bound, and must not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._inbox: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"metrics-reporter-{name}", daemon=True)
        self._last: Future[Any] | None = None

    def begin(self, call: Callable[[], T]) -> Future[T] | None:
        """Start the call; None when the call before has not come back yet."""
        if self._last is not None and not self._last.done():
            return None
        if self._thread.ident is None:
            self._thread.start()
        future: Future[T] = Future()
        self._last = future
        self._inbox.put((future, call))
        return future

    def close(self) -> None:
        """Let the thread end after its call; does not wait for it."""
        self._inbox.put(None)

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            future, call = work
            try:
                future.set_result(call())
            except BaseException as err:
                # carried to the reporter's thread: `Future.result` raises it there, a bug of ours included
                future.set_exception(err)


def _result_of(future: Future[T], wait_s: float, *, interrupt: Future[None] | None) -> T:
    """Wait for a result; give up early when `interrupt` is done.

    Raises:  TimeoutError (not there yet), and what the call raised
    """
    if interrupt is not None:
        either: tuple[Future[Any], ...] = (future, interrupt)
        wait(either, wait_s, FIRST_COMPLETED)
        wait_s = 0.0
    return future.result(wait_s)


class _Trouble:
    """A neighbour's failures: logged when they begin, at every nth repeat, and when they end. One thread at a time."""

    def __init__(self, event_prefix: str, *, neighbour: str, repeats: int) -> None:
        self._event_prefix = event_prefix
        self._neighbour = neighbour
        self._repeats = repeats
        self._in_a_row = 0
        self.failures_total = 0

    def failed(self, reason: str, **facts: int | None) -> None:
        self._in_a_row += 1
        self.failures_total += 1
        if self._in_a_row == 1 or self._in_a_row % self._repeats == 0:
            extra = {"neighbour": self._neighbour, "reason": reason, "failures": self._in_a_row, **facts}
            logger.warning(
                "%s fails: %s (%d in a row)",
                self._neighbour,
                reason,
                self._in_a_row,
                extra={"event": f"{self._event_prefix}_failed", **extra},
            )

    def ended(self) -> None:
        if self._in_a_row:
            logger.info(
                "%s works again after %d failures",
                self._neighbour,
                self._in_a_row,
                extra={
                    "event": f"{self._event_prefix}_recovered",
                    "neighbour": self._neighbour,
                    "failures": self._in_a_row,
                },
            )
        self._in_a_row = 0


class _NoNumbers(WorkerError):
    """A source answered, but with nothing that can be read; never leaves this file."""


class _Source(Generic[T]):
    """A place that numbers come from; they are unknown when it does not give them in time."""

    def __init__(self, name: str, ask: Callable[[float], T | None]) -> None:
        self._ask = ask
        self._helper = _Helper(name)
        self._trouble = _Trouble("metrics_source", neighbour=name, repeats=_SOURCE_REPEATS)
        self._answer: Future[T | None] | None = None

    def begin(self, timeout_s: float) -> None:
        self._answer = self._helper.begin(lambda: self._ask(timeout_s))

    def collect(self, wait_s: float, *, interrupt: Future[None] | None) -> T | None:
        if self._answer is None:
            self._trouble.failed("still busy with the call before")
            return None
        try:
            value = _result_of(self._answer, wait_s, interrupt=interrupt)
        except TimeoutError:
            if interrupt is None or not interrupt.done():
                self._trouble.failed("no answer in time")
        except WorkerError as err:
            self._trouble.failed(str(err))
        else:
            self._trouble.ended()
            return value
        return None

    def close(self) -> None:
        self._helper.close()


# -- what Croesus says ------------------------------------------------------------------------------------------------


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


# -- the reporter -----------------------------------------------------------------------------------------------------


class MetricsReporter:
    """Flushes when due, when asked to, and at the end. Owned by the thread `metrics-reporter`.

    `flush_soon` and `drain` may be called from any thread. Whoever runs it calls `tick`, waits on `wakeup` for as long
    as `tick` says, clears it, and at the end calls `close`.
    """

    name = "metrics-reporter"

    def __init__(
        self,
        *,
        settings: ReporterSettings,
        buffer: MetricsBuffer,
        http: HttpExchange,
        health: Callable[[], HealthSnapshot],
        queue_depth: Callable[[float], QueueDepth | None],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`queue_depth` is called on a helper thread with the seconds that it may wait."""
        self._settings = settings
        self._buffer = buffer
        self._http = http
        self._health = health
        self._clock = clock
        self._monotonic = monotonic
        self._scraper = ModelScraper()
        self._model: _Source[ModelMetrics] = _Source("model", self._scrape_model)
        self._gpus: _Source[list[GpuMetrics]] = _Source("dcgm", self._scrape_gpus)
        self._queue: _Source[QueueDepth] = _Source("queue", queue_depth)
        self._metric_server = _Helper("metric-server")
        self._metrics_trouble = _Trouble("metrics_flush", neighbour="MetricServer", repeats=_SINK_REPEATS)
        self._croesus = _Helper("croesus")
        self._usage_trouble = _Trouble("usage_flush", neighbour="Croesus", repeats=_SINK_REPEATS)
        self._usage_round: Future[None] | None = None
        #: monotonic; the round on the helper thread reads it before each request, the last flush brings it forward
        self._usage_ends_at = 0.0
        #: request_id → how often Croesus refused it or failed on it. These go after all others, alone, and the least
        #: often tried first: whatever is wrong with some, each of the others has its turn
        self._set_aside: dict[str, int] = {}
        #: request_ids whose refusal has been logged
        self._refused: set[str] = set()
        self._window_from = clock()
        self._next_flush_at: float | None = None
        #: one that is asked for waits until then
        self._early_flush_at = float("-inf")
        self._is_flush_asked = threading.Event()
        #: done once draining; a future, so that one wait can be for an answer and for this
        self._draining: Future[None] = Future()
        #: set when a tick is wanted before its time. Not cleared here: it is also how the thread is told to stop, and a
        #: stop that came before a turn would be lost
        self.wakeup = threading.Event()

    def tick(self, now: float) -> float:
        """Flush if it is time or was asked for; return the seconds until the next turn.

        Units:   now in seconds of the monotonic clock
        """
        if self._draining.done():
            # documents wait for the last flush: with a neighbour that hangs, one now might still be under way then
            self._begin_usage_round(self._monotonic() + self._settings.http_timeout_s)
            return DRAIN_USAGE_INTERVAL_S
        if self._next_flush_at is None:
            self._next_flush_at = now + self._settings.flush_interval_s
        due_at = self._next_flush_at
        if self._is_flush_asked.is_set():
            due_at = min(due_at, self._early_flush_at)
        if now >= due_at:
            self._is_flush_asked.clear()
            due_at = self._next_flush_at = now + self._settings.flush_interval_s
            self._early_flush_at = now + _EARLY_FLUSH_SPACING_S
            began_at = self._monotonic()
            self.flush()
            now += self._monotonic() - began_at
        return 0.0 if self._draining.done() else max(0.0, due_at - now)

    def flush_soon(self) -> None:
        """Ask for a flush now, or a second after the one before. Safe from any thread."""
        self._is_flush_asked.set()
        self.wakeup.set()

    def drain(self) -> None:
        """Send usage at once and every second from now on: the process will end soon. Safe from any thread.

        A flush under way waits for nothing any more: the last one must not come too late for the usage.
        """
        with suppress(InvalidStateError):
            self._draining.set_result(None)
        self.wakeup.set()

    def flush(self, *, final: bool = False, budget_s: float | None = None) -> None:
        """Send one document to MetricServer, and to Croesus what it has not accepted.

        Does not wait for Croesus, unless `final`. A batch that MetricServer does not take is dropped.

        Units:   budget_s seconds for the whole, at most; final: 3 if not given; else http_timeout_s for all sources
                 together and http_timeout_s for MetricServer
        """
        if final and budget_s is None:
            budget_s = FINAL_FLUSH_S
        settings, began_at = self._settings, self._monotonic()
        source_s = sink_s = settings.http_timeout_s
        grace_s, usage_s = _GRACE_S, settings.flush_interval_s
        if budget_s is not None:
            source_s, grace_s, usage_s = min(source_s, budget_s / 3), 0.0, budget_s
            sink_s = min(sink_s, budget_s - source_s)
        interrupt = None if final else self._draining
        is_usage_begun = self._begin_usage_round(began_at + usage_s)
        model_metrics, gpus, queue = self._ask_sources(source_s, grace_s, interrupt)
        if interrupt is not None and interrupt.done():
            # the records stay in the buffer for the last flush
            return
        document = self._make_document(model_metrics, gpus, queue)
        self._post_document(document, sink_s, grace_s, interrupt)
        if final:
            self._finish_usage(began_at + usage_s, is_usage_begun)

    def close(self, *, budget_s: float = FINAL_FLUSH_S) -> None:
        """Send what is left, within the budget, and let the helper threads end."""
        self.flush(final=True, budget_s=budget_s)
        for source in (self._model, self._gpus, self._queue):
            source.close()
        self._metric_server.close()
        self._croesus.close()

    @property
    def flush_failures(self) -> Mapping[str, int]:
        """Failed flushes since the start, by sink. Safe from any thread."""
        return {
            "metric_server": self._metrics_trouble.failures_total,
            "croesus": self._usage_trouble.failures_total,
        }

    # -- sources

    def _ask_sources(
        self, timeout_s: float, grace_s: float, interrupt: Future[None] | None
    ) -> tuple[ModelMetrics | None, list[GpuMetrics] | None, QueueDepth | None]:
        """Ask all at once, and wait for them together: the slowest decides, not the sum."""
        has_model, has_gpus = bool(self._settings.vllm_metrics_url), bool(self._settings.dcgm_metrics_url)
        if has_model:
            self._model.begin(timeout_s)
        if has_gpus:
            self._gpus.begin(timeout_s)
        self._queue.begin(timeout_s)
        ends_at = self._monotonic() + timeout_s + grace_s
        model_metrics = self._model.collect(self._left_s(ends_at), interrupt=interrupt) if has_model else None
        gpus = self._gpus.collect(self._left_s(ends_at), interrupt=interrupt) if has_gpus else None
        return model_metrics, gpus, self._queue.collect(self._left_s(ends_at), interrupt=interrupt)

    def _left_s(self, ends_at: float) -> float:
        return max(0.0, ends_at - self._monotonic())

    def _scrape_model(self, timeout_s: float) -> ModelMetrics:
        metrics = self._scraper.read(self._fetch_page(self._settings.vllm_metrics_url, timeout_s))
        if metrics is None:
            raise _NoNumbers("its metrics page has no series that we know")
        return metrics

    def _scrape_gpus(self, timeout_s: float) -> list[GpuMetrics]:
        gpus = read_gpus(self._fetch_page(self._settings.dcgm_metrics_url, timeout_s))
        if not gpus:
            raise _NoNumbers("its metrics page names no GPU")
        return gpus

    def _fetch_page(self, url: str, timeout_s: float) -> str:
        # asked for by name, since a server may prefer OpenMetrics
        answer = self._http.exchange("GET", url, headers={"Accept": "text/plain"}, body=None, timeout_s=timeout_s)
        if answer.status_code != 200:
            raise _NoNumbers(f"HTTP {answer.status_code}")
        return answer.body.decode(errors="replace")

    # -- MetricServer

    def _make_document(
        self, model_metrics: ModelMetrics | None, gpus: list[GpuMetrics] | None, queue: QueueDepth | None
    ) -> MetricsDocument:
        records, dropped_count = self._buffer.take_records()
        settings = self._settings
        return MetricsDocument(
            deployment_id=settings.deployment_id,
            replica_id=settings.replica_id,
            user_id=settings.user_id,
            org_id=settings.org_id,
            model=settings.model,
            worker_version=settings.worker_version,
            window=self._next_window(),
            requests=records,
            requests_dropped=dropped_count,
            health=self._health(),
            model_metrics=model_metrics,
            gpus=gpus,
            queue=queue,
        )

    def _next_window(self) -> Window:
        to = self._clock()
        # a clock that was set back must not turn the window round
        window = Window(min(self._window_from, to), to)
        self._window_from = to
        return window

    def _post_document(
        self, document: MetricsDocument, timeout_s: float, grace_s: float, interrupt: Future[None] | None
    ) -> None:
        body, record_count = encode_document(document), len(document.requests)
        url, token = self._settings.metrics_url, self._settings.metrics_token
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        answer = self._metric_server.begin(
            lambda: self._http.exchange("POST", url, headers=headers, body=body, timeout_s=timeout_s)
        )
        trouble = self._metrics_trouble
        if answer is None:
            trouble.failed("still busy with the document before", records_dropped=record_count)
            return
        try:
            status_code = _result_of(answer, timeout_s + grace_s, interrupt=interrupt).status_code
        except TimeoutError:
            if interrupt is None or not interrupt.done():
                trouble.failed("no answer in time", records_dropped=record_count)
        except HttpError as err:
            trouble.failed(str(err), records_dropped=record_count)
        else:
            if 200 <= status_code < 300:
                trouble.ended()
            else:
                trouble.failed(f"HTTP {status_code}", status_code=status_code, records_dropped=record_count)

    # -- Croesus

    def _begin_usage_round(self, ends_at: float) -> bool:
        """Start a round on the helper thread; False when the one before still runs, or nothing waits."""
        if self._usage_round is not None and not self._usage_round.done():
            self._usage_ends_at = min(self._usage_ends_at, ends_at)
            return False
        if self._usage_round is not None:
            # neighbours' failures are dealt with in the round; what comes out of it is a bug, and ends this thread
            self._usage_round.result()
        if not self._buffer.usage_depth:
            return False
        self._usage_ends_at = ends_at
        self._usage_round = self._croesus.begin(self._send_usage)
        return True

    def _finish_usage(self, ends_at: float, is_begun: bool) -> None:
        """Wait for the round; after one that had begun earlier, another takes what came since."""
        self._await_usage_round(ends_at)
        if not is_begun and self._begin_usage_round(ends_at):
            self._await_usage_round(ends_at)
        if lost_count := self._buffer.usage_depth:
            logger.error(
                "%d usage events were not accepted by Croesus, and are lost with this process",
                lost_count,
                extra={"event": "usage_lost", "usage_events": lost_count},
            )

    def _await_usage_round(self, ends_at: float) -> None:
        if self._usage_round is not None:
            with suppress(TimeoutError):
                self._usage_round.result(self._left_s(ends_at))

    def _send_usage(self) -> None:
        """Offer what waits, oldest first, until Croesus is unavailable or the time is up; the rest waits on.

        Runs on the helper thread, one round at a time.
        """
        groups = deque(self._group_usage())
        refusals = 0
        while groups and refusals < _REFUSALS_PER_ROUND:
            left_s = self._usage_ends_at - self._monotonic()
            if left_s <= 0:
                return
            group = groups.popleft()
            match self._offer(group, min(left_s, self._settings.http_timeout_s)):
                case Verdict.ACCEPTED:
                    refusals = 0
                    self._buffer.drop_usage(group)
                case Verdict.REFUSED:
                    refusals += 1
                    if len(group) > 1:
                        # one of them, or their sum: each is offered alone
                        groups.extend([event] for event in group)
                case Verdict.UNAVAILABLE:
                    return

    def _group_usage(self) -> list[list[UsageEvent]]:
        waiting = self._buffer.peek_usage(self._buffer.usage_depth)
        if self._set_aside:
            request_ids = {event.data.request_id for event in waiting}
            self._set_aside = {key: tries for key, tries in self._set_aside.items() if key in request_ids}
            self._refused &= request_ids
        fresh = [event for event in waiting if event.data.request_id not in self._set_aside]
        aside = [event for event in waiting if event.data.request_id in self._set_aside]
        aside.sort(key=lambda event: self._set_aside[event.data.request_id])
        size = self._settings.croesus_batch_size
        return [fresh[at : at + size] for at in range(0, len(fresh), size)] + [[event] for event in aside]

    def _offer(self, group: list[UsageEvent], timeout_s: float) -> Verdict:
        payload = encode_event(group[0]) if self._settings.croesus_batch_size == 1 else encode_batch(group)
        headers = {"Content-Type": payload.content_type}
        if self._settings.events_token:
            headers["Authorization"] = f"Bearer {self._settings.events_token}"
        try:
            status_code = self._http.exchange(
                "POST", self._settings.events_url, headers=headers, body=payload.body, timeout_s=timeout_s
            ).status_code
        except HttpError as err:
            self._usage_trouble.failed(str(err), usage_events=self._buffer.usage_depth)
            return Verdict.UNAVAILABLE
        verdict = classify_croesus_status(status_code, event_count=len(group))
        if verdict is Verdict.UNAVAILABLE:
            self._usage_trouble.failed(
                f"HTTP {status_code}", status_code=status_code, usage_events=self._buffer.usage_depth
            )
        else:
            self._usage_trouble.ended()
        if verdict is Verdict.REFUSED or status_code == 500:
            # 500: Croesus may fail on this very event, which at the head would hold up all others for ever
            for event in group:
                self._set_aside[event.data.request_id] = self._set_aside.get(event.data.request_id, 0) + 1
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
