"""Counts what became of every request. Pure: it knows an `Evidence` and nothing of the worker, its logs or its code.

A counter of `BAD` other than zero is a broken promise. What is counted beside them is allowed, and worth knowing.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .journal import (
    DEAD_LETTERED,
    LATE_DELIVERY,
    PUBLISHED_TWICE,
    WITH_RESULT,
    Called,
    Effect,
    Evidence,
    Expected,
    Injected,
    ModelCall,
    Sent,
    StreamEntry,
)
from .taps import REQUEST_ID

#: every counter that must be zero, and what it counts
BAD = {
    "lost": "requests without a result that are not in the queue either, or that had to be dead-lettered and were not",
    "wrong": "results that are not, byte for byte, what the model answered, or not the failure that it must be",
    "without_ttl": "results that would stay in Redis for ever",
    "overwritten": "completed results that were written again",
    "stream_wrong": "streams after which one who followed them has another text than the result's, or no end",
    "billed_twice": "requests with two usage events under different ids, or one event kept twice",
    "billed_wrongly": "usage events with other token counts than the answer's, or for no request of ours",
    "billed_though_failed": "usage events of requests that failed",
    "not_billed": "completed requests without a usage event",
    "dead_lettered_wrongly": "messages in the dead-letter queue that should not be there",
    "stuck": "messages left in the queue, ready or unacked, when all was done",
    "unexplained_calls": "calls of the model beyond the first for which the journal has no reason",
    "unprovoked_session_ends": "broker sessions that ended without a fault",
    "bad_exits": "workers that ended by themselves, or not with 0 after SIGTERM",
    "not_recovered": "faults after which not all was well again in time",
}
#: how long after the end of a cause its consequences may begin: reconnecting, a doubled pause of Redis' probe
_TAIL_S = 20.0
#: a write is read in the file a little after it was made
_SEEN_SLACK_S = 0.5
#: what was rejected longer before a kill of the broker is on its disk. A rejected message is moved without confirms,
#: and a classic queue of RabbitMQ 4.3 keeps what nobody waits for in memory: a kill cost it those of two minutes
_ON_DISK_AFTER_S = {"quorum": 2.0, "classic": float("inf")}
#: how long after a freeze a worker may take to learn that its session is gone
_UNKNOWING_S = 3.0
_COMPLETED_HEAD = b'{"status":"completed","status_code":200,"result":'
_STATUS_CODES = {
    Expected.MALFORMED: (400, "malformed_request"),
    Expected.EXPIRED: (408, "expired"),
    Expected.REFUSED: (400, "model_error"),
    Expected.UNANSWERABLE: (500, "model_unavailable"),
}
#: problems that are told in words; the counters count all
_MAX_TOLD = 40


@dataclass
class Verdict:
    """What the checker found."""

    bad: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BAD, 0))
    #: allowed, and worth knowing
    counts: dict[str, int] = field(default_factory=dict)
    #: calls of the model beyond the first of their request, by reason
    repeated_calls: dict[str, int] = field(default_factory=dict)
    #: sentences
    problems: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        return not any(self.bad.values())

    def add(self, counter: str, sentence: str) -> None:
        """Count a broken promise."""
        self.bad[counter] += 1
        if len(self.problems) < _MAX_TOLD:
            self.problems.append(f"{counter}: {sentence}")

    def merge(self, other: Verdict) -> None:
        """Add another round's counts."""
        for mine, theirs in (
            (self.bad, other.bad),
            (self.counts, other.counts),
            (self.repeated_calls, other.repeated_calls),
        ):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count
        self.problems = (self.problems + other.problems)[:_MAX_TOLD]


def check(evidence: Evidence) -> Verdict:
    """Count."""
    verdict = Verdict()
    _check_results(evidence, verdict)
    _check_writes(evidence, verdict)
    _check_streams(evidence, verdict)
    _check_bills(evidence, verdict)
    _check_queues(evidence, verdict)
    _check_calls(evidence, verdict)
    _check_sessions(evidence, verdict)
    for code in evidence.exit_codes:
        if code != 0:
            verdict.add("bad_exits", f"a worker ended with {code}")
    for fault in evidence.faults:
        if not fault.whole_at:
            verdict.add("not_recovered", f"fault {fault.number}, {fault.kind} {fault.point}")
    completed = sum(sent.expected is Expected.COMPLETED for sent in evidence.sent)
    verdict.counts |= {
        "requests": len(evidence.sent),
        "must_complete": completed,
        "streamed": sum(sent.is_streamed for sent in evidence.sent),
        "must_fail": len(evidence.sent) - completed,
        "published_twice": sum(sent.publish_count > 1 for sent in evidence.sent),
        "usage_events_repeated_under_the_same_id": evidence.repeated_event_count,
        "model_calls": len(evidence.model_calls),
        "requests_without_a_final_record": _count_without_record(evidence),
        "session_ends": len(evidence.session_ends),
    }
    return verdict


