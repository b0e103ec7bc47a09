"""What the buffer holds goes to MetricServer, every flush, and to Croesus, until it is accepted.

The class runs on the thread `metrics-reporter`; each source and each sink has a helper thread of its own, because a
neighbour that hangs must not delay the others. No library is known here: HTTP is handed in, pages are text for
`metrics_scraper`, usage events are `usage_sender`'s.
Sources: specification ("Metrics Reporter"), design section 10; field reports R68, R69.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from inference_worker.documents import (
    GpuMetrics,
    HealthSnapshot,
    MetricsDocument,
    ModelMetrics,
    QueueDepth,
    Window,
    encode_document,
)
from inference_worker.errors import HttpError
from inference_worker.helper_thread import HelperThread, result_of
from inference_worker.http_request import Body
from inference_worker.metrics_buffer import MetricsBuffer
from inference_worker.metrics_scraper import ModelScraper, read_gpus
from inference_worker.metrics_source import NoNumbers, Source
from inference_worker.trouble import Trouble
from inference_worker.usage_sender import HttpExchange, UsageSender

logger = logging.getLogger(__name__)

#: the bound on the last flush, in all (design section 9)
FINAL_FLUSH_S = 3.0
#: while draining, usage goes out this often (design section 9)
DRAIN_USAGE_INTERVAL_S = 1.0
#: so much longer than its own bound do we wait for an exchange, so that its own reason is the one that is logged
_GRACE_S = 0.5
#: a small buffer is half full again and again: each time all neighbours would be asked for their numbers
_EARLY_FLUSH_SPACING_S = 1.0
#: a failing sink is logged again at every tenth failure in a row
_SINK_REPEATS = 10


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
    flush_interval_s: float
    #: the bound on one exchange
    http_timeout_s: float
    #: "" = not scraped
    vllm_metrics_url: str
    #: "" = not scraped
    dcgm_metrics_url: str


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
        usage: UsageSender,
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
        self._model: Source[ModelMetrics] = Source("model", self._scrape_model)
        self._gpus: Source[list[GpuMetrics]] = Source("dcgm", self._scrape_gpus)
        self._queue: Source[QueueDepth] = Source("queue", queue_depth)
        self._metric_server = HelperThread("metric-server")
        self._metrics_trouble = Trouble("metrics_flush", neighbour="MetricServer", repeats=_SINK_REPEATS)
        self._usage = usage
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
            self._usage.begin(self._monotonic() + self._settings.http_timeout_s)
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
        is_usage_begun = self._usage.begin(began_at + usage_s, is_paced=not final)
        model_metrics, gpus, queue = self._ask_sources(source_s, grace_s, interrupt)
        if interrupt is not None and interrupt.done():
            # the records stay in the buffer for the last flush
            return
        self._post_document(*self._make_document(model_metrics, gpus, queue), sink_s, grace_s, interrupt)
        if final:
            self._usage.finish(began_at + usage_s, is_begun=is_usage_begun)

    def close(self, *, budget_s: float = FINAL_FLUSH_S) -> None:
        """Send what is left, within the budget, and let the helper threads end."""
        self.flush(final=True, budget_s=budget_s)
        for source in (self._model, self._gpus, self._queue):
            source.close()
        self._metric_server.close()
        self._usage.close()

    @property
    def flush_failures(self) -> Mapping[str, int]:
        """Failed flushes since the start, by sink. Safe from any thread."""
        return {
            "metric_server": self._metrics_trouble.failures_total,
            "croesus": self._usage.failures_total,
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
            raise NoNumbers("its metrics page has no series that we know")
        return metrics

    def _scrape_gpus(self, timeout_s: float) -> list[GpuMetrics]:
        gpus = read_gpus(self._fetch_page(self._settings.dcgm_metrics_url, timeout_s))
        if not gpus:
            raise NoNumbers("its metrics page names no GPU")
        return gpus

    def _fetch_page(self, url: str, timeout_s: float) -> str:
        # asked for by name, since a server may prefer OpenMetrics
        answer = self._http.exchange("GET", url, headers={"Accept": "text/plain"}, body=None, timeout_s=timeout_s)
        if answer.status_code != 200:
            raise NoNumbers(f"HTTP {answer.status_code}")
        return answer.body.decode(errors="replace")

    # -- MetricServer

    def _make_document(
        self, model_metrics: ModelMetrics | None, gpus: list[GpuMetrics] | None, queue: QueueDepth | None
    ) -> tuple[Body, int]:
        """Return the document, encoded, and of how many records."""
        records, dropped_count = self._buffer.take_records()
        settings = self._settings
        document = MetricsDocument(
            deployment_id=settings.deployment_id,
            replica_id=settings.replica_id,
            user_id=settings.user_id,
            org_id=settings.org_id,
            model=settings.model,
            worker_version=settings.worker_version,
            window=self._next_window(),
            requests=[],
            requests_dropped=dropped_count,
            health=self._health(),
            model_metrics=model_metrics,
            gpus=gpus,
            queue=queue,
        )
        return encode_document(document, records), len(records)

    def _next_window(self) -> Window:
        to = self._clock()
        # a clock that was set back must not turn the window round
        window = Window(min(self._window_from, to), to)
        self._window_from = to
        return window

    def _post_document(
        self, body: Body, record_count: int, timeout_s: float, grace_s: float, interrupt: Future[None] | None
    ) -> None:
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
            status_code = result_of(answer, timeout_s + grace_s, interrupt=interrupt).status_code
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
