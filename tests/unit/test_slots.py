"""The pool: as many at once as there are slots, in order, and what none has begun can be taken back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import monotonic

import pytest

from inference_worker.delivery import Delivery, Session
from inference_worker.slots import Slots
from tests.fakes.steps import make_delivery
from tests.timeouts import LONG_TIMEOUT_S


class Work:
    """Works on a delivery until it is allowed to end."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.threads: list[str] = []
        self.changed = threading.Condition()
        self.may_end = threading.Semaphore(0)
        self.ended_count = 0

    def __call__(self, delivery: Delivery) -> None:
        with self.changed:
            self.begun.append(delivery.tag)
            self.threads.append(threading.current_thread().name)
            self.changed.notify_all()
        assert self.may_end.acquire(timeout=LONG_TIMEOUT_S)
        with self.changed:
            self.ended_count += 1
            self.changed.notify_all()

    def wait_begun(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= count, LONG_TIMEOUT_S)


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def slots(work: Work) -> Iterator[Slots]:
    slots = Slots(2, work)
    yield slots
    slots.stop()
    work.may_end.release(100)
    for thread in slots._threads:
        if thread.ident is not None:
            thread.join(LONG_TIMEOUT_S)
            assert not thread.is_alive()


def deliveries(count: int, session: Session | None = None) -> list[Delivery]:
    return [make_delivery(tag=tag, session=session) for tag in range(1, count + 1)]


def test_as_many_at_once_as_there_are_slots_in_the_order_they_came(slots: Slots, work: Work) -> None:
    slots.start()
    for delivery in deliveries(4):
        slots.submit(delivery)
    work.wait_begun(2)
    assert sorted(work.begun) == [1, 2]
    assert slots.in_work_count == 2
    work.may_end.release()
    work.wait_begun(3)
    work.may_end.release()
    work.wait_begun(4)
    assert work.begun[2:] == [3, 4]
    assert set(work.threads) == {"slot-0", "slot-1"}


def test_what_no_slot_has_begun_is_taken_back_in_order(slots: Slots, work: Work) -> None:
    slots.start()
    for delivery in deliveries(5):
        slots.submit(delivery)
    work.wait_begun(2)
    assert [delivery.tag for delivery in slots.take_back()] == [3, 4, 5]
    assert slots.take_back() == []


def test_what_waits_from_an_ended_session_is_forgotten_and_the_rest_is_kept(slots: Slots) -> None:
    old, new = Session(1), Session(2)
    for delivery in (*deliveries(2, old), *deliveries(1, new)):
        slots.submit(delivery)
    slots.forget(old)
    (kept,) = slots.take_back()
    assert kept.session is new


def test_a_stop_lets_a_running_request_end(slots: Slots, work: Work) -> None:
    slots.start()
    slots.submit(make_delivery())
    work.wait_begun(1)
    slots.stop()
    assert slots.are_alive
    work.may_end.release()
    for thread in slots._threads:
        thread.join(LONG_TIMEOUT_S)
    assert work.ended_count == 1
    assert slots.in_work_count == 0
    assert slots.are_alive


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_slot_that_dies_is_noticed_and_its_request_is_in_work_no_more() -> None:
    def die(_delivery: Delivery) -> None:
        raise SystemError("the processor never raises")

    slots = Slots(2, die)
    slots.start()
    assert slots.are_alive
    slots.submit(make_delivery())
    look_again = threading.Event()
    ends_at = monotonic() + LONG_TIMEOUT_S
    while slots.are_alive and monotonic() < ends_at:
        look_again.wait(0.01)
    assert not slots.are_alive
    assert slots.in_work_count == 0
    slots.stop()
    for thread in slots._threads:
        thread.join(LONG_TIMEOUT_S)
