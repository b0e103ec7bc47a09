"""Usage events on their way to Croesus: each goes until it is accepted, and none stands in another's way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from inference_worker.errors import HttpTimeout
from inference_worker.usage_sender import Verdict, classify_croesus_status
from tests.fakes.reporting import (
    EVENTS_URL,
    Bench,
    Request,
    ids_of,
    logged_events,
    make_event,
    making_benches,
)


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    with making_benches() as make:
        yield make


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


def test_each_event_is_a_request_of_its_own_and_leaves_when_it_is_accepted(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(events_token="events-secret")
    for number in range(3):
        bench.buffer.append_usage(make_event(number))
    bench.flush()
    requests = bench.http.requests(EVENTS_URL)
    assert [request.event_ids for request in requests] == [["r0"], ["r1"], ["r2"]]
    assert {request.headers["Content-Type"] for request in requests} == {"application/cloudevents+json"}
    assert {request.headers["Authorization"] for request in requests} == {"Bearer events-secret"}
    assert bench.buffer.usage_depth == 0


def test_without_a_croesus_token_none_is_sent(bench: Bench) -> None:
    bench.buffer.append_usage(make_event(0))
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
        bench.buffer.append_usage(make_event(number))
    bench.reporter.flush()
    bench.http.wait_for(EVENTS_URL, 4)
    bench.flush()
    assert bench.pauses_s == pytest.approx(pauses_s)


def test_a_round_rests_less_when_more_has_come_meanwhile(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(flush_interval_s=0.006)

    def two_more_with_the_first(request: Request) -> int:
        if request.event_ids == ["r0"]:
            bench.buffer.append_usage(make_event(4))
            bench.buffer.append_usage(make_event(5))
        return 202

    bench.http.answer_by(EVENTS_URL, two_more_with_the_first)
    for number in range(4):
        bench.buffer.append_usage(make_event(number))
    bench.reporter.flush()
    bench.http.wait_for(EVENTS_URL, 6)
    bench.flush()
    # half of the round's 6 ms for the 5, 4, 3, 2 that wait after each; 2 ms are the longest
    assert bench.pauses_s == pytest.approx([0.0006, 0.00075, 0.001, 0.0015, 0.002])


def test_a_round_goes_on_with_what_came_meanwhile_after_what_was_set_aside_had_its_turn(bench: Bench) -> None:
    def another_with_each(request: Request) -> int:
        [event_id] = request.event_ids
        if event_id in ("r1", "r2", "r3"):
            bench.buffer.append_usage(make_event(int(event_id[1:]) + 1))
        return 400 if event_id == "r0" else 202

    bench.http.answer(EVENTS_URL, 400)
    bench.buffer.append_usage(make_event(0))
    bench.flush()
    bench.http.answer_by(EVENTS_URL, another_with_each)
    bench.buffer.append_usage(make_event(1))
    bench.reporter.flush()
    requests = bench.http.wait_for(EVENTS_URL, 6)
    assert [request.event_ids for request in requests] == [["r0"], ["r1"], ["r0"], ["r2"], ["r3"], ["r4"]]


def test_a_round_that_is_late_rests_no_more(bench: Bench) -> None:
    def takes_six_s(request: Request) -> int:
        bench.monotonic.at += 6.0
        return 202

    bench.http.answer_by(EVENTS_URL, takes_six_s)
    for number in range(4):
        bench.buffer.append_usage(make_event(number))
    bench.reporter.flush()
    bench.http.wait_for(EVENTS_URL, 4)
    assert bench.pauses_s == []


def test_the_last_round_and_those_while_draining_do_not_rest(bench: Bench) -> None:
    for number in range(4):
        bench.buffer.append_usage(make_event(number))
    bench.reporter.drain()
    bench.reporter.tick(51.0)
    bench.http.wait_for(EVENTS_URL, 4)
    for number in range(4, 8):
        bench.buffer.append_usage(make_event(number))
    bench.reporter.close()
    assert bench.offered_ids == [f"r{number}" for number in range(8)]
    assert bench.pauses_s == []


def test_events_go_in_batches_of_at_most_the_batch_size(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(croesus_batch_size=3)
    for number in range(7):
        bench.buffer.append_usage(make_event(number))
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
        bench.buffer.append_usage(make_event(number))
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
        bench.buffer.append_usage(make_event(number))
    bench.flush()
    assert bench.waiting_ids == ["r1", "r2"]


def test_r74_an_event_goes_again_as_it_was(bench: Bench) -> None:
    bench.http.answer(EVENTS_URL, 500)
    bench.buffer.append_usage(make_event(0))
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
        bench.buffer.append_usage(make_event(number))
    bench.flush()
    assert bench.waiting_ids == ["r0"]
    bench.buffer.append_usage(make_event(3))
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
        bench.buffer.append_usage(make_event(number))
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
        bench.buffer.append_usage(make_event(number))
    for _ in range(4):
        bench.flush()
    assert bench.waiting_ids == ["r1"]


def test_a_croesus_that_refuses_everything_is_not_flooded_and_every_event_has_its_turn(bench: Bench) -> None:
    bench.http.answer(EVENTS_URL, 400)
    for number in range(25):
        bench.buffer.append_usage(make_event(number))
    for _ in range(3):
        bench.flush()
    assert len(bench.offered_ids) == 30
    assert set(bench.offered_ids) == set(ids_of(range(25)))
    bench.http.answer(EVENTS_URL, 200)
    bench.flush()
    assert bench.buffer.usage_depth == 0


def test_events_refused_among_accepted_ones_do_not_end_the_round(bench: Bench) -> None:
    bench.http.answer_by(EVENTS_URL, lambda request: 400 if int(request.event_ids[0][1:]) % 2 else 200)
    for number in range(30):
        bench.buffer.append_usage(make_event(number))
    bench.flush()
    assert bench.offered_ids == ids_of(range(30))
    assert bench.waiting_ids == ids_of(range(1, 30, 2))


def test_a_request_that_was_refused_once_and_then_accepted_is_no_longer_set_aside(bench: Bench) -> None:
    bench.http.answer(EVENTS_URL, 400)
    bench.buffer.append_usage(make_event(0))
    bench.flush()
    bench.http.answer(EVENTS_URL, 200)
    bench.flush()
    for numbers in ([1], [0, 2]):
        for number in numbers:
            bench.buffer.append_usage(make_event(number))
        bench.flush()
    assert bench.offered_ids == ["r0", "r0", "r1", "r0", "r2"]


def test_a_round_ends_when_the_flush_interval_is_over(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(flush_interval_s=10.0)

    def take_four_seconds(request: Request) -> int:
        bench.monotonic.at += 4.0
        return 200

    bench.http.answer_by(EVENTS_URL, take_four_seconds)
    for number in range(9):
        bench.buffer.append_usage(make_event(number))
    bench.reporter.flush()
    requests = bench.http.wait_for(EVENTS_URL, 3)
    bench.flush()  # waits for the round, then makes another, of LONG_TIMEOUT_S
    assert [request.timeout_s for request in requests] == [5.0, 5.0, 2.0]
    assert bench.offered_ids == ids_of(range(9))


def test_a_failing_croesus_is_logged_once_then_every_tenth_time_and_when_it_is_back(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench.http.answer(EVENTS_URL, 503)
    bench.buffer.append_usage(make_event(0))
    for _ in range(12):
        bench.flush()
    bench.http.answer(EVENTS_URL, 200)
    bench.flush()
    events = [event for event in logged_events(caplog) if event[1] != "usage_lost"]
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
