"""A metrics reporter with its usage sender, and an HTTP that answers, refuses, fails and hangs as it is told to."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from inference_worker.documents import HealthSnapshot, InferenceRequestRecord, QueueDepth, UsageData, UsageEvent
from inference_worker.errors import HttpTimeout
from inference_worker.http_request import Body
from inference_worker.metrics_buffer import MetricsBuffer
from inference_worker.metrics_reporter import MetricsReporter, ReporterSettings
from inference_worker.usage_sender import UsageSender, UsageSettings

#: longer than any machine needs; it only passes when a test fails
LONG_TIMEOUT_S = 30.0
#: the bound on one exchange where a neighbour hangs, and so the time that such a test takes
SHORT_TIMEOUT_S = 0.05

METRICS_URL = "http://metric-server/metrics"
EVENTS_URL = "http://croesus/events"
VLLM_URL = "http://model:8000/metrics"
DCGM_URL = "http://host:9400/metrics"

VLLM_PAGE = b'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
DCGM_PAGE = b'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a"} 50\n'


@dataclass(frozen=True)
class Answer:
    status_code: int
    body: bytes = b""


@dataclass(frozen=True)
class Request:
    method: str
    headers: Mapping[str, str]
    body: bytes | None
    timeout_s: float

    @property
    def document(self) -> Any:
        assert self.body is not None
        return json.loads(self.body)

    @property
    def event_ids(self) -> list[str]:
        events = self.document if isinstance(self.document, list) else [self.document]
        return [event["id"] for event in events]


class RecordingHttp:
    """The HTTP client's stand-in: records each request, and answers as it was told, by URL. Safe from any thread.

    Like the real one it is called from several threads at once, and raises HttpError and nothing else. `hang` makes a
    URL give no answer at all until the test ends, past every bound, as a name lookup can.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests: list[tuple[str, Request]] = []
        self._released = threading.Event()
        self._answers: dict[str, Callable[[Request], Answer]] = {
            METRICS_URL: lambda request: Answer(200),
            EVENTS_URL: lambda request: Answer(202),
            VLLM_URL: lambda request: Answer(200, VLLM_PAGE),
            DCGM_URL: lambda request: Answer(200, DCGM_PAGE),
        }

    def exchange(
        self, method: str, url: str, *, headers: Mapping[str, str], body: Body | None, timeout_s: float
    ) -> Answer:
        request = Request(method, headers, None if body is None else bytes(body), timeout_s)
        with self._changed:
            self._requests.append((url, request))
            self._changed.notify_all()
        return self._answers[url](request)

    def answer(self, url: str, status_code: int, body: bytes = b"") -> None:
        self._answers[url] = lambda request: Answer(status_code, body)

    def answer_by(self, url: str, rule: Callable[[Request], int]) -> None:
        self._answers[url] = lambda request: Answer(rule(request))

    def fail(self, url: str, error: Exception) -> None:
        def raise_it(request: Request) -> Answer:
            raise error

        self._answers[url] = raise_it

    def hang(self, url: str) -> None:
        def wait(request: Request) -> Answer:
            self._released.wait(LONG_TIMEOUT_S)
            raise HttpTimeout("no whole answer in time")

        self._answers[url] = wait

    def release(self) -> None:
        self._released.set()

    def requests(self, url: str) -> list[Request]:
        with self._changed:
            return [request for at, request in self._requests if at == url]

    def wait_for(self, url: str, count: int) -> list[Request]:
        with self._changed:
            assert self._changed.wait_for(
                lambda: len([at for at, _ in self._requests if at == url]) >= count, LONG_TIMEOUT_S
            ), f"fewer than {count} requests to {url}"
        return self.requests(url)


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


