"""The checker notices: made-up journals of broken promises, and real workers with one law broken each."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devstack.rabbitmq import RabbitMq
from tests.integration.support import write_launcher

from .checker import BAD, Verdict, check
from .journal import (
    LATE_DELIVERY,
    PUBLISHED_TWICE,
    Called,
    Effect,
    Evidence,
    Expected,
    Injected,
    ModelCall,
    Rejected,
    Sent,
    SessionEnd,
    StreamEntry,
    Write,
)
from .points import Point
from .scenarios import Scenario, play, tag_of_another_session, under_load, without_an_answer

# -- made-up journals -------------------------------------------------------------------------------------------------

BODY = json.dumps(
    {"choices": [{"message": {"content": "You said: hi"}}], "usage": {"total_tokens": 6}}, separators=(",", ":")
).encode()
RESULT = b'{"status":"completed","status_code":200,"result":' + BODY + b"}"
UNREADABLE = b'no JSON, "request_id": "b"'
ANSWER = hashlib.sha256(BODY).hexdigest()
STORED_AT = 10.5


def failed(code: int, kind: str) -> bytes:
    return json.dumps({"status": "failed", "status_code": code, "error": "no", "error_type": kind}).encode()


def event(request_id: str = "a", **changes: Any) -> dict[str, Any]:
    return {"source": "s", "id": request_id, "data": {"request_id": request_id, "total_tokens": 6}, **changes}


def called(number: int, at: float, *, seat: str = "w1", life: int = 1, request_id: str = "a") -> Called:
    return Called(f"{request_id}-{number}", request_id, seat, life, at)


def model_call(number: int, at: float, *, fault: str = "none", request_id: str = "a") -> ModelCall:
    ok = fault == "none"
    return ModelCall(f"{request_id}-{number}", at, ok, fault, None, ANSWER if ok else None)


def good(**changes: Any) -> Evidence:
    """Return the evidence of one request that went well."""
    evidence = Evidence(
        sent=[Sent("a", Expected.COMPLETED, "You said: hi", 6, 9.0)],
        writes=[Write("a", RESULT, True, STORED_AT)],
        results={"a": (RESULT, 1000)},
        called=[called(1, 10.0)],
        model_calls=[model_call(1, 10.0)],
        usage_events=[event()],
        records=[{"request_id": "a", "status": "completed"}],
    )
    return replace(evidence, **changes)


def streamed(*entries: tuple[str, str, str]) -> Evidence:
    """Make the request a streamed one, with these entries: (type, attempt, text)."""
    stream = [
        StreamEntry(kind, attempt, json.dumps([{"choices": [{"delta": {"content": text}}]}]).encode())
        for kind, attempt, text in entries
    ]
    return good(sent=[replace(good().sent[0], is_streamed=True)], streams={"a": stream})


def one_more(evidence: Evidence, expected: Expected, value: bytes | None, **changes: Any) -> Evidence:
    """Add a request "b" to an evidence, with its result."""
    sent = Sent("b", expected, "", 0, 9.0)
    results = {**evidence.results, **({"b": (value, 1000)} if value is not None else {})}
    writes = [*evidence.writes, *([Write("b", value, True, 10.0)] if value is not None else [])]
    return replace(evidence, sent=[*evidence.sent, sent], results=results, writes=writes, **changes)


def only(counter: str, count: int = 1) -> dict[str, int]:
    return {**dict.fromkeys(BAD, 0), counter: count}


def test_a_request_that_went_well_breaks_no_promise() -> None:
    verdict = check(good())
    assert verdict.holds
    assert verdict.counts["requests"] == 1
    assert verdict.repeated_calls == {}


BROKEN_PROMISES: dict[str, tuple[Evidence, str]] = {
    "no result": (good(results={}, writes=[], usage_events=[]), "lost"),
    "another's answer": (good(sent=[Sent("a", Expected.COMPLETED, "You said: ho", 6, 9.0)]), "wrong"),
    "no JSON": (good(results={"a": (RESULT[:-1], 1000)}), "wrong"),
    "a byte that the model never sent": (good(results={"a": (RESULT[:-1] + b" }", 1000)}), "wrong"),
    "failed, though the model had the answer": (good(results={"a": (failed(500, "x"), 1000)}), "wrong"),
    "no end in Redis": (good(results={"a": (RESULT, -1)}), "without_ttl"),
    "written without an end": (good(writes=[Write("a", RESULT, False, STORED_AT)]), "without_ttl"),
    "written again": (
        good(writes=[Write("a", RESULT, True, STORED_AT), Write("a", RESULT, True, 12.0)]),
        "overwritten",
    ),
    "a result for nobody": (good(writes=[*good().writes, Write("z", RESULT, True, 11.0)]), "wrong"),
    "a stream without an end": (streamed(("chunk", "1", "You said: hi")), "stream_wrong"),
    "a stream with a piece twice": (
        streamed(("chunk", "1", "You said:"), ("chunk", "1", "You said:"), ("chunk", "1", " hi"), ("done", "1", "")),
        "stream_wrong",
    ),
    "two events under different ids": (good(usage_events=[event(), event(id="other")]), "billed_twice"),
    "other tokens": (good(usage_events=[event(data={"request_id": "a", "total_tokens": 7})]), "billed_wrongly"),
    "a bill for nobody": (good(usage_events=[event(), event("z")]), "billed_wrongly"),
    "no bill": (good(usage_events=[]), "not_billed"),
    "a bill for a failure": (
        one_more(good(usage_events=[event(), event("b")]), Expected.EXPIRED, failed(408, "expired")),
        "billed_though_failed",
    ),
    "the wrong failure": (one_more(good(), Expected.EXPIRED, failed(400, "malformed_request")), "wrong"),
    "a result for the unreadable": (
        one_more(
            good(dead_letters=[b'no JSON, "request_id": "b"']), Expected.UNREADABLE, failed(400, "malformed_request")
        ),
        "wrong",
    ),
    "no dead letter": (one_more(good(), Expected.MALFORMED, failed(400, "malformed_request")), "lost"),
    "a dead letter that was answered": (good(dead_letters=[b'{"request_id": "a"}']), "dead_lettered_wrongly"),
    "still unacked": (good(unacked_count=1), "stuck"),
    "a session that ended by itself": (good(session_ends=[SessionEnd("w1", 50.0)]), "unprovoked_session_ends"),
    "an exit code": (good(exit_codes=[0, 75]), "bad_exits"),
    "a fault that was not overcome": (good(faults=[Injected(1, "x", "", "", begun_at=1.0)]), "not_recovered"),
    "a second call for nothing": (
        good(called=[called(1, 10.0), called(2, 10.2)], model_calls=[model_call(1, 10.0), model_call(2, 10.2)]),
        "unexplained_calls",
    ),
    "a call for nobody": (
        good(
            called=[called(1, 10.0), called(1, 10.0, request_id="z")],
            model_calls=[model_call(1, 10.0), model_call(1, 10.0, request_id="z")],
        ),
        "unexplained_calls",
    ),
}


@pytest.mark.parametrize("case", BROKEN_PROMISES)
def test_a_broken_promise_is_counted_once_and_as_what_it_is(case: str) -> None:
    evidence, counter = BROKEN_PROMISES[case]
    assert check(evidence).bad == only(counter)


def test_every_counter_is_seen_to_count() -> None:
    assert {counter for _, counter in BROKEN_PROMISES.values()} == set(BAD)


def test_a_stream_is_followed_over_a_restart_and_the_last_words_of_an_attempt_that_was_taken_over() -> None:
    evidence = streamed(
        ("chunk", "1", "You sa"),
        ("restart", "2", ""),
        ("chunk", "1", "id: hi"),
        ("chunk", "2", "You said: hi"),
        ("done", "2", ""),
    )
    assert check(evidence).holds


def test_what_waits_in_the_queue_is_stuck_and_not_lost() -> None:
    evidence = good(results={}, writes=[], usage_events=[], queued=["a"], ready_count=1)
    assert check(evidence).bad == only("stuck")


# -- reasons for one more call ----------------------------------------------------------------------------------------

FAULTS = {
    effect: Injected(1, effect.name, "", "", "w1", begun_at=10.1, cleared_at=10.2, whole_at=12.0, effects=(effect,))
    for effect in Effect
}


def twice(at: float, *, seat: str = "w2", fault: Injected | None = None, stored_at: float = 11.5) -> Evidence:
    """Return the evidence of a request that was called at 10.0 by w1, and again."""
    return good(
        writes=[Write("a", RESULT, True, stored_at)],
        called=[called(1, 10.0), called(2, at, seat=seat)],
        model_calls=[model_call(1, 10.0), model_call(2, at)],
        faults=[fault] if fault else [],
    )


@pytest.mark.parametrize("effect", [Effect.PROCESS_ENDED, Effect.SESSION_LOST, Effect.STORE_DOWN, Effect.BROKER_KILLED])
def test_a_call_is_explained_by_what_befell_the_worker_that_made_the_first(effect: Effect) -> None:
    verdict = check(twice(11.0, fault=FAULTS[effect]))
    assert verdict.holds
    assert verdict.repeated_calls == {effect.value: 1}


@pytest.mark.parametrize("effect", [Effect.PROCESS_ENDED, Effect.SESSION_LOST, Effect.STORE_DOWN])
def test_a_fault_of_another_worker_explains_nothing(effect: Effect) -> None:
    verdict = check(twice(11.0, fault=replace(FAULTS[effect], seat="w3")))
    assert verdict.bad == only("unexplained_calls")


@pytest.mark.parametrize("effect", [Effect.PROCESS_ENDED, Effect.SESSION_LOST, Effect.STORE_DOWN])
def test_nothing_explains_a_call_after_the_result_was_stored(effect: Effect) -> None:
    verdict = check(twice(13.0, fault=FAULTS[effect], stored_at=10.05))
    assert verdict.bad == only("unexplained_calls")


def test_a_fault_after_the_second_call_explains_nothing() -> None:
    verdict = check(twice(10.05, fault=FAULTS[Effect.PROCESS_ENDED]))
    assert verdict.bad == only("unexplained_calls")


def test_a_worker_that_could_not_store_an_answer_has_no_reason_to_ask_for_it_again() -> None:
    verdict = check(twice(11.0, seat="w1", fault=FAULTS[Effect.STORE_DOWN]))
    assert verdict.bad == only("unexplained_calls")


def test_a_fault_explains_one_more_call_of_a_request_and_not_two() -> None:
    evidence = twice(11.0, fault=FAULTS[Effect.PROCESS_ENDED])
    evidence.called.append(called(3, 11.1, seat="w3"))
    evidence.model_calls.append(model_call(3, 11.1))
    assert check(evidence).bad == only("unexplained_calls")


def test_a_failed_call_explains_the_next() -> None:
    evidence = twice(11.0)
    evidence.model_calls[0] = model_call(1, 10.0, fault="reset_body")
    verdict = check(evidence)
    assert verdict.holds
    assert verdict.repeated_calls == {Effect.MODEL_FAILED.value: 1}


def test_a_request_that_was_published_twice_may_be_called_twice() -> None:
    evidence = twice(11.0)
    evidence.sent[0].publish_count = 2
    assert check(evidence).repeated_calls == {PUBLISHED_TWICE: 1}


def test_a_frozen_worker_may_take_up_what_was_given_to_another_meanwhile() -> None:
    fault = replace(FAULTS[Effect.SESSION_LOST], seat="w2", cleared_at=13.0)
    verdict = check(twice(13.5, seat="w2", fault=fault, stored_at=10.5))
    assert verdict.repeated_calls == {LATE_DELIVERY: 1}


def test_a_session_that_a_fault_ended_is_no_broken_promise() -> None:
    assert check(good(session_ends=[SessionEnd("w1", 10.3)], faults=[FAULTS[Effect.SESSION_LOST]])).holds


@pytest.mark.parametrize(
    ("queue_type", "rejected_at", "is_excused"),
    [
        ("quorum", 9.5, True),
        ("quorum", 8.0, False),
        ("quorum", 10.5, False),
        ("classic", 8.0, True),
        ("classic", 10.5, False),
    ],
)
def test_the_broker_may_lose_what_was_rejected_before_it_was_killed_and_not_on_its_disk(
    queue_type: str, rejected_at: float, is_excused: bool
) -> None:
    kill = replace(FAULTS[Effect.BROKER_KILLED], seat="")
    evidence = one_more(good(faults=[kill]), Expected.UNREADABLE, None, rejected=[Rejected("b", rejected_at)])
    evidence.dead_letter_queue_type = queue_type
    verdict = check(evidence)
    assert verdict.counts["dead_letters_lost_by_the_killed_broker"] == int(is_excused)
    assert verdict.bad == only("lost", 0 if is_excused else 1)


# -- real workers with one law broken each ----------------------------------------------------------------------------

SCENARIOS: dict[str, tuple[Scenario, str]] = {
    "ack_before_set": (Scenario(under_load("worker: SIGKILL", Point.ANSWERED)), "lost"),
    "no_confirm": (Scenario(under_load("worker's AMQP link: cut", Point.PUBLISHING)), "lost"),
    "no_session_check": (
        Scenario(
            tag_of_another_session,
            seat_count=2,
            settings={
                "RABBITMQ_PREFETCH": 2,
                "MODEL_INFER_TIMEOUT_S": 60,
                "RABBITMQ_HEARTBEAT_S": 60,
                "REDIS_TIMEOUT_S": 240,
            },
        ),
        "lost",
    ),
    "requeue_loop": (Scenario(under_load("Redis: read-only for 1 to 4 s")), "unexplained_calls"),
    "bills_failures": (Scenario(without_an_answer, settings={"RABBITMQ_MAX_RETRIES": 0}), "billed_though_failed"),
}


#: a minute for both: calls that last until a worker has been given another session
_NAMES = [pytest.param(name, marks=pytest.mark.slow) if name == "no_session_check" else name for name in SCENARIOS]


def play_with(name: str, rabbitmq: RabbitMq, folder: Path, *, broken: bool) -> Verdict:
    launcher = None
    if broken:
        script = f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tests.faults.broken.{name}\n"
        launcher = write_launcher(folder, script)
    return play(SCENARIOS[name][0], rabbitmq=rabbitmq, launcher=launcher, folder=folder)


@pytest.mark.integration
@pytest.mark.parametrize("name", _NAMES)
def test_a_worker_with_a_broken_law_is_found_out(name: str, rabbitmq: RabbitMq, tmp_path: Path) -> None:
    verdict = play_with(name, rabbitmq, tmp_path, broken=True)
    assert verdict.bad[SCENARIOS[name][1]], verdict


@pytest.mark.integration
@pytest.mark.parametrize("name", _NAMES)
def test_the_worker_as_it_is_breaks_no_promise_there(name: str, rabbitmq: RabbitMq, tmp_path: Path) -> None:
    verdict = play_with(name, rabbitmq, tmp_path, broken=False)
    assert verdict.holds, verdict
