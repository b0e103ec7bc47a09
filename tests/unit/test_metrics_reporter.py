"""Flushing to MetricServer and Croesus, with sources and sinks that fail, refuse and hang."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest

from inference_worker.documents import (
    MetricsDocument,
    QueueDepth,
    json_schema,
)
from inference_worker.errors import BrokerError, HttpUnreachable
from tests.fakes.reporting import (
    DCGM_PAGE,
    DCGM_URL,
    EVENTS_URL,
    LONG_TIMEOUT_S,
    METRICS_URL,
    SHORT_TIMEOUT_S,
    VLLM_PAGE,
    VLLM_URL,
    Bench,
    Request,
    ids_of,
    logged_events,
    make_event,
    make_record,
    making_benches,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    with making_benches() as make:
        yield make


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


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
    bench.buffer.append(make_record(0))
    assert not bench.reporter.wakeup.is_set()
    bench.buffer.append(make_record(1))
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
    bench.buffer.append_usage(make_event(0))
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
    bench.buffer.append(make_record(0))
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
    bench.buffer.append(make_record(0))
    bench.buffer.append_usage(make_event(0))
    bench.reporter.drain()
    bench.flush()
    [document] = bench.documents
    assert document["model_metrics"] is not None
    assert len(document["requests"]) == 1
    assert bench.buffer.usage_depth == 0


# -- the document -----------------------------------------------------------------------------------------------------


def test_the_document_has_everything_and_is_valid(bench: Bench) -> None:
    bench.buffer.append(make_record())
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
    bench.buffer.append(make_record())
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
    bench.buffer.append_usage(make_event(0))
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
    assert logged_events(caplog) == [("WARNING", "metrics_source_failed"), ("INFO", "metrics_source_recovered")]


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
    bench.buffer.append(make_record(0))
    bench.reporter.flush()
    bench.http.answer(METRICS_URL, 200)
    bench.buffer.append(make_record(1))
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
    assert logged_events(caplog) == [("WARNING", "metrics_flush_failed")] * 3 + [("INFO", "metrics_flush_recovered")]
    assert [vars(record)["failures"] for record in caplog.records] == [1, 10, 20, 25]


def test_a_hanging_metric_server_delays_neither_croesus_nor_the_next_turn(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(http_timeout_s=SHORT_TIMEOUT_S)
    bench.http.hang(METRICS_URL)
    for number in range(3):
        bench.buffer.append(make_record(number))
        bench.buffer.append_usage(make_event(number))
        bench.flush()
    assert bench.offered_ids == ["r0", "r1", "r2"]
    assert len(bench.http.requests(METRICS_URL)) == 1
    assert bench.buffer.record_depth == 0
    assert bench.reporter.flush_failures["metric_server"] == 3


def test_a_document_that_was_dropped_behind_a_hanging_one_is_not_sent_later(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(http_timeout_s=SHORT_TIMEOUT_S)
    bench.http.hang(METRICS_URL)
    for number in range(3):
        bench.buffer.append(make_record(number))
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
        bench.buffer.append_usage(make_event(number))
        bench.reporter.flush()
    assert len(bench.documents) == 3
    assert len(bench.http.wait_for(EVENTS_URL, 1)) == 1
    assert bench.waiting_ids == ["r0", "r1", "r2"]


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
            bench.buffer.append(make_record(made_count))
            bench.buffer.append_usage(make_event(made_count))
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
    assert sorted(ids) == sorted(ids_of(range(28_000, 30_000)))
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
    bench.buffer.append_usage(make_event(0))
    bench.reporter.flush()
    bench.http.wait_for(EVENTS_URL, 1)
    bench.buffer.append_usage(make_event(1))
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
        bench.buffer.append_usage(make_event(number))
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
        bench.buffer.append_usage(make_event(number))
    bench.reporter.flush(final=True)
    [lost] = [record for record in caplog.records if vars(record)["event"] == "usage_lost"]
    assert (lost.levelname, vars(lost)["usage_events"]) == ("ERROR", 3)


def test_the_last_flush_shares_three_seconds_among_all_it_does(bench: Bench) -> None:
    bench.buffer.append_usage(make_event(0))
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
    bench.buffer.append_usage(make_event(0))
    bench.flush()
    bench.http.answer(EVENTS_URL, 401)
    bench.flush()
    assert len(caplog.records) >= 5
    said = repr(bench.settings) + repr(bench.usage_settings) + "".join(repr(vars(record)) for record in caplog.records)
    assert "secret" not in said