class Bench:
    """A reporter and all that it is given."""

    def __init__(self, **changes: Any) -> None:
        self.http = RecordingHttp()
        self.clock = Clock(1000.0)
        self.monotonic = Clock(50.0)
        #: between two usage events
        self.pauses_s: list[float] = []
        self.queue_depth: Callable[[float], QueueDepth | None] = lambda wait_s: QueueDepth(depth=7)
        self.buffer = MetricsBuffer(
            max_records=changes.pop("max_records", 1000),
            max_usage_events=changes.pop("max_usage_events", 100_000),
            on_half_full=lambda: self.reporter.flush_soon(),
        )
        settings: dict[str, Any] = {
            "deployment_id": "deployment-1",
            "replica_id": "replica-1",
            "user_id": "user-1",
            "org_id": "",
            "model": "m",
            "worker_version": "1.2.3",
            "metrics_url": METRICS_URL,
            "metrics_token": "metrics-secret",
            "flush_interval_s": 30.0,
            "http_timeout_s": 5.0,
            "vllm_metrics_url": VLLM_URL,
            "dcgm_metrics_url": DCGM_URL,
        }
        self.usage_settings = UsageSettings(
            events_url=EVENTS_URL,
            events_token=changes.pop("events_token", ""),
            http_timeout_s=changes.get("http_timeout_s", 5.0),
            batch_size=changes.pop("croesus_batch_size", 1),
        )
        self.settings = ReporterSettings(**settings | changes)
        self.reporter = MetricsReporter(
            settings=self.settings,
            buffer=self.buffer,
            usage=UsageSender(
                self.usage_settings,
                buffer=self.buffer,
                http=self.http,
                monotonic=self.monotonic,
                wait=lambda hurried, pause_s: self.pauses_s.append(pause_s),
            ),
            http=self.http,
            health=lambda: HealthSnapshot(True, 999.0, "HTTP 200"),
            queue_depth=lambda wait_s: self.queue_depth(wait_s),
            clock=self.clock,
            monotonic=self.monotonic,
        )

    def flush(self) -> None:
        """Flush, and wait until Croesus has been dealt with."""
        self.reporter.flush(final=True, budget_s=LONG_TIMEOUT_S)

    @property
    def documents(self) -> list[Any]:
        return [request.document for request in self.http.requests(METRICS_URL)]

    @property
    def offered_ids(self) -> list[str]:
        return [event_id for request in self.http.requests(EVENTS_URL) for event_id in request.event_ids]

    @property
    def waiting_ids(self) -> list[str]:
        waiting = self.buffer.peek_usage_aside() + self.buffer.peek_usage(1_000_000)
        return [event.data.request_id for event in waiting]


@contextlib.contextmanager
def making_benches() -> Iterator[Callable[..., Bench]]:
    """Make benches with other settings than the default, and end their threads with the block."""
    benches: list[Bench] = []

    def make(**changes: Any) -> Bench:
        benches.append(Bench(**changes))
        return benches[-1]

    try:
        yield make
    finally:
        for bench in benches:
            bench.http.release()
            bench.reporter.close(budget_s=SHORT_TIMEOUT_S)


def make_record(number: int = 0) -> InferenceRequestRecord:
    return InferenceRequestRecord(
        request_id=f"r{number}",
        received_at=1.0,
        started_at=2.0,
        finished_at=3.0,
        queue_wait_s=1.0,
        model_latency_s=0.5,
        total_latency_s=1.0,
        status="completed",
        status_code=200,
        error_type=None,
        disposition="ack",
        retry_count=0,
        streamed=False,
    )


def make_event(number: int) -> UsageEvent:
    return UsageEvent(
        completed_at=3.0,
        data=UsageData(
            request_id=f"r{number}",
            deployment_id="deployment-1",
            replica_id="replica-1",
            user_id="user-1",
            org_id="",
            model="m",
            prompt_tokens=1,
            completion_tokens=2,
            total_tokens=3,
            cached_tokens=None,
        ),
    )


def ids_of(numbers: range) -> list[str]:
    return [f"r{number}" for number in numbers]


def logged_events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Return the level and the name of each line of the log."""
    return [(record.levelname, vars(record)["event"]) for record in caplog.records]