# -- results ----------------------------------------------------------------------------------------------------------


def _check_results(evidence: Evidence, verdict: Verdict) -> None:
    answers = _answers(evidence)
    queued = set(evidence.queued)
    for sent in evidence.sent:
        found = evidence.results.get(sent.request_id)
        if sent.expected not in WITH_RESULT:
            if found is not None:
                verdict.add("wrong", f"{sent.request_id} has a result, and no id could be read")
            continue
        if found is None:
            if sent.request_id not in queued:
                verdict.add("lost", f"{sent.request_id} ({sent.expected.value}) has no result and is not in the queue")
            continue
        value, ttl_ms = found
        if ttl_ms < 0:
            verdict.add("without_ttl", sent.request_id)
        fault = find_fault(sent, value, answers.get(sent.request_id, frozenset()))
        if fault:
            verdict.add("wrong", f"{sent.request_id}: {fault}")


def _answers(evidence: Evidence) -> dict[str, set[str]]:
    """Collect the hashes of the whole answers that the model gave to each request."""
    request_ids = {called.attempt: called.request_id for called in evidence.called}
    answers: dict[str, set[str]] = defaultdict(set)
    for call in evidence.model_calls:
        if call.answer_sha256 is not None:
            answers[request_ids.get(call.attempt, "")].add(call.answer_sha256)
    return answers


def find_fault(sent: Sent, value: bytes, answers: Iterable[str]) -> str:
    """Return what is wrong with a result; nothing when it is right."""
    try:
        result = json.loads(value.decode())
    except ValueError as err:
        return f"no JSON ({err})"
    if not isinstance(result, dict):
        return "no JSON object"
    if sent.expected is Expected.COMPLETED:
        if result.get("status") != "completed":
            return f"must be completed and is {result.get('status')}: {str(result.get('error'))[:100]}"
        return _find_fault_of_completed(sent, value, result["result"], answers)
    expected = _STATUS_CODES[sent.expected]
    if (result.get("status"), result.get("status_code"), result.get("error_type")) != ("failed", *expected):
        return f"must be failed {expected} and is {value[:100]!r}"
    return ""


def _find_fault_of_completed(sent: Sent, value: bytes, body: dict[str, Any], answers: Iterable[str]) -> str:
    if not value.startswith(_COMPLETED_HEAD):
        return f"begins with {value[:60]!r}"
    said = body["choices"][0]["message"]["content"]
    if said != sent.text:
        return f"says {said[:80]!r}, the model says {sent.text[:80]!r}"
    if body["usage"]["total_tokens"] != sent.total_tokens:
        return f"counts {body['usage']['total_tokens']} tokens, there are {sent.total_tokens}"
    if sent.is_streamed:
        return ""  # put together from chunks by the worker: no answer of the model has these bytes
    if hashlib.sha256(value[len(_COMPLETED_HEAD) : -1]).hexdigest() not in set(answers):
        return "its bytes are none of the model's answers"
    return ""


def _check_writes(evidence: Evidence, verdict: Verdict) -> None:
    known = {sent.request_id for sent in evidence.sent}
    completed: set[str] = set()
    for write in evidence.writes:
        if write.request_id not in known:
            verdict.add("wrong", f"a result was written for {write.request_id}, which nobody sent")
            continue
        if not write.has_ttl:
            verdict.add("without_ttl", f"{write.request_id}, as it was written")
        if write.request_id in completed:
            verdict.add("overwritten", write.request_id)
        if write.value.startswith(b'{"status":"completed"'):
            completed.add(write.request_id)


def _check_streams(evidence: Evidence, verdict: Verdict) -> None:
    for sent in evidence.sent:
        if not sent.is_streamed or sent.request_id not in evidence.results:
            continue
        text = follow(evidence.streams.get(sent.request_id, []))
        if text != sent.text:
            kinds = [(entry.kind, entry.attempt) for entry in evidence.streams.get(sent.request_id, [])]
            verdict.add("stream_wrong", f"{sent.request_id}: {text!r}, must be {sent.text!r}; {kinds}")


def follow(entries: Iterable[StreamEntry]) -> str | None:
    """Return the text of one who followed a stream to its end, by the rules of the README; None without an end."""
    text, attempt = "", None
    for entry in entries:
        if entry.kind == "chunk" and attempt not in (None, entry.attempt):
            continue  # the last words of an attempt that was taken over
        attempt = entry.attempt
        match entry.kind:
            case "restart":
                text = ""
            case "chunk":
                for chunk in json.loads(entry.data):
                    text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            case "done":
                return text
    return None


