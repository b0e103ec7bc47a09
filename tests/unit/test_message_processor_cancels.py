"""A request that its producer no longer wants: 499, not billed, and the model is left alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inference_worker.disposition import Ack, Cancelled, Requeue
from inference_worker.holds import HoldName
from inference_worker.model_client import Sign
from tests.fakes.steps import ANSWER_BODY, Bench, make_delivery, reply, request_body


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_a_cancelled_request_is_answered_499_without_a_call_and_is_not_billed(bench: Bench) -> None:
    bench.cancel()
    assert bench.process().disposition == Ack("cancelled")
    assert bench.model.requests == []
    assert (bench.stored()["status_code"], bench.stored()["error_type"]) == (499, "cancelled")
    assert bench.buffer.usage == []
    (record,) = bench.buffer.records
    assert (record.status, record.status_code, record.error_type) == ("failed", 499, "cancelled")


def test_a_request_that_is_cancelled_while_it_runs_is_answered_499_and_is_not_billed(bench: Bench) -> None:
    bench.model.replies[0] = reply(Cancelled(), Sign.NONE)
    assert bench.process().disposition == Ack("cancelled")
    assert bench.stored()["status_code"] == 499
    assert bench.buffer.usage == []


def test_a_cancel_of_another_request_changes_nothing(bench: Bench) -> None:
    bench.cancel("r-2")
    assert bench.process().disposition == Ack("completed")


def test_a_cancel_that_comes_after_the_answer_changes_nothing(bench: Bench) -> None:
    bench.process()
    bench.cancel()
    assert bench.process(make_delivery(redelivered=True)).disposition == Ack("already_completed")
    assert bench.stored()["status"] == "completed"


def test_a_held_worker_answers_what_was_cancelled_instead_of_giving_it_back(bench: Bench) -> None:
    bench.holds.raise_hold(HoldName.MODEL_UNHEALTHY, "refused")
    assert bench.process().disposition == Requeue("held")
    bench.cancel()
    assert bench.process().disposition == Ack("cancelled")


def test_a_cancelled_retry_costs_neither_a_probe_nor_a_start(bench: Bench) -> None:
    bench.cancel()
    delivery = make_delivery(redelivered=True, headers={"x-retry-count": 1})
    assert bench.process(delivery).disposition == Ack("cancelled")
    assert "probe" not in bench.journal
    assert bench.store.client.get("infer_starts:r-1") is None


def test_those_who_follow_a_cancelled_stream_are_told(bench: Bench) -> None:
    bench.cancel()
    bench.process(make_delivery(request_body(payload={"stream": True})))
    ((_, entry),) = bench.store.client.xrange("infer_stream:r-1")
    assert entry[b"type"] == b"failed"
    assert b"cancelled" in entry[b"data"]


def test_with_an_interval_of_0_redis_is_not_asked() -> None:
    bench = Bench(looks_for_cancels=False)
    bench.cancel()
    assert bench.process().disposition == Ack("completed")
    assert bench.stored()["result"]["id"] == ANSWER_BODY.decode()[8:11]
    bench.close()
