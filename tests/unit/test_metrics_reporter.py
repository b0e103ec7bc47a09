"""Flushing to MetricServer and Croesus, with sources and sinks that fail, refuse and hang."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from inference_worker.documents import (
    HealthSnapshot,
    InferenceRequestRecord,
    MetricsDocument,
    QueueDepth,
    UsageData,
    UsageEvent,
    json_schema,
)
from inference_worker.errors import BrokerError, HttpTimeout, HttpUnreachable
from inference_worker.metrics_buffer import MetricsBuffer
from inference_worker.metrics_reporter import MetricsReporter, ReporterSettings
from inference_worker.usage_sender import UsageSender, UsageSettings, Verdict, classify_croesus_status

ROOT = Path(__file__).resolve().parents[2]

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
        self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None, timeout_s: float
    ) -> Answer:
        request = Request(method, headers, body, timeout_s)
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
        return [event.data.request_id for event in self.buffer.peek_usage(1_000_000)]


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**changes: Any) -> Bench:
        benches.append(Bench(**changes))
        return benches[-1]

    yield make
    for bench in benches:
        bench.http.release()
        bench.reporter.close(budget_s=SHORT_TIMEOUT_S)


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


def _record(number: int = 0) -> InferenceRequestRecord:
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


def _event(number: int) -> UsageEvent:
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


def _ids(numbers: range) -> list[str]:
    return [f"r{number}" for number in numbers]


def _events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, vars(record)["event"]) for record in caplog.records]


# -- when -------------------------------------------------------------------------------------------------------------


def test_a_flush_is_made_when_the_interval_is_over_and_not_before(bench: Bench) -> None:
    assert bench.reporter.tick(50.0) == 30.0
    assert bench.reporter.tick(79.0) == 1.0
    assert bench.documents == []
    assert bench.reporter.tick(80.0) == 30.0
    assert len(bench.documents) == 1


def test_the_time_that_a_flush_takes_comes_off_the_wait(bench: Bench) -> None:
    def take_four_seconds(request: Request) -> int:
        bench.monotonic.at += 4.0
        return 200

    bench.http.answer_by(METRICS_URL, take_four_seconds)
    bench.reporter.tick(50.0)
    assert bench.reporter.tick(80.0) == 26.0


def test_a_flush_is_made_early_when_the_buffer_is_half_full(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(max_records=4)
    bench.reporter.tick(50.0)
    bench.buffer.append(_record(0))
    assert not bench.reporter.wakeup.is_set()
    bench.buffer.append(_record(1))
    assert bench.reporter.wakeup.is_set()
    bench.reporter.tick(51.0)
    assert [len(document["requests"]) for document in bench.documents] == [2]
    bench.reporter.tick(52.0)
    assert len(bench.documents) == 1


def test_a_small_buffer_that_is_always_half_full_asks_its_neighbours_once_a_second(bench: Bench) -> None:
    bench.reporter.tick(50.0)
    waits_s = []
    for now in (50.5, 50.6, 51.4, 51.5):
        bench.reporter.flush_soon()
        waits_s.append(bench.reporter.tick(now))
    assert len(bench.documents) == 2
    assert waits_s[1:3] == [pytest.approx(0.9), pytest.approx(0.1)]


def test_a_flush_asked_for_during_a_flush_is_not_lost(bench: Bench) -> None:
    def ask_again(request: Request) -> int:
        bench.reporter.flush_soon()
        return 200

    bench.http.answer_by(METRICS_URL, ask_again)
    bench.reporter.tick(50.0)
    bench.reporter.flush_soon()
    bench.reporter.wakeup.clear()
    bench.reporter.tick(51.0)
    assert bench.reporter.wakeup.is_set()
    bench.reporter.tick(52.0)
    assert len(bench.documents) == 2


def test_usage_goes_out_at_once_and_every_second_while_draining(bench: Bench) -> None:
    bench.reporter.tick(50.0)
    bench.buffer.append_usage(_event(0))
    bench.reporter.drain()
    assert bench.reporter.wakeup.is_set()
    assert bench.reporter.tick(51.0) == 1.0
    assert bench.http.wait_for(EVENTS_URL, 1)[0].event_ids == ["r0"]
    assert bench.reporter.tick(1000.0) == 1.0
    assert bench.documents == []


def test_a_stop_before_a_turn_is_not_lost(bench: Bench) -> None:
    """`wakeup` is how the thread is told to stop: a turn that cleared it would sleep for a whole interval."""
    bench.reporter.wakeup.set()
    bench.reporter.tick(50.0)
    assert bench.reporter.wakeup.is_set()


@pytest.mark.parametrize("hanging", [VLLM_URL, METRICS_URL])
def test_draining_ends_the_waits_of_a_flush_under_way(
    bench: Bench, hanging: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench.http.hang(hanging)
    bench.buffer.append(_record(0))
    turn = threading.Thread(target=lambda: (bench.reporter.tick(50.0), bench.reporter.tick(80.0)), daemon=True)
    turn.start()
    bench.http.wait_for(hanging, 1)
    bench.reporter.drain()
    bench.reporter.drain()
    turn.join(LONG_TIMEOUT_S)
    assert not turn.is_alive()
    assert caplog.records == []
    # a record is either in the document under way or waits for the last flush
    assert bench.buffer.record_depth == (1 if hanging == VLLM_URL else 0)


def test_the_last_flush_waits_for_its_answers_although_draining(bench: Bench) -> None:
    bench.buffer.append(_record(0))
    bench.buffer.append_usage(_event(0))
    bench.reporter.drain()
    bench.flush()
    [document] = bench.documents
    assert document["model_metrics"] is not None
    assert len(document["requests"]) == 1
    assert bench.buffer.usage_depth == 0


# -- the document -----------------------------------------------------------------------------------------------------


def test_the_document_has_everything_and_is_valid(bench: Bench) -> None:
    bench.buffer.append(_record())
    bench.clock.at = 1030.0
    bench.reporter.flush()
    [request] = bench.http.requests(METRICS_URL)
    assert request.method == "POST"
    assert request.headers["Authorization"] == "Bearer metrics-secret"
    assert request.headers["Content-Type"] == "application/json"
    document = request.document
    jsonschema.validate(document, json_schema(MetricsDocument), cls=jsonschema.Draft202012Validator)
    assert {key: document[key] for key in ("deployment_id", "replica_id", "user_id", "org_id", "model")} == {
        "deployment_id": "deployment-1",
        "replica_id": "replica-1",
        "user_id": "user-1",
        "org_id": "",
        "model": "m",
    }
    assert document["worker_version"] == "1.2.3"
    assert document["window"] == {"from": 1000.0, "to": 1030.0}
    assert [entry["request_id"] for entry in document["requests"]] == ["r0"]
    assert document["requests_dropped"] == 0
    assert document["health"] == {"healthy": True, "timestamp": 999.0, "detail": "HTTP 200"}
    assert document["model_metrics"]["kv_cache_usage"] == 0.5
    assert [(gpu["uuid"], gpu["utilization"]) for gpu in document["gpus"]] == [("GPU-a", 0.5)]
    assert document["queue"] == {"depth": 7, "consumers": None, "dead_letter_depth": None}


def test_windows_follow_one_another_and_never_run_backwards(bench: Bench) -> None:
    for at in (1030.0, 1060.0, 900.0, 930.0):
        bench.clock.at = at
        bench.reporter.flush()
    assert [document["window"] for document in bench.documents] == [
        {"from": 1000.0, "to": 1030.0},
        {"from": 1030.0, "to": 1060.0},
        {"from": 900.0, "to": 900.0},
        {"from": 900.0, "to": 930.0},
    ]


def test_without_urls_nothing_is_scraped_and_the_numbers_are_null(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(vllm_metrics_url="", dcgm_metrics_url="")
    bench.reporter.flush()
    assert bench.documents[0]["gpus"] is None
    assert bench.documents[0]["model_metrics"] is None
    assert bench.http.requests(VLLM_URL) == bench.http.requests(DCGM_URL) == []


@pytest.mark.parametrize(
    ("status_code", "body"), [(500, VLLM_PAGE), (404, b""), (302, b""), (200, b"<html>"), (200, b"\xff\xfe")]
)
def test_r68_a_page_that_says_nothing_costs_its_numbers_and_not_the_document(
    bench: Bench, status_code: int, body: bytes
) -> None:
    bench.http.answer(VLLM_URL, status_code, body)
    bench.http.answer(DCGM_URL, status_code, body)
    bench.buffer.append(_record())
    bench.reporter.flush()
    [document] = bench.documents
    assert document["model_metrics"] is None
    assert document["gpus"] is None
    assert len(document["requests"]) == 1


def test_r68_bytes_that_are_no_utf8_cost_their_line(bench: Bench) -> None:
    bench.http.answer(VLLM_URL, 200, b'x{a="\xff"} 1\n' + VLLM_PAGE)
    bench.reporter.flush()
    assert bench.documents[0]["model_metrics"]["kv_cache_usage"] == 0.5


@pytest.mark.parametrize("broken", ["vllm", "dcgm", "queue"])
def test_a_broken_source_costs_no_other_its_numbers(bench: Bench, broken: str) -> None:
    def fail(wait_s: float) -> QueueDepth | None:
        raise BrokerError("no session")

    if broken == "queue":
        bench.queue_depth = fail
    else:
        bench.http.fail({"vllm": VLLM_URL, "dcgm": DCGM_URL}[broken], HttpUnreachable("connection refused"))
    bench.reporter.flush()
    [document] = bench.documents
    unknown = {name for name in ("model_metrics", "gpus", "queue") if document[name] is None}
    assert unknown == {{"vllm": "model_metrics", "dcgm": "gpus", "queue": "queue"}[broken]}


def test_a_hanging_source_delays_no_other_source_or_sink_beyond_its_bound(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(http_timeout_s=SHORT_TIMEOUT_S)
    bench.http.hang(VLLM_URL)
    bench.buffer.append_usage(_event(0))
    bench.reporter.flush()
    bench.http.wait_for(EVENTS_URL, 1)
    [document] = bench.documents
    assert document["model_metrics"] is None
    assert document["gpus"] is not None
    assert document["queue"] is not None
    # still hanging: it is not asked a second time, so that calls do not pile up
    bench.reporter.flush()
    assert len(bench.documents) == 2
    assert len(bench.http.requests(VLLM_URL)) == 1


def test_the_queue_is_told_how_long_it_may_take(bench: Bench) -> None:
    waits: list[float] = []

    def ask(wait_s: float) -> QueueDepth | None:
        waits.append(wait_s)
        return None

    bench.queue_depth = ask
    bench.reporter.flush()
    assert waits == [5.0]
    assert bench.documents[0]["queue"] is None


def test_a_source_is_logged_when_it_fails_and_when_it_is_back(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench.http.fail(DCGM_URL, HttpUnreachable("connection refused"))
    for _ in range(5):
        bench.reporter.flush()
    bench.http.answer(DCGM_URL, 200, DCGM_PAGE)
    bench.reporter.flush()
    bench.reporter.flush()
    assert _events(caplog) == [("WARNING", "metrics_source_failed"), ("INFO", "metrics_source_recovered")]


def test_a_bug_in_a_source_comes_out_of_the_tick(bench: Bench) -> None:
    def fail(wait_s: float) -> QueueDepth | None:
        raise ZeroDivisionError

    bench.queue_depth = fail
    with pytest.raises(ZeroDivisionError):
        bench.reporter.flush()
    bench.queue_depth = lambda wait_s: None  # for the last flush, at the end of the test


# -- MetricServer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status_code", [302, 401, 413, 500, 503])
def test_a_batch_that_metric_server_does_not_take_is_dropped(
    bench: Bench, status_code: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench.http.answer(METRICS_URL, status_code)
    bench.buffer.append(_record(0))
    bench.reporter.flush()
    bench.http.answer(METRICS_URL, 200)
    bench.buffer.append(_record(1))
    bench.reporter.flush()
    assert [[entry["request_id"] for entry in document["requests"]] for document in bench.documents] == [["r0"], ["r1"]]
    [failed] = [record for record in caplog.records if vars(record)["event"] == "metrics_flush_failed"]
    assert vars(failed)["status_code"] == status_code
    assert vars(failed)["records_dropped"] == 1
    assert bench.reporter.flush_failures == {"metric_server": 1, "croesus": 0}


def test_a_failing_metric_server_is_logged_once_then_every_tenth_time_and_when_it_is_back(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench.http.fail(METRICS_URL, HttpUnreachable("connection refused"))
    for _ in range(25):
        bench.reporter.flush()
    bench.http.answer(METRICS_URL, 200)
    for _ in range(2):
        bench.reporter.flush()
    assert _events(caplog) == [("WARNING", "metrics_flush_failed")] * 3 + [("INFO", "metrics_flush_recovered")]
    assert [vars(record)["failures"] for record in caplog.records] == [1, 10, 20, 25]


def test_a_hanging_metric_server_delays_neither_croesus_nor_the_next_turn(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(http_timeout_s=SHORT_TIMEOUT_S)
    bench.http.hang(METRICS_URL)
    for number in range(3):
        bench.buffer.append(_record(number))
        bench.buffer.append_usage(_event(number))
        bench.flush()
    assert bench.offered_ids == ["r0", "r1", "r2"]
    assert len(bench.http.requests(METRICS_URL)) == 1
    assert bench.buffer.record_depth == 0
    assert bench.reporter.flush_failures["metric_server"] == 3


def test_a_document_that_was_dropped_behind_a_hanging_one_is_not_sent_later(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(http_timeout_s=SHORT_TIMEOUT_S)
    bench.http.hang(METRICS_URL)
    for number in range(3):
        bench.buffer.append(_record(number))
        bench.reporter.flush()
    bench.http.answer(METRICS_URL, 200)
    bench.http.release()
    for _ in range(10_000):
        if len(bench.documents) >= 3:
            break
        bench.reporter.flush()
    assert [document["requests"] for document in bench.documents[1:]] == [[], []]


def test_a_hanging_croesus_does_not_delay_metric_server(bench: Bench) -> None:
    bench.http.hang(EVENTS_URL)
    for number in range(3):
        bench.buffer.append_usage(_event(number))
        bench.reporter.flush()
    assert len(bench.documents) == 3
    assert len(bench.http.wait_for(EVENTS_URL, 1)) == 1
    assert bench.waiting_ids == ["r0", "r1", "r2"]


# -- Croesus ----------------------------------------------------------------------------------------------------------


def test_each_event_is_a_request_of_its_own_and_leaves_when_it_is_accepted(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(events_token="events-secret")
    for number in range(3):
        bench.buffer.append_usage(_event(number))
    bench.flush()
    requests = bench.http.requests(EVENTS_URL)
    assert [request.event_ids for request in requests] == [["r0"], ["r1"], ["r2"]]
    assert {request.headers["Content-Type"] for request in requests} == {"application/cloudevents+json"}
    assert {request.headers["Authorization"] for request in requests} == {"Bearer events-secret"}
    assert bench.buffer.usage_depth == 0


def test_without_a_croesus_token_none_is_sent(bench: Bench) -> None:
    bench.buffer.append_usage(_event(0))
    bench.flush()
    assert "Authorization" not in bench.http.requests(EVENTS_URL)[0].headers


@pytest.mark.parametrize(
    ("flush_interval_s", "pauses_s"),
    [
        pytest.param(30.0, [0.002, 0.002, 0.002], id="time enough: the longest"),
        pytest.param(0.006, [0.001, 0.0015, 0.002], id="little time: half of it"),
    ],
)
def test_a_round_with_time_leaves_the_interpreter_to_the_requests_between_two_events(
    make_bench: Callable[..., Bench], flush_interval_s: float, pauses_s: list[float]
) -> None:
    bench = make_bench(flush_interval_s=flush_interval_s)
    for number in range(4):
        bench.buffer.append_usage(_event(number))
    bench.reporter.flush()
    bench.http.wait_for(EVENTS_URL, 4)
    bench.flush()
    assert bench.pauses_s == pytest.approx(pauses_s)


def test_a_round_that_is_late_rests_no_more(bench: Bench) -> None:
    def takes_six_s(request: Request) -> int:
        bench.monotonic.at += 6.0
        return 202

    bench.http.answer_by(EVENTS_URL, takes_six_s)
    for number in range(4):
        bench.buffer.append_usage(_event(number))
    bench.reporter.flush()
    bench.http.wait_for(EVENTS_URL, 4)
    assert bench.pauses_s == []


def test_the_last_round_and_those_while_draining_do_not_rest(bench: Bench) -> None:
    for number in range(4):
        bench.buffer.append_usage(_event(number))
    bench.reporter.drain()
    bench.reporter.tick(51.0)
    bench.http.wait_for(EVENTS_URL, 4)
    for number in range(4, 8):
        bench.buffer.append_usage(_event(number))
    bench.reporter.close()
    assert bench.offered_ids == [f"r{number}" for number in range(8)]
    assert bench.pauses_s == []


def test_events_go_in_batches_of_at_most_the_batch_size(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(croesus_batch_size=3)
    for number in range(7):
        bench.buffer.append_usage(_event(number))
    bench.flush()
    requests = bench.http.requests(EVENTS_URL)
    assert [request.event_ids for request in requests] == [["r0", "r1", "r2"], ["r3", "r4", "r5"], ["r6"]]
    assert {request.headers["Content-Type"] for request in requests} == {"application/cloudevents-batch+json"}
    assert bench.buffer.usage_depth == 0


@pytest.mark.parametrize("trouble", [301, 401, 403, 404, 429, 500, 502, 503, HttpTimeout("no answer in time")])
def test_events_stay_and_the_round_ends_when_croesus_is_unavailable(bench: Bench, trouble: int | Exception) -> None:
    if isinstance(trouble, Exception):
        bench.http.fail(EVENTS_URL, trouble)
    else:
        bench.http.answer(EVENTS_URL, trouble)
    for number in range(3):
        bench.buffer.append_usage(_event(number))
    bench.flush()
    assert bench.offered_ids == ["r0"]
    assert bench.waiting_ids == ["r0", "r1", "r2"]
    bench.http.answer(EVENTS_URL, 200)
    bench.flush()
    assert sorted(bench.offered_ids[1:]) == ["r0", "r1", "r2"]
    assert bench.buffer.usage_depth == 0


def test_what_croesus_accepted_before_it_failed_is_not_sent_again(bench: Bench) -> None:
    bench.http.answer_by(EVENTS_URL, lambda request: 200 if request.event_ids == ["r0"] else 503)
    for number in range(3):
        bench.buffer.append_usage(_event(number))
    bench.flush()
    assert bench.waiting_ids == ["r1", "r2"]


def test_r74_an_event_goes_again_as_it_was(bench: Bench) -> None:
    bench.http.answer(EVENTS_URL, 500)
    bench.buffer.append_usage(_event(0))
    bench.flush()
    bench.flush()
    first, second = bench.http.requests(EVENTS_URL)
    assert first.body == second.body


def test_a_conflict_means_that_croesus_has_the_event_and_in_a_batch_each_is_asked_for_alone() -> None:
    assert classify_croesus_status(409) is Verdict.ACCEPTED
    assert classify_croesus_status(409, event_count=2) is Verdict.REFUSED


@pytest.mark.parametrize("status_code", [400, 413, 422])
def test_a_refused_event_stays_and_does_not_block_the_others(
    bench: Bench, status_code: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench.http.answer_by(EVENTS_URL, lambda request: status_code if request.event_ids == ["r0"] else 200)
    for number in range(3):
        bench.buffer.append_usage(_event(number))
    bench.flush()
    assert bench.waiting_ids == ["r0"]
    bench.buffer.append_usage(_event(3))
    bench.flush()
    # it is offered again, after the others, and said only once
    assert bench.offered_ids == ["r0", "r1", "r2", "r3", "r0"]
    [refused] = [record for record in caplog.records if vars(record)["event"] == "usage_event_refused"]
    assert refused.levelname == "ERROR"
    assert vars(refused)["request_id"] == "r0"
    assert vars(refused)["status_code"] == status_code
    bench.http.answer(EVENTS_URL, 200)
    bench.flush()
    assert bench.buffer.usage_depth == 0


def test_a_refused_batch_is_offered_event_by_event(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(croesus_batch_size=4)
    bench.http.answer_by(EVENTS_URL, lambda request: 400 if "r1" in request.event_ids else 200)
    for number in range(8):
        bench.buffer.append_usage(_event(number))
    bench.flush()
    assert [request.event_ids for request in bench.http.requests(EVENTS_URL)] == [
        ["r0", "r1", "r2", "r3"],
        ["r4", "r5", "r6", "r7"],
        ["r0"],
        ["r1"],
        ["r2"],
        ["r3"],
    ]
    assert bench.waiting_ids == ["r1"]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_event_that_croesus_fails_on_with_500_does_not_block_the_others(
    make_bench: Callable[..., Bench], batch_size: int
) -> None:
    bench = make_bench(croesus_batch_size=batch_size)
    bench.http.answer_by(EVENTS_URL, lambda request: 500 if "r1" in request.event_ids else 200)
    for number in range(8):
        bench.buffer.append_usage(_event(number))
    for _ in range(4):
        bench.flush()
    assert bench.waiting_ids == ["r1"]


def test_a_croesus_that_refuses_everything_is_not_flooded_and_every_event_has_its_turn(bench: Bench) -> None:
    bench.http.answer(EVENTS_URL, 400)
    for number in range(25):
        bench.buffer.append_usage(_event(number))
    for _ in range(3):
        bench.flush()
    assert len(bench.offered_ids) == 30
    assert set(bench.offered_ids) == set(_ids(range(25)))
    bench.http.answer(EVENTS_URL, 200)
    bench.flush()
    assert bench.buffer.usage_depth == 0


def test_events_refused_among_accepted_ones_do_not_end_the_round(bench: Bench) -> None:
    bench.http.answer_by(EVENTS_URL, lambda request: 400 if int(request.event_ids[0][1:]) % 2 else 200)
    for number in range(30):
        bench.buffer.append_usage(_event(number))
    bench.flush()
    assert bench.offered_ids == _ids(range(30))
    assert bench.waiting_ids == _ids(range(1, 30, 2))


def test_a_request_that_was_refused_once_and_then_accepted_is_no_longer_set_aside(bench: Bench) -> None:
    bench.http.answer(EVENTS_URL, 400)
    bench.buffer.append_usage(_event(0))
    bench.flush()
    bench.http.answer(EVENTS_URL, 200)
    bench.flush()
    for numbers in ([1], [0, 2]):
        for number in numbers:
            bench.buffer.append_usage(_event(number))
        bench.flush()
    assert bench.offered_ids == ["r0", "r0", "r1", "r0", "r2"]


def test_a_round_ends_when_the_flush_interval_is_over(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(flush_interval_s=10.0)

    def take_four_seconds(request: Request) -> int:
        bench.monotonic.at += 4.0
        return 200

    bench.http.answer_by(EVENTS_URL, take_four_seconds)
    for number in range(9):
        bench.buffer.append_usage(_event(number))
    bench.reporter.flush()
    requests = bench.http.wait_for(EVENTS_URL, 3)
    bench.flush()  # waits for the round, then makes another, of LONG_TIMEOUT_S
    assert [request.timeout_s for request in requests] == [5.0, 5.0, 2.0]
    assert bench.offered_ids == _ids(range(9))


def test_a_failing_croesus_is_logged_once_then_every_tenth_time_and_when_it_is_back(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench.http.answer(EVENTS_URL, 503)
    bench.buffer.append_usage(_event(0))
    for _ in range(12):
        bench.flush()
    bench.http.answer(EVENTS_URL, 200)
    bench.flush()
    events = [event for event in _events(caplog) if event[1] != "usage_lost"]
    assert events == [("WARNING", "usage_flush_failed")] * 2 + [("INFO", "usage_flush_recovered")]
    assert bench.reporter.flush_failures == {"metric_server": 0, "croesus": 12}


@pytest.mark.parametrize(
    ("status_codes", "verdict"),
    [
        ((200, 201, 202, 204, 409), Verdict.ACCEPTED),
        ((400, 413, 422), Verdict.REFUSED),
        ((301, 302, 307, 401, 403, 404, 405, 408, 429, 500, 502, 503, 504), Verdict.UNAVAILABLE),
    ],
)
def test_what_a_status_of_croesus_means(status_codes: tuple[int, ...], verdict: Verdict) -> None:
    assert {classify_croesus_status(status_code) for status_code in status_codes} == {verdict}


def test_r71_sinks_that_are_down_for_ten_minutes_cost_bounded_memory_and_no_usage_that_still_fits(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(max_records=1000, max_usage_events=2000, croesus_batch_size=100)
    bench.http.answer(METRICS_URL, 503)
    bench.http.answer(EVENTS_URL, 503)
    now, made_count = 50.0, 0
    bench.reporter.tick(now)
    # 50 records a second for ten minutes: 1,500 between two flushes
    for _ in range(20):
        for _ in range(1500):
            bench.buffer.append(_record(made_count))
            bench.buffer.append_usage(_event(made_count))
            made_count += 1
        assert bench.buffer.record_depth <= 1000
        assert bench.buffer.usage_depth <= 2000
        now += 30.0
        bench.reporter.tick(now)
    assert made_count == 30_000
    assert bench.buffer.usage_dropped_total == 28_000
    assert sum(len(document["requests"]) + document["requests_dropped"] for document in bench.documents) == 30_000
    assert max(len(document["requests"]) for document in bench.documents) == 1000
    bench.http.answer(METRICS_URL, 413)
    bench.http.answer(EVENTS_URL, 413)
    bench.flush()
    assert bench.buffer.usage_depth == 2000
    bench.http.answer(METRICS_URL, 200)
    bench.http.answer(EVENTS_URL, 200)
    sent_before = len(bench.http.requests(EVENTS_URL))
    bench.flush()
    recovered = bench.http.requests(EVENTS_URL)[sent_before:]
    assert max(len(request.event_ids) for request in recovered) <= 100
    ids = [event_id for request in recovered for event_id in request.event_ids]
    assert sorted(ids) == sorted(_ids(range(28_000, 30_000)))
    assert bench.buffer.usage_depth == 0
    assert bench.documents[-1]["requests"] == []


# -- the end ----------------------------------------------------------------------------------------------------------


def test_the_last_flush_sends_what_came_while_an_older_round_was_running(bench: Bench) -> None:
    gate = threading.Event()

    def hold_the_first(request: Request) -> int:
        if request.event_ids == ["r0"]:
            gate.wait(LONG_TIMEOUT_S)
        return 200

    def open_gate(request: Request) -> int:
        gate.set()
        return 200

    bench.http.answer_by(EVENTS_URL, hold_the_first)
    bench.buffer.append_usage(_event(0))
    bench.reporter.flush()
    bench.http.wait_for(EVENTS_URL, 1)
    bench.buffer.append_usage(_event(1))
    bench.http.answer_by(METRICS_URL, open_gate)
    bench.flush()
    assert bench.offered_ids == ["r0", "r1"]
    assert bench.buffer.usage_depth == 0


def test_the_last_flush_brings_the_end_of_a_running_round_forward(bench: Bench) -> None:
    gate = threading.Event()

    def take_a_second(request: Request) -> int:
        gate.wait(LONG_TIMEOUT_S)
        bench.monotonic.at += 1.0
        return 200

    def open_gate(request: Request) -> int:
        gate.set()
        return 200

    bench.http.answer_by(EVENTS_URL, take_a_second)
    for number in range(9):
        bench.buffer.append_usage(_event(number))
    bench.reporter.flush()
    bench.http.wait_for(EVENTS_URL, 1)
    bench.http.answer_by(METRICS_URL, open_gate)
    bench.reporter.flush(final=True)
    assert [request.timeout_s for request in bench.http.wait_for(EVENTS_URL, 3)][:3] == [5.0, 2.0, 1.0]


def test_usage_that_the_last_flush_could_not_send_is_said_at_error(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.http.answer(EVENTS_URL, 503)
    for number in range(3):
        bench.buffer.append_usage(_event(number))
    bench.reporter.flush(final=True)
    [lost] = [record for record in caplog.records if vars(record)["event"] == "usage_lost"]
    assert (lost.levelname, vars(lost)["usage_events"]) == ("ERROR", 3)


def test_the_last_flush_shares_three_seconds_among_all_it_does(bench: Bench) -> None:
    bench.buffer.append_usage(_event(0))
    bench.reporter.close()
    assert bench.http.requests(VLLM_URL)[0].timeout_s == 1.0
    assert bench.http.requests(METRICS_URL)[0].timeout_s == 2.0
    assert bench.http.requests(EVENTS_URL)[0].timeout_s == 3.0


def test_neighbours_that_hang_for_ever_do_not_keep_the_process() -> None:
    """As a process of its own: whether threads keep one from ending shows nowhere else."""
    script = textwrap.dedent(
        """
        import threading
        from inference_worker.documents import HealthSnapshot, UsageData, UsageEvent
        from inference_worker.metrics_buffer import MetricsBuffer
        from inference_worker.metrics_reporter import MetricsReporter, ReporterSettings
        from inference_worker.usage_sender import UsageSender, UsageSettings

        class Hanging:
            def exchange(self, method, url, *, headers, body, timeout_s):
                threading.Event().wait()

        settings = ReporterSettings(
            deployment_id="d", replica_id="r", user_id="u", org_id="", model="m", worker_version="1",
            metrics_url="m", metrics_token="t", flush_interval_s=30.0, http_timeout_s=5.0,
            vllm_metrics_url="v", dcgm_metrics_url="d",
        )
        usage_settings = UsageSettings(events_url="e", http_timeout_s=5.0, batch_size=1)
        buffer = MetricsBuffer(max_records=10)
        data = UsageData(
            request_id="r", deployment_id="d", replica_id="r", user_id="u", org_id="", model="m",
            prompt_tokens=1, completion_tokens=1, total_tokens=2, cached_tokens=None,
        )
        buffer.append_usage(UsageEvent(1.0, data))
        reporter = MetricsReporter(
            settings=settings, buffer=buffer, http=Hanging(),
            usage=UsageSender(usage_settings, buffer=buffer, http=Hanging()),
            health=lambda: HealthSnapshot(False, 0.0, ""), queue_depth=lambda wait_s: threading.Event().wait(),
        )
        reporter.close(budget_s=0.3)
        print("ended", buffer.usage_depth)
        """
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=LONG_TIMEOUT_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "ended 1\n"), ended.stderr


# -- what is not said -------------------------------------------------------------------------------------------------


def test_no_token_is_in_any_log_line_or_repr(
    make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    bench = make_bench(events_token="events-secret")
    for url in (VLLM_URL, DCGM_URL):
        bench.http.fail(url, HttpUnreachable("connection refused"))
    bench.http.answer(METRICS_URL, 401)
    bench.http.answer(EVENTS_URL, 400)
    bench.buffer.append_usage(_event(0))
    bench.flush()
    bench.http.answer(EVENTS_URL, 401)
    bench.flush()
    assert len(caplog.records) >= 5
    said = repr(bench.settings) + repr(bench.usage_settings) + "".join(repr(vars(record)) for record in caplog.records)
    assert "secret" not in said