# -- bills ------------------------------------------------------------------------------------------------------------


def _check_bills(evidence: Evidence, verdict: Verdict) -> None:
    sent = {each.request_id: each for each in evidence.sent}
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in evidence.usage_events:
        events[str(event["data"].get("request_id"))].append(event)
    for request_id, found in events.items():
        request = sent.get(request_id)
        if request is None:
            verdict.add("billed_wrongly", f"{request_id} is billed, and nobody sent it")
        elif request.expected is not Expected.COMPLETED:
            verdict.add("billed_though_failed", f"{request_id} ({request.expected.value})")
        else:
            if len(found) > 1:
                verdict.add("billed_twice", f"{request_id}: {[(event['source'], event['id']) for event in found]}")
            if found[0]["data"]["total_tokens"] != request.total_tokens:
                verdict.add(
                    "billed_wrongly", f"{request_id}: {found[0]['data']}, and had {request.total_tokens} tokens"
                )
    for request in evidence.sent:
        is_completed = request.expected is Expected.COMPLETED and request.request_id in evidence.results
        if is_completed and request.request_id not in events:
            verdict.add("not_billed", request.request_id)


def _count_without_record(evidence: Evidence) -> int:
    """Count completed requests whose last record did not reach MetricServer: those of a killed worker are lost."""
    told = {record["request_id"] for record in evidence.records if record["status"] == "completed"}
    return sum(
        sent.expected is Expected.COMPLETED and sent.request_id in evidence.results and sent.request_id not in told
        for sent in evidence.sent
    )


# -- queues -----------------------------------------------------------------------------------------------------------


def _check_queues(evidence: Evidence, verdict: Verdict) -> None:
    if evidence.ready_count or evidence.unacked_count:
        verdict.bad["stuck"] += evidence.ready_count + evidence.unacked_count
        verdict.problems.append(f"stuck: {evidence.ready_count} ready, {evidence.unacked_count} unacked")
    expected = {sent.request_id: sent for sent in evidence.sent if sent.expected in DEAD_LETTERED}
    found: Counter[str] = Counter()
    for body in evidence.dead_letters:
        request_id = find_request_id(body)
        if request_id in expected:
            found[request_id] += 1
        else:
            verdict.add("dead_lettered_wrongly", repr(body[:120]))
    lost_by_broker = 0
    for request_id, request in expected.items():
        if found[request_id]:
            continue
        if _lost_by_broker(request_id, evidence):
            lost_by_broker += 1
        else:
            verdict.add("lost", f"{request_id} ({request.expected.value}) is not in the dead-letter queue")
    verdict.counts["dead_letters_lost_by_the_killed_broker"] = lost_by_broker
    verdict.counts["dead_letters_twice"] = sum(
        count > expected[request_id].publish_count for request_id, count in found.items()
    )


def find_request_id(body: bytes) -> str:
    """Return whose message a body is; some are no JSON."""
    found = REQUEST_ID.search(body)
    return found.group(1).decode() if found else ""


def _lost_by_broker(request_id: str, evidence: Evidence) -> bool:
    """Whether the broker was killed after it was told to dead-letter a message, which it moves without confirms."""
    on_disk_after_s = _ON_DISK_AFTER_S[evidence.dead_letter_queue_type]
    return any(
        Effect.BROKER_KILLED in fault.effects
        and rejected.at <= fault.cleared_at
        and fault.begun_at - rejected.at < on_disk_after_s
        for rejected in evidence.rejected
        if rejected.request_id == request_id
        for fault in evidence.faults
    )


# -- calls of the model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A call as both sides saw it."""

    called: Called
    model: ModelCall

    @property
    def begun_at(self) -> float:
        return self.model.begun_at


def _check_calls(evidence: Evidence, verdict: Verdict) -> None:
    known = {sent.request_id: sent for sent in evidence.sent}
    stored: dict[str, float] = {}
    for write in evidence.writes:
        if write.value.startswith(b'{"status":"completed"'):
            stored.setdefault(write.request_id, write.seen_at)
    reasons: Counter[str] = Counter()
    for request_id, calls in _calls_by_request(evidence).items():
        request = known.get(request_id)
        if request is None:
            verdict.add("unexplained_calls", f"{len(calls)} call(s) for {request_id}, which nobody sent")
            continue
        for number, reason in explain(request, calls, evidence.faults, stored.get(request_id)):
            if reason is None:
                call = calls[number]
                verdict.add(
                    "unexplained_calls",
                    f"call {number + 1} of {request_id} by {call.called.seat} at {call.begun_at:.3f}; before: "
                    + ", ".join(_describe(each) for each in calls[:number])
                    + f"; stored {stored.get(request_id, 0.0):.3f}",
                )
            else:
                reasons[reason] += 1
    verdict.repeated_calls = dict(reasons)


