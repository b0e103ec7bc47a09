"""Requests that come more than once: those that kill their worker, and those that run here already."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from inference_worker.delivery import Session
from inference_worker.disposition import Ack, Interrupted, ModelError, Reject, Requeue, Unavailable
from inference_worker.holds import HoldName
from inference_worker.model_client import ModelReply, Sign
from tests.fakes.steps import Bench, make_delivery, reply
from tests.timeouts import LONG_TIMEOUT_S

STARTS = "infer_starts:r-1"


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


# -- a message that kills its worker ----------------------------------------------------------------------------------


def die(bench: Bench, times: int) -> None:
    """Count starts as workers that died did."""
    for _ in range(times):
        bench.store.count_start("r-1")


def test_r22_a_message_that_killed_its_workers_too_often_is_dead_lettered_without_a_call(bench: Bench) -> None:
    die(bench, 10)
    settlement = bench.process(make_delivery(redelivered=True))
    assert settlement.disposition == Reject("too_many_redeliveries")
    assert bench.model.requests == []
    assert (bench.stored()["status_code"], bench.stored()["error_type"]) == (500, "too_many_redeliveries")


def test_r22_a_message_within_its_budget_is_answered(bench: Bench) -> None:
    die(bench, 9)
    assert bench.process(make_delivery(redelivered=True)).disposition == Ack("completed")


def test_a_redelivery_that_is_settled_uses_no_budget_up(bench: Bench) -> None:
    bench.model.replies[0] = reply(Interrupted("cut_off"), Sign.NONE)
    for _ in range(30):
        assert bench.process(make_delivery(redelivered=True)).disposition == Requeue("cut_off")
    assert int(bench.store.client.get(STARTS)) == 0


def test_the_count_of_starts_has_a_ttl(bench: Bench) -> None:
    die(bench, 1)
    assert 0 < bench.store.client.ttl(STARTS) <= 60


def test_a_first_delivery_is_not_counted(bench: Bench) -> None:
    bench.process(make_delivery())
    assert bench.store.client.get(STARTS) is None


def test_without_a_limit_nothing_is_counted() -> None:
    bench = Bench(max_redeliveries=0)
    bench.process(make_delivery(redelivered=True))
    assert bench.store.client.get(STARTS) is None
    bench.close()


# -- a second delivery of a running request ---------------------------------------------------------------------------


class Gate:
    """Holds the model's first call until it is opened."""

    def __init__(self, bench: Bench) -> None:
        self.began = threading.Event()
        self.opened = threading.Event()
        bench.model.meanwhile = self.pass_through

    def pass_through(self) -> None:
        self.began.set()
        assert self.opened.wait(LONG_TIMEOUT_S)


def run_twice(bench: Bench, gate: Gate, *, first: Session, second: Session) -> None:
    """Begin a delivery, hold it in the model's call, begin its second delivery, let both end."""
    with bench.processing(make_delivery(session=first)) as one:
        assert gate.began.wait(LONG_TIMEOUT_S)
        first.ended = True
        with bench.processing(make_delivery(session=second, redelivered=True)) as two:
            gate.opened.set()
            one.join(LONG_TIMEOUT_S)
            two.join(LONG_TIMEOUT_S)


def test_a_second_delivery_of_a_running_request_takes_its_answer_without_a_second_call(bench: Bench) -> None:
    run_twice(bench, Gate(bench), first=Session(1), second=Session(2))
    assert len(bench.model.requests) == 1
    assert [type(settlement.disposition) for settlement in bench.settlements] == [Ack, Ack]
    assert bench.stored()["status"] == "completed"
    assert {event.data.request_id for event in bench.buffer.usage} == {"r-1"}


def test_a_second_delivery_of_a_running_request_takes_its_failure_without_a_second_call(bench: Bench) -> None:
    bench.model.replies[0] = reply(ModelError(400, "too long", None))
    run_twice(bench, Gate(bench), first=Session(1), second=Session(2))
    assert len(bench.model.requests) == 1
    assert bench.stored()["status_code"] == 400


def test_a_second_delivery_runs_itself_when_the_first_was_given_back(bench: Bench) -> None:
    cut: ModelReply = reply(Interrupted("cut_off"), Sign.NONE)
    bench.model.replies.appendleft(cut)
    run_twice(bench, Gate(bench), first=Session(1), second=Session(2))
    assert len(bench.model.requests) == 2
    assert bench.stored()["status"] == "completed"


def test_a_second_delivery_that_waits_goes_back_when_we_stop(bench: Bench) -> None:
    gate = Gate(bench)
    with bench.processing(make_delivery(session=Session(1))) as one:
        assert gate.began.wait(LONG_TIMEOUT_S)
        bench.holds.raise_hold(HoldName.DRAINING, "stop")
        bench.processor.process(make_delivery(session=Session(2), redelivered=True))
        assert bench.settlements[-1].disposition == Requeue("joined_request_still_runs")
        gate.opened.set()
        one.join(LONG_TIMEOUT_S)


def test_a_request_that_has_ended_is_not_joined(bench: Bench) -> None:
    bench.process()
    bench.store.client.delete("infer_resp:r-1")
    bench.process()
    assert len(bench.model.requests) == 2


def test_a_retry_copy_that_overtakes_the_end_of_its_original_is_an_attempt_of_its_own(bench: Bench) -> None:
    gone = reply(Unavailable("cut"), Sign.SUSPECT)
    bench.model.replies.appendleft(gone)
    copies: list[threading.Thread] = []

    def deliver_the_copy() -> None:
        copy = make_delivery(session=Session(1), tag=2, headers={"x-retry-count": 1})
        copies.append(threading.Thread(target=bench.processor.process, args=(copy,)))
        copies[0].start()

    bench.publisher.meanwhile = deliver_the_copy
    bench.process(make_delivery(session=Session(1)))
    copies[0].join(LONG_TIMEOUT_S)
    assert len(bench.model.requests) == 2
    assert bench.stored()["status"] == "completed"
