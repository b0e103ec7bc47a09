"""Design section 5 as one table: what became of a request, and what follows from it."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.disposition import (
    NAMES,
    Ack,
    Answered,
    Bug,
    Cancelled,
    Circumstances,
    CopyRefused,
    CopyUnconfirmed,
    DeadlyTooOften,
    Decision,
    Disposition,
    Expired,
    Found,
    Hold,
    Interrupted,
    InvalidAnswer,
    Malformed,
    ModelError,
    Outcome,
    Reject,
    Republish,
    Requeue,
    StoreUnavailable,
    Unavailable,
    decide_disposition,
)
from inference_worker.messages import Completed, ErrorType, Failed
from inference_worker.model_answer import Timings, Usage

BODY = b'{"choices": [] }'
ANSWERED = Answered(201, BODY, Usage(1, 2), Timings())


def _given(
    *, retry_count: int = 0, max_retries: int = 1, redelivered: bool = False, draining: bool = False
) -> Circumstances:
    return Circumstances(retry_count, max_retries, redelivered, draining)


FIRST = _given()

#: outcome, circumstances, (status code, error type) of what is written, class of the disposition
TABLE: list[tuple[str, Outcome, Circumstances, tuple[int, ErrorType | None] | None, type]] = [
    ("2xx with a JSON object", ANSWERED, FIRST, (201, None), Ack),
    ("the same while draining", ANSWERED, _given(draining=True), (201, None), Ack),
    ("no valid request", Malformed("bad", True), FIRST, (400, ErrorType.MALFORMED_REQUEST), Reject),
    ("no valid request, no request_id", Malformed("bad", False), FIRST, None, Reject),
    ("expired", Expired(61.0, 60.0), FIRST, (408, ErrorType.EXPIRED), Ack),
    ("the copy is expired", Expired(61.0, 60.0), _given(retry_count=1), (408, ErrorType.EXPIRED), Ack),
    ("4xx", ModelError(404, "no", b"{}"), FIRST, (404, ErrorType.MODEL_ERROR), Ack),
    ("5xx", ModelError(500, "no", None), FIRST, (500, ErrorType.MODEL_ERROR), Ack),
    ("no whole answer", Unavailable("refused"), FIRST, None, Republish),
    ("retries left", Unavailable("refused"), _given(retry_count=2, max_retries=3), None, Republish),
    (
        "retries used up",
        Unavailable("refused"),
        _given(retry_count=1),
        (500, ErrorType.MODEL_UNAVAILABLE),
        Reject,
    ),
    ("no retries", Unavailable("x"), _given(max_retries=0), (500, ErrorType.MODEL_UNAVAILABLE), Reject),
    ("a count far over", Unavailable("x"), _given(retry_count=10**9), (500, ErrorType.MODEL_UNAVAILABLE), Reject),
    ("the model dies while we drain", Unavailable("refused"), _given(draining=True), None, Requeue),
    ("the same in the last try", Unavailable("refused"), _given(retry_count=1, draining=True), None, Requeue),
    ("an answer that is none", InvalidAnswer("3xx"), FIRST, (502, ErrorType.INVALID_MODEL_ANSWER), Ack),
    ("cancelled", Cancelled(), FIRST, (499, ErrorType.CANCELLED), Ack),
    ("cancelled while we drain", Cancelled(), _given(draining=True), (499, ErrorType.CANCELLED), Ack),
    (
        "killed its workers",
        DeadlyTooOften(11),
        _given(redelivered=True),
        (500, ErrorType.TOO_MANY_REDELIVERIES),
        Reject,
    ),
    ("completed already", Found(200), _given(redelivered=True), None, Ack),
    ("Redis is down", StoreUnavailable(), FIRST, None, Requeue),
    ("Redis is down, redelivered", StoreUnavailable(), _given(redelivered=True), None, Hold),
    (
        "Redis is down, redelivered, draining",
        StoreUnavailable(),
        _given(redelivered=True, draining=True),
        None,
        Requeue,
    ),
    ("copy refused for good", CopyRefused("too large"), FIRST, (500, ErrorType.MODEL_UNAVAILABLE), Reject),
    ("copy unconfirmed", CopyUnconfirmed(), FIRST, None, Requeue),
    ("cut short by a stop", Interrupted("cut_off"), _given(draining=True), None, Requeue),
    ("held", Interrupted("held"), FIRST, None, Requeue),
    ("a bug", Bug("oops"), FIRST, (500, ErrorType.INTERNAL_ERROR), Reject),
]


@pytest.mark.parametrize(
    ("outcome", "circumstances", "written", "disposition"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_the_table_of_dispositions(
    outcome: Outcome, circumstances: Circumstances, written: tuple[int, ErrorType | None] | None, disposition: type
) -> None:
    decision = decide_disposition(outcome, circumstances)
    assert type(decision.disposition) is disposition
    match decision.result:
        case None:
            assert written is None
        case Completed(status_code, body):
            assert (status_code, None) == written
            assert body == BODY
        case Failed(status_code, error, error_type):
            assert (status_code, error_type) == written
            assert error


def test_the_table_has_a_row_for_every_outcome() -> None:
    assert {type(outcome) for _, outcome, *_ in TABLE} == set(get_args(Outcome))


def test_models_own_words_and_body_are_passed_on() -> None:
    decision = decide_disposition(ModelError(422, "too long", b'{"error": 1}'), FIRST)
    assert decision.result == Failed(422, "too long", ErrorType.MODEL_ERROR, b'{"error": 1}')


def test_expired_tells_age_and_limit() -> None:
    result = decide_disposition(Expired(61.25, 60.0), FIRST).result
    assert isinstance(result, Failed)
    assert "61.2 s" in result.error
    assert "60 s" in result.error


@pytest.mark.parametrize(("max_retries", "words"), [(0, "1 try"), (1, "2 tries"), (3, "4 tries")])
def test_used_up_retries_tell_how_often_and_why(max_retries: int, words: str) -> None:
    given_ = _given(retry_count=max_retries, max_retries=max_retries)
    result = decide_disposition(Unavailable("connection refused"), given_).result
    assert isinstance(result, Failed)
    assert words in result.error
    assert "connection refused" in result.error


def test_names_are_the_contracts_words() -> None:
    assert {NAMES[kind] for kind in get_args(Disposition)} == {"ack", "reject", "requeue", "republish"}


# -- laws -------------------------------------------------------------------------------------------------------------

_TEXTS = st.text(max_size=20)
_TIMES = st.floats(0, 1e12)
_OUTCOMES: dict[type, st.SearchStrategy[Outcome]] = {
    Malformed: st.builds(Malformed, _TEXTS, st.booleans()),
    Expired: st.builds(Expired, _TIMES, st.floats(allow_nan=False, allow_infinity=False)),
    Answered: st.builds(Answered, st.integers(200, 299), st.just(BODY), st.none(), st.just(Timings())),
    ModelError: st.builds(ModelError, st.integers(400, 599), _TEXTS, st.none() | st.just(b"{}")),
    InvalidAnswer: st.builds(InvalidAnswer, _TEXTS),
    Unavailable: st.builds(Unavailable, _TEXTS),
    Cancelled: st.builds(Cancelled),
    DeadlyTooOften: st.builds(DeadlyTooOften, st.integers(1, 99)),
    Found: st.builds(Found, st.integers(200, 299)),
    StoreUnavailable: st.builds(StoreUnavailable),
    CopyRefused: st.builds(CopyRefused, _TEXTS),
    CopyUnconfirmed: st.builds(CopyUnconfirmed),
    Interrupted: st.builds(Interrupted, _TEXTS),
    Bug: st.builds(Bug, _TEXTS),
}
_CIRCUMSTANCES = st.builds(
    Circumstances,
    retry_count=st.integers(0, 1100) | st.just(10**9),
    max_retries=st.integers(0, 1000),
    redelivered=st.booleans(),
    draining=st.booleans(),
)


def test_every_outcome_is_generated() -> None:
    assert set(_OUTCOMES) == set(get_args(Outcome))


@given(st.one_of(*_OUTCOMES.values()), _CIRCUMSTANCES)
def test_every_outcome_has_a_decision_in_every_circumstance(outcome: Outcome, circumstances: Circumstances) -> None:
    decision = decide_disposition(outcome, circumstances)
    assert isinstance(decision, Decision)
    assert isinstance(decision.disposition, (*get_args(Disposition), Hold))
    assert decision.disposition.reason or isinstance(outcome, Interrupted)


@given(st.one_of(*_OUTCOMES.values()), _CIRCUMSTANCES)
def test_nothing_is_acked_without_a_result_written_or_found(outcome: Outcome, circumstances: Circumstances) -> None:
    decision = decide_disposition(outcome, circumstances)
    if isinstance(decision.disposition, Ack):
        assert decision.result is not None or isinstance(outcome, Found)


@given(st.one_of(*_OUTCOMES.values()), _CIRCUMSTANCES)
def test_what_goes_back_or_waits_leaves_no_result(outcome: Outcome, circumstances: Circumstances) -> None:
    decision = decide_disposition(outcome, circumstances)
    if isinstance(decision.disposition, (Requeue, Republish, Hold)):
        assert decision.result is None


@given(st.one_of(*_OUTCOMES.values()), _CIRCUMSTANCES)
def test_a_dead_letter_leaves_a_failed_result_unless_there_is_no_key(
    outcome: Outcome, circumstances: Circumstances
) -> None:
    decision = decide_disposition(outcome, circumstances)
    if isinstance(decision.disposition, Reject):
        assert isinstance(decision.result, Failed) or outcome == Malformed(getattr(outcome, "error", ""), False)


@given(st.one_of(*_OUTCOMES.values()), _CIRCUMSTANCES)
def test_a_copy_counts_one_more_and_never_beyond_the_limit(outcome: Outcome, circumstances: Circumstances) -> None:
    decision = decide_disposition(outcome, circumstances)
    if isinstance(decision.disposition, Republish):
        assert isinstance(outcome, Unavailable)
        assert decision.disposition.retry_count == circumstances.retry_count + 1 <= circumstances.max_retries


@given(st.one_of(*_OUTCOMES.values()), _CIRCUMSTANCES)
def test_only_the_models_answer_is_completed_and_byte_for_byte(outcome: Outcome, circumstances: Circumstances) -> None:
    result = decide_disposition(outcome, circumstances).result
    if isinstance(outcome, Answered):
        assert result == Completed(outcome.status_code, outcome.body)
    else:
        assert not isinstance(result, Completed)


@given(st.one_of(*_OUTCOMES.values()), _CIRCUMSTANCES)
def test_nothing_waits_in_a_slot_while_we_drain(outcome: Outcome, circumstances: Circumstances) -> None:
    if circumstances.draining:
        assert not isinstance(decide_disposition(outcome, circumstances).disposition, (Hold, Republish))
