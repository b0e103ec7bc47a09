"""The bounded buffer between the slots and the reporter."""

from __future__ import annotations

import json
import threading

from inference_worker.documents import InferenceRequestRecord, UsageData, UsageEvent
from inference_worker.metrics_buffer import MetricsBuffer

#: longer than any machine needs; it only passes when a test fails
LONG_TIMEOUT_S = 30.0


def _record(number: int) -> InferenceRequestRecord:
    return InferenceRequestRecord(
        request_id=f"r{number}",
        received_at=None,
        started_at=0.0,
        finished_at=0.0,
        queue_wait_s=None,
        model_latency_s=None,
        total_latency_s=0.0,
        status=None,
        status_code=None,
        error_type=None,
        disposition="ack",
        retry_count=0,
        streamed=False,
    )


def _event(number: int) -> UsageEvent:
    return UsageEvent(
        completed_at=1.0,
        data=UsageData(
            request_id=f"r{number}",
            deployment_id="d",
            replica_id="r",
            user_id="u",
            org_id="",
            model="m",
            prompt_tokens=1,
            completion_tokens=2,
            total_tokens=3,
            cached_tokens=None,
        ),
    )


def _ids(items: list[bytes] | list[UsageEvent]) -> list[str]:
    return [item.data.request_id if isinstance(item, UsageEvent) else json.loads(item)["request_id"] for item in items]


def test_records_are_taken_once_and_in_order() -> None:
    buffer = MetricsBuffer(max_records=10)
    for number in range(3):
        buffer.append(_record(number))
    records, dropped_count = buffer.take_records()
    assert _ids(records) == ["r0", "r1", "r2"]
    assert dropped_count == 0
    assert buffer.take_records() == ([], 0)


def test_r71_a_full_buffer_drops_the_oldest_records_and_counts_them_once() -> None:
    buffer = MetricsBuffer(max_records=3)
    for number in range(5):
        buffer.append(_record(number))
    assert buffer.record_depth == 3
    records, dropped_count = buffer.take_records()
    assert _ids(records) == ["r2", "r3", "r4"]
    assert dropped_count == 2
    buffer.append(_record(5))
    assert buffer.take_records()[1] == 0


def test_half_full_is_told_once_from_one_take_to_the_next() -> None:
    told = []
    buffer = MetricsBuffer(max_records=4, on_half_full=lambda: told.append(buffer.record_depth))
    buffer.append(_record(0))
    assert told == []
    for number in range(1, 9):
        buffer.append(_record(number))
    assert told == [2]
    buffer.take_records()
    buffer.append(_record(9))
    assert told == [2]
    buffer.append(_record(10))
    assert told == [2, 2]


def test_half_full_is_told_outside_the_lock() -> None:
    taken: list[int] = []
    buffer = MetricsBuffer(max_records=2, on_half_full=lambda: taken.append(len(buffer.take_records()[0])))
    thread = threading.Thread(target=lambda: buffer.append(_record(0)), daemon=True)
    thread.start()
    thread.join(LONG_TIMEOUT_S)
    assert taken == [1]


def test_usage_stays_until_it_is_dropped_by_the_one_who_peeked() -> None:
    buffer = MetricsBuffer(max_records=1)
    for number in range(3):
        buffer.append_usage(_event(number))
    first_two = buffer.peek_usage(2)
    assert _ids(first_two) == ["r0", "r1"]
    assert buffer.usage_depth == 3
    buffer.append_usage(_event(3))
    buffer.drop_usage(first_two)
    assert _ids(buffer.peek_usage(10)) == ["r2", "r3"]


def test_usage_that_is_set_aside_stands_in_nobodys_way_and_stays_until_it_is_dropped() -> None:
    buffer = MetricsBuffer(max_records=1)
    for number in range(4):
        buffer.append_usage(_event(number))
    first_two = buffer.peek_usage(2)
    buffer.set_usage_aside(first_two)
    buffer.set_usage_aside(first_two)
    assert _ids(buffer.peek_usage(10)) == ["r2", "r3"]
    assert _ids(buffer.peek_usage_aside()) == ["r0", "r1"]
    assert buffer.usage_depth == 4
    buffer.drop_usage(buffer.peek_usage(1))
    buffer.drop_usage(first_two[1:])
    assert _ids(buffer.peek_usage(10)) == ["r3"]
    assert _ids(buffer.peek_usage_aside()) == ["r0"]


def test_r71_when_full_usage_that_is_set_aside_is_dropped_first() -> None:
    buffer = MetricsBuffer(max_records=1, max_usage_events=3)
    for number in range(3):
        buffer.append_usage(_event(number))
    buffer.set_usage_aside(buffer.peek_usage(2))
    for number in (3, 4, 5):
        buffer.append_usage(_event(number))
    assert _ids(buffer.peek_usage_aside()) == []
    assert _ids(buffer.peek_usage(10)) == ["r3", "r4", "r5"]
    assert buffer.usage_dropped_total == 3


def test_r71_usage_that_fell_out_meanwhile_takes_no_other_event_with_it() -> None:
    buffer = MetricsBuffer(max_records=1, max_usage_events=2)
    buffer.append_usage(_event(0))
    buffer.append_usage(_event(1))
    in_flight = buffer.peek_usage(2)
    buffer.append_usage(_event(2))
    assert buffer.usage_dropped_total == 1
    buffer.drop_usage(in_flight)
    assert _ids(buffer.peek_usage(10)) == ["r2"]
    assert buffer.usage_depth == 1


def test_equal_usage_events_of_two_deliveries_are_told_apart() -> None:
    buffer = MetricsBuffer(max_records=1)
    buffer.append_usage(_event(0))
    accepted = buffer.peek_usage(1)
    buffer.append_usage(_event(0))
    buffer.drop_usage(accepted)
    assert buffer.usage_depth == 1


def test_nothing_is_lost_or_counted_twice_when_many_threads_append() -> None:
    buffer = MetricsBuffer(max_records=50)
    taken_count = 0
    done = threading.Event()

    def take() -> None:
        nonlocal taken_count
        while not done.is_set():
            records, dropped_count = buffer.take_records()
            taken_count += len(records) + dropped_count

    taker = threading.Thread(target=take)
    slots = [threading.Thread(target=lambda: [buffer.append(_record(n)) for n in range(1000)]) for _ in range(8)]
    for thread in (taker, *slots):
        thread.start()
    for thread in slots:
        thread.join(LONG_TIMEOUT_S)
    done.set()
    taker.join(LONG_TIMEOUT_S)
    records, dropped_count = buffer.take_records()
    assert taken_count + len(records) + dropped_count == 8000
