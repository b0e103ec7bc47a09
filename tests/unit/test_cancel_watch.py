"""What was cancelled is ended, with one look for all that runs."""

from __future__ import annotations

import threading

import pytest

from inference_worker.cancel_watch import CancelWatch
from inference_worker.deadlines import Bounded, Deadlines
from inference_worker.errors import StoreDown
from tests.timeouts import LONG_TIMEOUT_S


class Cancels:
    """Says what was cancelled, and writes down what it was asked."""

    def __init__(self, *cancelled: str) -> None:
        self.cancelled = set(cancelled)
        self.asked: list[set[str]] = []
        self.error: StoreDown | None = None

    def __call__(self, running: set[str]) -> set[str]:
        self.asked.append(running)
        if self.error is not None:
            raise self.error
        return self.cancelled & running


@pytest.fixture
def deadlines() -> Deadlines:
    return Deadlines()


def watch_of(deadlines: Deadlines, cancels: Cancels, *, interval_s: float = 60.0) -> CancelWatch:
    return CancelWatch(interval_s=interval_s, deadlines=deadlines, find_cancelled=cancels)


def test_one_look_asks_for_all_that_runs_and_ends_what_was_cancelled(deadlines: Deadlines) -> None:
    cancels, cut = Cancels("r-2", "r-9"), threading.Event()
    watch = watch_of(deadlines, cancels)
    with (
        deadlines.bound(Bounded.MODEL_CALL, 60.0, lambda: pytest.fail("r-1 was not cancelled"), name="r-1"),
        deadlines.bound(Bounded.MODEL_CALL, 60.0, cut.set, name="r-2"),
    ):
        watch.look()
    assert cancels.asked == [{"r-1", "r-2"}]
    assert cut.is_set()


def test_nothing_is_asked_while_nothing_runs(deadlines: Deadlines) -> None:
    cancels = Cancels()
    watch = watch_of(deadlines, cancels)
    with deadlines.bound(Bounded.SIDE_CALL, 60.0, lambda: None):
        watch.look()
    assert cancels.asked == []


def test_a_redis_that_is_down_cancels_nothing_and_the_next_look_does(deadlines: Deadlines) -> None:
    cancels, cut = Cancels("r-1"), threading.Event()
    watch = watch_of(deadlines, cancels)
    with deadlines.bound(Bounded.MODEL_CALL, 60.0, cut.set, name="r-1"):
        cancels.error = StoreDown("no connection")
        watch.look()
        assert not cut.is_set()
        cancels.error = None
        watch.look()
    assert cut.is_set()


def test_it_looks_again_and_again(deadlines: Deadlines) -> None:
    cancels, cut = Cancels(), threading.Event()
    watch = watch_of(deadlines, cancels, interval_s=0.01)
    watch.start()
    with deadlines.bound(Bounded.MODEL_CALL, 60.0, cut.set, name="r-1"):
        cancels.cancelled.add("r-1")
        assert cut.wait(LONG_TIMEOUT_S)
    assert watch.is_alive
