"""Answers kept while they cannot be saved."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference_worker.disposition import Answered, InvalidAnswer, ModelError
from inference_worker.kept_answers import MAX_BYTES, KeptAnswers
from inference_worker.model_answer import Timings


def _answer(body: bytes) -> Answered:
    return Answered(200, body, None, Timings())


def test_answer_is_taken_once() -> None:
    kept = KeptAnswers(max_count=2)
    answer = _answer(b"{}")
    kept.put("r", answer)
    assert kept.take("other") is None
    assert kept.take("r") is answer
    assert kept.take("r") is None


def test_oldest_is_dropped_when_there_are_too_many() -> None:
    kept = KeptAnswers(max_count=2)
    for number in range(3):
        kept.put(str(number), _answer(b"{}"))
    assert [kept.take(str(number)) is not None for number in range(3)] == [False, True, True]


def test_oldest_is_dropped_when_they_are_too_long() -> None:
    kept = KeptAnswers(max_count=10, max_bytes=10)
    kept.put("a", _answer(b"1234"))
    kept.put("b", _answer(b"1234"))
    kept.put("c", _answer(b"1234"))
    assert [kept.take(name) is not None for name in "abc"] == [False, True, True]


def test_answer_longer_than_all_room_is_not_kept_and_costs_the_process_nothing() -> None:
    kept = KeptAnswers(max_count=10, max_bytes=10)
    kept.put("a", _answer(b"x" * 11))
    assert kept.take("a") is None
    kept.put("b", _answer(b"x" * 10))
    assert kept.take("b") is not None


def test_later_answer_of_a_request_replaces_the_earlier() -> None:
    kept = KeptAnswers(max_count=10, max_bytes=10)
    kept.put("a", _answer(b"x" * 9))
    kept.put("a", _answer(b"new"))
    kept.put("b", _answer(b"x" * 7))
    first = kept.take("a")
    assert isinstance(first, Answered)
    assert first.body == b"new"
    assert kept.take("b") is not None


def test_a_refusal_takes_the_room_of_its_body() -> None:
    kept = KeptAnswers(max_count=10, max_bytes=10)
    kept.put("a", ModelError(400, "no", b"x" * 6))
    kept.put("b", InvalidAnswer("no JSON"))
    kept.put("c", ModelError(400, "no", None))
    kept.put("d", ModelError(400, "no", b"x" * 5))
    assert [kept.take(name) is not None for name in "abcd"] == [False, True, True, True]


def test_room_is_64_mib() -> None:
    assert MAX_BYTES == 64 * 1024 * 1024


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(-1, 12)), max_size=40))
def test_never_more_than_the_room_and_always_the_newest(steps: list[tuple[str, int]]) -> None:
    kept = KeptAnswers(max_count=3, max_bytes=20)
    model: dict[str, bytes] = {}
    for name, size in steps:
        if size < 0:
            taken = kept.take(name)
            assert (taken.body if isinstance(taken, Answered) else None) == model.pop(name, None)
            continue
        body = bytes(size)
        model.pop(name, None)
        model[name] = body
        kept.put(name, _answer(body))
        while len(model) > 3 or sum(map(len, model.values())) > 20:
            del model[next(iter(model))]
    for name, body in model.items():
        taken = kept.take(name)
        assert taken is not None
        assert taken.body == body
