"""A busy model whose counters stand still has stalled; everything else has not."""

from __future__ import annotations

from inference_worker.stall_watch import StallWatch


def looks(*seen: tuple[float, int, float | None]) -> list[float | None]:
    watch = StallWatch(20.0)
    return [watch.observe(now, in_work_count=in_work, tokens=tokens) for now, in_work, tokens in seen]


def test_r47_counters_that_stand_still_while_requests_are_in_work_are_a_stall() -> None:
    assert looks((0, 1, 100.0), (10, 1, 100.0), (20, 1, 100.0), (30, 1, 100.0)) == [None, None, 20, 30]


def test_movement_ends_a_stall_and_the_time_counts_anew() -> None:
    assert looks((0, 1, 1.0), (20, 1, 1.0), (25, 1, 2.0), (40, 1, 2.0), (45, 1, 2.0)) == [None, 20, None, None, 20]


def test_an_idle_model_does_not_stall() -> None:
    assert looks((0, 0, 1.0), (100, 0, 1.0), (200, 1, 1.0), (219, 1, 1.0)) == [None] * 4


def test_no_counters_no_stall() -> None:
    assert looks((0, 1, None), (100, 1, None)) == [None, None]


def test_r72_counters_that_begin_at_0_again_are_movement() -> None:
    assert looks((0, 1, 1000.0), (19, 1, 0.0), (25, 1, 0.0)) == [None] * 3
