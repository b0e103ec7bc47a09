"""Pauses double from failure to failure, end at their limit, and begin anew after a success."""

from __future__ import annotations

from inference_worker.growing_pause import GrowingPause


def test_pauses_double_up_to_the_limit() -> None:
    pause = GrowingPause(1.0, max_s=10.0)
    assert [pause.next_s() for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_after_a_success_they_begin_anew() -> None:
    pause = GrowingPause(0.5, max_s=10.0)
    pause.next_s()
    pause.next_s()
    pause.reset()
    assert pause.next_s() == 0.5


def test_free_failures_cost_no_pause_and_count_for_none() -> None:
    pause = GrowingPause(1.0, max_s=10.0, free_count=1)
    assert [pause.next_s() for _ in range(4)] == [0.0, 1.0, 2.0, 4.0]


def test_a_limit_below_the_first_pause_holds_from_the_start() -> None:
    assert GrowingPause(1.0, max_s=0.2).next_s() == 0.2


def test_an_endless_outage_overflows_nothing() -> None:
    pause = GrowingPause(1.0, max_s=30.0)
    assert {pause.next_s() for _ in range(5000)} == {1.0, 2.0, 4.0, 8.0, 16.0, 30.0}
