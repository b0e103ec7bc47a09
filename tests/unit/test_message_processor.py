"""One message through all its steps: each row of the table of dispositions, what is written, told and handed in."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from time import monotonic, time
from typing import Any

import pytest

from inference_worker.delivery import Session
from inference_worker.disposition import (
    Ack,
    Interrupted,
    InvalidAnswer,
    ModelError,
    Outcome,
    Reject,
    Republish,
    Requeue,
    Unavailable,
)
from inference_worker.errors import CopyNotConfirmed, CopyRefusedForGood, StoreDown
from inference_worker.holds import HoldName
from inference_worker.messages import Completed, ErrorType, Failed, encode_result
from inference_worker.model_client import Sign
from tests.fakes.steps import ANSWER_BODY, Bench, InstantEvent, make_delivery, reply, request_body
from tests.timeouts import LONG_TIMEOUT_S

COMPLETED_BEFORE = encode_result(
    Completed(200, b'{"first": true, "usage": {"prompt_tokens": 1, "completion_tokens": 2}}')
)
FAILED_BEFORE = encode_result(Failed(500, "an attempt before", ErrorType.MODEL_UNAVAILABLE))
GONE = reply(Unavailable("connection refused"), Sign.UNREACHABLE)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


# -- the table --------------------------------------------------------------------------------------------------------


def test_an_answer_is_stored_byte_for_byte_billed_and_acked(bench: Bench) -> None:
    settlement = bench.process()
    assert settlement.disposition == Ack("completed")
    value = bench.store.client.get("infer_resp:r-1")
    assert value == b'{"status":"completed","status_code":200,"result":' + ANSWER_BODY + b"}"
    assert 0 < bench.store.client.ttl("infer_resp:r-1") <= 60
    (event,) = bench.buffer.usage
    assert event.data.request_id == "r-1"
    assert (event.data.prompt_tokens, event.data.completion_tokens, event.data.total_tokens) == (3, 4, 7)
    (record,) = bench.buffer.records
    assert (record.request_id, record.status, record.status_code, record.disposition) == (
        "r-1",
        "completed",
        200,
        "ack",
    )
    assert (record.prompt_tokens, record.total_tokens, record.ttft_s, record.tbt_s) == (3, 7, 0.5, 0.25)
    assert record.model_latency_s is not None
    assert record.error_type is None


def test_result_then_usage_event_then_settlement(bench: Bench) -> None:
    """A worker that dies in between leaves a message that comes again, never a result that is not billed."""
    bench.process()
    steps = [step for step in bench.journal if step in ("save: Saved", "usage", "hand in")]
    assert steps == ["save: Saved", "usage", "hand in"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"timeout_s": "60"}, "timeout_s"),
        ({"payload": []}, "payload"),
        ({"received_at": 1_772_000_000_000}, "received_at"),
        ({"received_at": ...}, "received_at"),
    ],
)
def test_a_malformed_request_with_an_id_is_told_400_and_dead_lettered(
    bench: Bench, fields: dict[str, Any], field: str
) -> None:
    settlement = bench.process(make_delivery(request_body(**fields)))
    assert settlement.disposition == Reject("malformed_request")
    stored = bench.stored()
    assert (stored["status"], stored["status_code"], stored["error_type"]) == ("failed", 400, "malformed_request")
    assert field in stored["error"]
    assert bench.model.requests == []
    assert bench.buffer.usage == []
    (record,) = bench.buffer.records
    assert (record.disposition, record.status_code, record.error_type) == ("reject", 400, "malformed_request")


@pytest.mark.parametrize("body", [b"", b"no json", b"[" * 20_000 + b"]" * 20_000, b"\xff", request_body(request_id="")])
def test_a_malformed_request_without_an_id_writes_nothing_and_is_dead_lettered(bench: Bench, body: bytes) -> None:
    assert bench.process(make_delivery(body)).disposition == Reject("malformed_request")
    assert bench.store.client.keys("*") == []
    (record,) = bench.buffer.records
    assert (record.request_id, record.status, record.disposition) == (None, None, "reject")


@pytest.mark.parametrize(
    ("received_ago_s", "timeout_s", "expired"),
    [(31.0, 30.0, True), (29.0, 30.0, False), (-3600.0, 30.0, False), (0.0, 0.0, True), (-5.0, -1.0, True)],
)
def test_what_has_expired_is_told_408_without_a_call(
    bench: Bench, received_ago_s: float, timeout_s: float, expired: bool
) -> None:
    body = request_body(received_at=time() - received_ago_s, timeout_s=timeout_s)
    disposition = bench.process(make_delivery(body)).disposition
    (record,) = bench.buffer.records
    assert record.queue_wait_s is not None
    assert record.queue_wait_s >= 0
    if not expired:
        assert disposition == Ack("completed")
        return
    assert disposition == Ack("expired")
    assert (bench.stored()["status_code"], bench.stored()["error_type"]) == (408, "expired")
    assert bench.model.requests == []
    assert bench.buffer.usage == []


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429, 500, 503, 599])
def test_a_4xx_or_5xx_of_the_model_is_told_with_its_words_and_acked(bench: Bench, status: int) -> None:
    bench.model.replies = type(bench.model.replies)([reply(ModelError(status, "its words", b'{"error": 1}'))])
    assert bench.process().disposition == Ack("model_error")
    assert bench.stored() == {
        "status": "failed",
        "status_code": status,
        "error": "its words",
        "error_type": "model_error",
        "model_error": {"error": 1},
    }
    assert bench.publisher.tries_count == 0
    assert bench.buffer.usage == []
    assert len(bench.model.requests) == 1


def answers(bench: Bench, *outcomes: Outcome, sign: Sign = Sign.WELL) -> None:
    bench.model.replies.clear()
    bench.model.replies.extend(reply(outcome, sign) for outcome in outcomes)


def test_an_answer_that_is_none_is_told_502_and_acked(bench: Bench) -> None:
    answers(bench, InvalidAnswer("no JSON"))
    assert bench.process().disposition == Ack("invalid_model_answer")
    assert (bench.stored()["status_code"], bench.stored()["error_type"]) == (502, "invalid_model_answer")
    assert bench.buffer.usage == []


def test_a_model_that_is_away_costs_a_retry_and_nothing_is_written(bench: Bench) -> None:
    bench.model.replies[0] = GONE
    delivery = make_delivery()
    settlement = bench.process(delivery)
    assert settlement.disposition == Republish("model_unavailable", 1)
    assert settlement.copy_confirmed
    assert bench.publisher.retries == [(delivery, 1)]
    assert bench.stored() is None
    assert bench.buffer.usage == []
    (record,) = bench.buffer.records
    assert (record.disposition, record.retry_count, record.status) == ("republish", 0, None)


def test_the_bad_news_is_told_before_the_copy_is_published(bench: Bench) -> None:
    """The hold must be up when the copy can come back, or it burns its retries (R48, R52)."""
    bench.model.replies[0] = GONE
    bench.process()
    assert bench.journal.index(f"report: {Sign.UNREACHABLE}") < bench.journal.index("retry 1")


@pytest.mark.parametrize("retry_count", [1, 2, 10**9])
def test_when_the_retries_are_used_up_500_is_told_and_the_message_dead_lettered(bench: Bench, retry_count: int) -> None:
    bench.model.replies[0] = GONE
    settlement = bench.process(make_delivery(headers={"x-retry-count": retry_count}))
    assert settlement.disposition == Reject("retries_used_up")
    assert (bench.stored()["status_code"], bench.stored()["error_type"]) == (500, "model_unavailable")
    assert bench.publisher.tries_count == 0


@pytest.mark.parametrize("outcome", [ModelError(500, "x", None), InvalidAnswer("x"), Unavailable("x")])
def test_any_failure_leaves_a_completed_result_that_is_there_by_now(bench: Bench, outcome: Outcome) -> None:
    answers(bench, outcome)
    bench.model.meanwhile = lambda: bench.put(COMPLETED_BEFORE)
    headers = {"x-retry-count": 1}
    bench.store.client.delete("infer_resp:r-1")
    settlement = bench.process(make_delivery(headers=headers))
    assert settlement.disposition == Ack("already_completed")
    assert bench.store.client.get("infer_resp:r-1") == COMPLETED_BEFORE
    (record,) = bench.buffer.records
    assert (record.status, record.status_code, record.total_tokens) == ("completed", 200, 3)


@pytest.mark.parametrize(("redelivered", "headers"), [(True, None), (False, {"x-retry-count": 1})])
def test_a_result_that_is_there_already_is_acked_without_a_call_and_billed_again_under_its_id(
    bench: Bench, redelivered: bool, headers: dict[str, Any] | None
) -> None:
    bench.put(COMPLETED_BEFORE)
    settlement = bench.process(make_delivery(redelivered=redelivered, headers=headers))
    assert settlement.disposition == Ack("already_completed")
    assert bench.model.requests == []
    assert bench.store.client.get("infer_resp:r-1") == COMPLETED_BEFORE
    (event,) = bench.buffer.usage
    assert (event.data.request_id, event.data.total_tokens) == ("r-1", 3)


def test_a_failed_result_of_an_attempt_before_is_replaced(bench: Bench) -> None:
    bench.put(FAILED_BEFORE)
    assert bench.process(make_delivery(redelivered=True)).disposition == Ack("completed")
    assert bench.stored()["status"] == "completed"


def test_a_bug_is_told_500_dead_lettered_and_logged_with_its_traceback(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.model.replies[0] = RuntimeError("a bug")
    assert bench.process().disposition == Reject("internal_error")
    assert (bench.stored()["status_code"], bench.stored()["error_type"]) == (500, "internal_error")
    (entry,) = [entry for entry in caplog.records if getattr(entry, "event", None) == "internal_error"]
    assert entry.exc_info is not None
    bench.model.replies[0] = reply(InvalidAnswer("x"))
    assert bench.process().disposition == Ack("invalid_model_answer")


@pytest.mark.parametrize("error", [MemoryError(), RecursionError(), KeyError("x")])
def test_r63_no_error_of_one_message_ends_the_slot(bench: Bench, error: Exception) -> None:
    bench.model.replies[0] = error
    assert bench.process().disposition == Reject("internal_error")


def test_a_bug_in_the_handling_of_a_bug_earns_no_ack(bench: Bench) -> None:
    """Without a confirmed copy the listener gives the message back where a reject would drop it."""
    bench.model.replies[0] = RuntimeError("a bug")
    bench.publisher.errors.extend([RuntimeError("another")] * 2)
    settlement = bench.process(make_delivery(session=Session(1, rejects_by_copy=True)))
    assert settlement.disposition == Reject("internal_error")
    assert not settlement.copy_confirmed


# -- Redis is down ----------------------------------------------------------------------------------------------------


def test_redis_down_at_a_first_delivery_requeues_holds_and_keeps_the_answer(bench: Bench) -> None:
    bench.model.meanwhile = bench.redis_goes_down
    settlement = bench.process()
    assert settlement.disposition == Requeue("result_store_down")
    assert bench.holds.is_raised(HoldName.RESULT_STORE_DOWN)
    assert bench.journal.index("report: store down") < bench.journal.index("hand in")
    assert bench.buffer.usage == []
    bench.redis_comes_back()
    assert bench.process(make_delivery(redelivered=True, tag=2)).disposition == Ack("completed")
    assert len(bench.model.requests) == 1
    assert bench.stored()["result"] == json.loads(ANSWER_BODY)
    assert [event.data.total_tokens for event in bench.buffer.usage] == [7]


@pytest.mark.parametrize("said", [ModelError(400, "refused", b"{}"), InvalidAnswer("no JSON")])
def test_what_the_model_refused_is_not_asked_again_because_redis_was_down(bench: Bench, said: Outcome) -> None:
    answers(bench, said)
    bench.model.meanwhile = bench.redis_goes_down
    assert bench.process().disposition == Requeue("result_store_down")
    bench.redis_comes_back()
    bench.process(make_delivery(redelivered=True, tag=2))
    assert len(bench.model.requests) == 1
    assert bench.stored()["status"] == "failed"
    assert bench.buffer.usage == []


def test_a_kept_answer_survives_a_second_outage(bench: Bench) -> None:
    bench.model.meanwhile = bench.redis_goes_down
    bench.process()
    bench.holds.lift(HoldName.RESULT_STORE_DOWN)
    assert bench.process(make_delivery(tag=2)).disposition == Requeue("result_store_down")
    bench.redis_comes_back()
    assert bench.process(make_delivery(tag=3)).disposition == Ack("completed")
    assert len(bench.model.requests) == 1


def test_redis_down_at_a_redelivery_keeps_the_message_in_its_slot_until_redis_is_back(bench: Bench) -> None:
    bench.redis_goes_down()
    with bench.processing(make_delivery(redelivered=True)):
        assert bench.health.store_down.wait(LONG_TIMEOUT_S)
        assert bench.settlements == []
        bench.redis_comes_back()
        assert bench.settled.wait(LONG_TIMEOUT_S)
    assert bench.settlements[0].disposition == Ack("completed")
    assert len(bench.model.requests) == 1
    assert len(bench.buffer.records) == 1


def test_an_answer_computed_in_a_redelivery_is_saved_without_a_second_call_when_redis_is_back(bench: Bench) -> None:
    bench.model.meanwhile = bench.redis_goes_down
    with bench.processing(make_delivery(redelivered=True)):
        assert bench.health.store_down.wait(LONG_TIMEOUT_S)
        bench.redis_comes_back()
        assert bench.settled.wait(LONG_TIMEOUT_S)
    assert bench.settlements[0].disposition == Ack("completed")
    assert len(bench.model.requests) == 1


def test_a_failure_found_in_a_redelivery_is_saved_without_a_second_call_when_redis_is_back(bench: Bench) -> None:
    answers(bench, ModelError(400, "x", None))
    bench.model.meanwhile = bench.redis_goes_down
    with bench.processing(make_delivery(redelivered=True)):
        assert bench.health.store_down.wait(LONG_TIMEOUT_S)
        bench.redis_comes_back()
        assert bench.settled.wait(LONG_TIMEOUT_S)
    assert bench.settlements[0].disposition == Ack("model_error")
    assert len(bench.model.requests) == 1


@pytest.mark.parametrize("how", ["session ends", "draining", "cut off"])
def test_a_message_kept_in_its_slot_is_given_back_when_the_session_ends_or_we_stop(bench: Bench, how: str) -> None:
    session = Session(1)
    bench.model.meanwhile = bench.redis_goes_down
    with bench.processing(make_delivery(redelivered=True, session=session)):
        assert bench.health.store_down.wait(LONG_TIMEOUT_S)
        match how:
            case "session ends":
                session.ended = True
            case "draining":
                bench.holds.raise_hold(HoldName.DRAINING, "stop")
            case _:
                bench.processor.cut_off.set()
        assert bench.settled.wait(LONG_TIMEOUT_S)
    assert isinstance(bench.settlements[0].disposition, Requeue)
    assert bench.kept.take("r-1") is not None


def test_redis_down_while_draining_gives_even_a_redelivery_back(bench: Bench) -> None:
    bench.holds.raise_hold(HoldName.DRAINING, "stop")
    bench.redis_goes_down()
    assert bench.process(make_delivery(redelivered=True)).disposition == Requeue("result_store_down")


# -- copies -----------------------------------------------------------------------------------------------------------


def test_a_copy_that_the_broker_refuses_for_good_is_told_500_and_dead_lettered(bench: Bench) -> None:
    bench.model.replies[0] = GONE
    bench.publisher.errors.append(CopyRefusedForGood("larger than its limit"))
    assert bench.process().disposition == Reject("copy_refused")
    assert (bench.stored()["status_code"], bench.stored()["error_type"]) == (500, "model_unavailable")


def test_an_unconfirmed_copy_is_published_again_after_1_2_and_4_s_then_the_original_goes_back(bench: Bench) -> None:
    bench.processor.cut_off = pauses = InstantEvent()
    bench.model.replies[0] = GONE
    bench.publisher.errors.extend(CopyNotConfirmed("no confirm") for _ in range(4))
    held: list[bool] = []
    bench.publisher.meanwhile = lambda: held.append(bench.holds.is_raised(HoldName.PUBLISH_REFUSED))
    settlement = bench.process()
    assert settlement.disposition == Requeue("publish_refused")
    assert not settlement.copy_confirmed
    assert bench.publisher.tries_count == 4
    assert pauses.waits_s == [1.0, 2.0, 4.0]
    assert held == [False, True, True, True]
    assert bench.holds.is_raised(HoldName.PUBLISH_REFUSED)
    assert bench.stored() is None


def test_the_hold_after_refused_copies_grows_up_to_30_s_and_begins_anew_after_a_confirm(bench: Bench) -> None:
    bench.processor.cut_off = InstantEvent()
    bench.model.replies[0] = GONE

    def hold_s() -> float:
        bench.publisher.errors.extend(CopyNotConfirmed("no confirm") for _ in range(4))
        bench.process()
        wait_s = bench.holds.expire(0.0)
        assert wait_s is not None
        left_s = wait_s - monotonic()
        bench.holds.lift(HoldName.PUBLISH_REFUSED)
        return left_s

    assert [hold_s() for _ in range(7)] == pytest.approx([1, 2, 4, 8, 16, 30, 30], abs=0.5)
    assert isinstance(bench.process().disposition, Republish)
    assert hold_s() == pytest.approx(1, abs=0.5)


def test_a_copy_confirmed_at_the_second_try_lifts_its_hold(bench: Bench) -> None:
    bench.processor.cut_off = InstantEvent()
    bench.model.replies[0] = GONE
    bench.publisher.errors.append(CopyNotConfirmed("no confirm"))
    settlement = bench.process()
    assert isinstance(settlement.disposition, Republish)
    assert settlement.copy_confirmed
    assert not bench.holds.suspended.is_set()


def test_where_a_reject_would_drop_it_the_dead_letter_is_a_confirmed_copy(bench: Bench) -> None:
    delivery = make_delivery(b"no json", session=Session(1, rejects_by_copy=True))
    settlement = bench.process(delivery)
    assert settlement.disposition == Reject("malformed_request")
    assert settlement.copy_confirmed
    assert bench.publisher.dead_letters == [(delivery, "malformed_request")]


def test_r11_a_dead_letter_copy_without_its_exchange_leaves_the_original_unacked(bench: Bench) -> None:
    bench.processor.cut_off = InstantEvent()
    bench.publisher.errors.extend(CopyNotConfirmed("no exchange") for _ in range(4))
    settlement = bench.process(make_delivery(b"no json", session=Session(1, rejects_by_copy=True)))
    assert settlement.disposition == Requeue("publish_refused")


@pytest.mark.parametrize("when", ["before the copy", "between two tries"])
def test_an_attempt_whose_session_has_ended_publishes_no_copy(bench: Bench, when: str) -> None:
    """The broker delivers the original again; a copy would be a second one."""
    bench.processor.cut_off = InstantEvent()
    session = Session(1)

    def end() -> None:
        session.ended = True

    if when == "before the copy":
        bench.model.meanwhile = end
    else:
        bench.publisher.meanwhile = end
        bench.publisher.errors.append(CopyNotConfirmed("no confirm"))
    bench.model.replies[0] = GONE
    assert bench.process(make_delivery(session=session)).disposition == Requeue("session_ended")
    assert bench.publisher.retries == []
    assert bench.publisher.tries_count == (0 if when == "before the copy" else 1)
    left_s = bench.holds.expire(0.0)
    assert left_s is None or left_s - monotonic() < 2


@pytest.mark.parametrize("how", ["draining", "cut off"])
def test_a_stop_ends_the_tries_of_a_copy(bench: Bench, how: str) -> None:
    bench.model.replies[0] = GONE
    bench.publisher.errors.extend(CopyNotConfirmed("no confirm") for _ in range(4))
    if how == "cut off":
        bench.publisher.meanwhile = bench.processor.cut_off.set
    else:
        bench.publisher.meanwhile = lambda: bench.holds.raise_hold(HoldName.DRAINING, "stop")
    assert bench.process().disposition == Requeue("publish_refused")
    assert bench.publisher.tries_count == 1


# -- holds, sessions, stops -------------------------------------------------------------------------------------------


def test_a_message_that_comes_while_we_hold_goes_back_without_a_call(bench: Bench) -> None:
    bench.holds.raise_hold(HoldName.MODEL_UNHEALTHY, "refused")
    assert bench.process().disposition == Requeue("held")
    assert bench.model.requests == []
    assert bench.stored() is None


def test_a_message_that_has_expired_is_answered_even_while_we_hold(bench: Bench) -> None:
    bench.holds.raise_hold(HoldName.MODEL_UNHEALTHY, "refused")
    assert bench.process(make_delivery(request_body(received_at=time() - 99))).disposition == Ack("expired")


def test_a_retried_message_probes_the_model_first(bench: Bench) -> None:
    bench.health.is_healthy = False
    assert bench.process(make_delivery(headers={"x-retry-count": 1})).disposition == Requeue("held")
    assert bench.model.requests == []
    bench.health.is_healthy = True
    assert bench.process(make_delivery(headers={"x-retry-count": 1})).disposition == Ack("completed")
    assert bench.journal.count("probe") == 2


def test_a_first_attempt_costs_no_look_into_redis_and_no_probe(bench: Bench) -> None:
    bench.process()
    assert "look" not in bench.journal
    assert "probe" not in bench.journal


def test_a_call_that_a_stop_cut_short_goes_back_unchanged(bench: Bench) -> None:
    answers(bench, Interrupted("cut_off"), sign=Sign.NONE)
    assert bench.process().disposition == Requeue("cut_off")
    assert bench.stored() is None
    assert bench.publisher.tries_count == 0


def test_a_model_that_dies_while_we_drain_costs_no_retry(bench: Bench) -> None:
    bench.model.replies[0] = GONE
    bench.model.meanwhile = lambda: bench.holds.raise_hold(HoldName.DRAINING, "stop")
    assert bench.process(make_delivery(headers={"x-retry-count": 1})).disposition == Requeue(
        "model_gone_while_draining"
    )
    assert bench.stored() is None


def session_that_ends(bench: Bench, *, and_then: bytes | None = None) -> Session:
    session = Session(1)

    def end() -> None:
        session.ended = True
        if and_then is not None:
            bench.put(and_then)

    bench.model.meanwhile = end
    return session


def test_an_attempt_whose_session_has_ended_fills_an_empty_key_and_bills_it(bench: Bench) -> None:
    bench.process(make_delivery(session=session_that_ends(bench)))
    assert bench.stored()["status"] == "completed"
    assert len(bench.buffer.usage) == 1


@pytest.mark.parametrize("there", [FAILED_BEFORE, COMPLETED_BEFORE])
def test_r13_an_attempt_whose_session_has_ended_replaces_nothing_and_bills_nothing(bench: Bench, there: bytes) -> None:
    bench.process(make_delivery(session=session_that_ends(bench, and_then=there)))
    assert bench.store.client.get("infer_resp:r-1") == there
    assert bench.buffer.usage == []


# -- what is told -----------------------------------------------------------------------------------------------------


def test_an_answer_without_usage_is_not_billed(bench: Bench) -> None:
    answer = bench.model.replies[0].outcome  # type: ignore[union-attr]
    answers(bench, type(answer)(200, b'{"choices": []}', None, answer.timings))
    assert bench.process().disposition == Ack("completed")
    assert bench.buffer.usage == []
    assert bench.buffer.records[0].total_tokens is None


def test_only_a_trace_context_in_plain_text_goes_along(bench: Bench) -> None:
    headers = {"traceparent": "00-abc-def-01", "tracestate": b"bytes", "other": "x"}
    bench.process(make_delivery(headers=headers))
    bench.process(make_delivery(headers={"traceparent": "a\r\nb"}))
    assert bench.model.traces == [{"traceparent": "00-abc-def-01"}, {}]


def test_one_record_a_delivery_whatever_becomes_of_it(bench: Bench) -> None:
    bench.processor.cut_off = InstantEvent()
    deliveries = [make_delivery(), make_delivery(b""), make_delivery(redelivered=True)]
    for delivery in deliveries:
        bench.process(delivery)
    bench.model.replies[0] = GONE
    bench.process(make_delivery(request_body(request_id="r-2")))
    bench.holds.raise_hold(HoldName.MODEL_BUSY, "busy")
    bench.process(make_delivery(request_body(request_id="r-3")))
    assert [record.disposition for record in bench.buffer.records] == ["ack", "reject", "ack", "republish", "requeue"]


def test_a_saved_result_ends_the_row_of_failed_saves(bench: Bench) -> None:
    bench.process()
    assert "report: saved" in bench.journal


def test_no_body_prompt_or_answer_is_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "the-secret-prompt"
    payload = {"messages": [{"role": "user", "content": secret}]}
    bench.process(make_delivery(request_body(payload=payload)))
    bench.model.replies[0] = RuntimeError("a bug")
    bench.process(make_delivery(request_body(payload=payload)))
    bench.process(make_delivery(request_body(payload=payload, timeout_s=secret)))
    assert secret not in caplog.text


def test_r58_the_time_left_goes_along_only_where_deadlines_are_respected(bench: Bench) -> None:
    bench.process(make_delivery(request_body(received_at=time() - 50, timeout_s=60.0)))
    assert bench.model.times_left_s == [None]
    strict = Bench(respects_deadline=True)
    strict.process(make_delivery(request_body(received_at=time() - 50, timeout_s=60.0)))
    assert strict.model.times_left_s == [pytest.approx(10, abs=1)]
    strict.close()


def test_a_dead_letter_copy_that_is_refused_for_good_ends_with_a_nack_and_its_result(bench: Bench) -> None:
    bench.publisher.errors.append(CopyRefusedForGood("406"))
    settlement = bench.process(make_delivery(request_body(timeout_s="x"), session=Session(1, rejects_by_copy=True)))
    assert settlement.disposition == Reject("malformed_request")
    assert (settlement.copy_confirmed, settlement.copy_refused) == (False, True)
    assert bench.stored()["status_code"] == 400
    assert bench.publisher.tries_count == 1


def test_a_result_that_redis_never_takes_though_it_can_be_written_does_not_keep_its_slot_for_ever(bench: Bench) -> None:
    refused = 0

    def refuse_answers(request_id: str, value: bytes, *, may_replace: Any) -> Any:
        nonlocal refused
        if b'"completed"' in value:
            refused += 1
            raise StoreDown("too large")
        return original(request_id, value, may_replace=may_replace)

    original = bench.store.save
    bench.store.save = refuse_answers  # type: ignore[method-assign]
    bench.health.on_store_down = lambda: bench.holds.lift(HoldName.RESULT_STORE_DOWN)
    settlement = bench.process(make_delivery(redelivered=True))
    assert settlement.disposition == Reject("internal_error")
    assert bench.stored()["error_type"] == "internal_error"
    assert len(bench.model.requests) == 1
    assert refused > 3