def _describe(call: _Call) -> str:
    end = "completed" if call.model.completed else call.model.fault
    return f"{call.called.seat}/{call.called.life} at {call.begun_at:.3f} {end} {call.model.hung_up_at or ''}"


def _calls_by_request(evidence: Evidence) -> dict[str, list[_Call]]:
    called = {each.attempt: each for each in evidence.called}
    calls: dict[str, list[_Call]] = defaultdict(list)
    for call in evidence.model_calls:
        each = called.get(call.attempt)
        if each is not None:
            calls[each.request_id].append(_Call(each, call))
    for found in calls.values():
        found.sort(key=lambda call: call.begun_at)
    return calls


def explain(
    request: Sent, calls: list[_Call], faults: list[Injected], stored_at: float | None
) -> list[tuple[int, str | None]]:
    """Name the reason of each call beyond the first: (index of the call, reason or None). Each reason serves once."""
    used: set[tuple[object, ...]] = set()
    explained: list[tuple[int, str | None]] = []
    for number in range(1, len(calls)):
        explained.append((number, _find_reason(request, calls, number, faults, stored_at, used)))
    return explained


def _find_reason(
    request: Sent,
    calls: list[_Call],
    number: int,
    faults: list[Injected],
    stored_at: float | None,
    used: set[tuple[object, ...]],
) -> str | None:
    call = calls[number]
    is_stored = stored_at is not None and call.begun_at > stored_at + _SEEN_SLACK_S
    for index in range(number - 1, -1, -1):
        before = calls[index]
        for key, reason in _reasons(before, call, faults, is_stored=is_stored):
            if (index, *key) not in used:
                used.add((index, *key))
                return reason
    for copy in range(1, request.publish_count):
        # the broker got it twice: the second is no redelivery, and nothing tells a worker to look for a result
        if ("published", copy) not in used:
            used.add(("published", copy))
            return PUBLISHED_TWICE
    return None


def _reasons(
    before: _Call, call: _Call, faults: list[Injected], *, is_stored: bool
) -> Iterable[tuple[tuple[object, ...], str]]:
    """Yield what made a call necessary though another one came before it."""
    if not is_stored and not before.model.completed and before.model.fault != "none":
        yield ("model",), Effect.MODEL_FAILED.value
    for fault in faults:
        # between the two calls, or while the first ran
        if not (before.begun_at <= fault.cleared_at + _TAIL_S and fault.begun_at <= call.begun_at):
            continue
        is_concerned = fault.seat in ("", before.called.seat)
        for effect in fault.effects:
            if effect is Effect.BROKER_KILLED and before.begun_at <= fault.cleared_at:
                # a broker that is killed forgets acks and marks of delivery: the message comes back as a new one
                yield (fault.number, effect), effect.value
            if effect is Effect.SESSION_LOST and fault.seat == call.called.seat and _is_late(call, fault):
                yield (fault.number, LATE_DELIVERY), LATE_DELIVERY
            if is_stored or not is_concerned:
                continue
            match effect:
                case Effect.PROCESS_ENDED:
                    if before.begun_at <= fault.cleared_at and before.called.seat == fault.seat:
                        yield (fault.number, effect), effect.value
                case Effect.SESSION_LOST:
                    yield (fault.number, effect), effect.value
                case Effect.STORE_DOWN:
                    # a worker keeps the answers that it could not store, and never asks again for them
                    if (before.called.seat, before.called.life) != (call.called.seat, call.called.life):
                        yield (fault.number, effect), effect.value
                case Effect.MODEL_FAILED:
                    if not before.model.completed:
                        yield (fault.number, effect), effect.value
                case Effect.BROKER_KILLED:
                    pass


def _is_late(call: _Call, fault: Injected) -> bool:
    """Whether a call began when its worker could not know yet that its session was lost."""
    return fault.begun_at <= call.begun_at <= fault.cleared_at + _UNKNOWING_S


# -- sessions ---------------------------------------------------------------------------------------------------------

#: faults after which a session ends, beside those that say so
_ENDS_SESSIONS = frozenset({Effect.SESSION_LOST, Effect.PROCESS_ENDED, Effect.BROKER_KILLED})
_SESSION_TAIL_S = 40.0


def _check_sessions(evidence: Evidence, verdict: Verdict) -> None:
    for end in evidence.session_ends:
        provoked = any(
            fault.begun_at - 1.0 <= end.at <= fault.cleared_at + _SESSION_TAIL_S
            and fault.seat in ("", end.seat)
            and (_ENDS_SESSIONS.intersection(fault.effects) or fault.ends_session)
            for fault in evidence.faults
        )
        if not provoked:
            verdict.add("unprovoked_session_ends", f"{end.seat} at {end.at:.3f}")
