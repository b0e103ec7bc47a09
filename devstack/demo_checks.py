"""Everything the demo holds true, each check a sentence and what speaks against it. Looks at the stack afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from devstack.demo_requests import DemoRequest
from devstack.stack import DeadLetter, Stack

#: dispositions that end a request; "requeue" and "republish" do not
_FINAL = ("ack", "reject")


@dataclass(frozen=True)
class Outcome:
    """What the demo saw of one request."""

    request: DemoRequest
    result: dict[str, Any] | None
    latency_s: float | None  #: from publishing to seeing the result


@dataclass(frozen=True)
class Evidence:
    """All that the checks look at."""

    stack: Stack
    outcomes: Sequence[Outcome]
    dead_letters: Sequence[DeadLetter]
    exit_code: int


@dataclass(frozen=True)
class Check:
    """A sentence that must hold, and the objections; it holds when there is none."""

    sentence: str
    objections: Sequence[str]


def run_checks(evidence: Evidence) -> list[Check]:
    """Hold the evidence against every sentence."""
    checks: list[tuple[str, Callable[[Evidence], list[str]]]] = [
        ("every request has the result that it must have", object_to_results),
        ("the dead-letter queue holds exactly the malformed ones, unchanged", object_to_dead_letters),
        ("MetricServer has one final record of each delivery, and one for each retry", object_to_records),
        ("MetricServer was told the model's numbers, its health and the queue's", object_to_documents),
        ("Croesus bills each completed request once, with the tokens of its answer", object_to_bills),
        ("the request queue is empty and nothing is unacked", object_to_queue),
        ("the worker exits with 0 on SIGTERM", object_to_exit),
    ]
    if evidence.stack.model is not None:
        checks.append(("the model was called once for each request, twice for the reset one", object_to_calls))
        checks.append(("the tokens billed are the tokens in the model's own ledger", object_to_token_sum))
    return [Check(sentence, object_to(evidence)) for sentence, object_to in checks]


def object_to_results(evidence: Evidence) -> list[str]:
    """Compare each result with its request's expected end."""
    objections = []
    for outcome in evidence.outcomes:
        request, result = outcome.request, outcome.result
        if not request.status:
            continue
        if result is None:
            objections.append(f"{request.title}: no result")
            continue
        found = (result.get("status"), result.get("status_code"))
        if found != (request.status, request.status_code):
            objections.append(f"{request.title}: {found} instead of {(request.status, request.status_code)}")
        elif request.status == "completed" and not answer_text(result):
            objections.append(f"{request.title}: no text in the result")
        elif request.status == "failed" and not result.get("error"):
            objections.append(f"{request.title}: no error sentence")
        elif (
            evidence.stack.model is not None
            and request.status == "completed"
            and request.text not in answer_text(result)
        ):
            objections.append(f"{request.title}: the answer is another request's: {answer_text(result)!r}")
    return objections


def object_to_dead_letters(evidence: Evidence) -> list[str]:
    """Compare the dead letters with the requests that belong there, byte for byte."""
    expected = sorted(outcome.request.body for outcome in evidence.outcomes if outcome.request.dead_letter)
    found = sorted(letter.body for letter in evidence.dead_letters)
    return [] if found == expected else [f"{len(found)} dead letter(s) instead of {len(expected)}, or other bodies"]


def object_to_records(evidence: Evidence) -> list[str]:
    """Count the records by request and disposition."""
    objections = []
    records = evidence.stack.metric_server.records
    for outcome in evidence.outcomes:
        request = outcome.request
        own = [record for record in records if (record["request_id"] or "") == request.request_id]
        final = [record for record in own if record["disposition"] in _FINAL]
        retries = [record for record in own if record["disposition"] == "republish"]
        if len(final) != 1 or len(retries) != request.retry_count:
            objections.append(f"{request.title}: {len(final)} final record(s), {len(retries)} retry record(s)")
        elif request.status and (final[0]["status"], final[0]["status_code"]) != (request.status, request.status_code):
            objections.append(f"{request.title}: its record says {final[0]['status']} {final[0]['status_code']}")
        elif final[0]["retry_count"] != request.retry_count:
            objections.append(f"{request.title}: its record says {final[0]['retry_count']} retries")
    return objections


def object_to_documents(evidence: Evidence) -> list[str]:
    """Look for one document with everything that is not about requests."""
    documents = evidence.stack.metric_server.documents
    objections = []
    if not any((document.get("health") or {}).get("healthy") for document in documents):
        objections.append("no document with a healthy model")
    if not any(document.get("queue") for document in documents):
        objections.append("no document with the queue's depth")
    if evidence.stack.model is not None and not any(document.get("model_metrics") for document in documents):
        objections.append("no document with the model's numbers")
    if evidence.stack.metric_server.refusals:
        objections.append(f"MetricServer refused posts with {evidence.stack.metric_server.refusals}")
    return objections


def object_to_bills(evidence: Evidence) -> list[str]:
    """Compare each event with the usage in the answer that was stored."""
    croesus = evidence.stack.croesus
    completed = [outcome for outcome in evidence.outcomes if outcome.request.status == "completed"]
    objections = [f"{croesus.duplicate_count} event(s) came twice"] if croesus.duplicate_count else []
    if len(croesus.events) != len(completed):
        objections.append(f"{len(croesus.events)} event(s) for {len(completed)} completed request(s)")
    if croesus.refusals:
        objections.append(f"Croesus refused posts with {croesus.refusals}")
    for outcome in completed:
        event = croesus.event_for(outcome.request.request_id)
        usage = ((outcome.result or {}).get("result") or {}).get("usage") or {}
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            billed = event["data"].get(name) if event else None
            if billed != usage.get(name):
                objections.append(f"{outcome.request.title}: {name} billed {billed}, answered {usage.get(name)}")
    return objections


def object_to_queue(evidence: Evidence) -> list[str]:
    """Count what is left; the worker is gone, so what it had not acked would be back."""
    depth = evidence.stack.queue_depth()
    return [f"{depth} message(s) left"] if depth else []


def object_to_exit(evidence: Evidence) -> list[str]:
    """Look at the exit code."""
    return [] if evidence.exit_code == 0 else [f"it was {evidence.exit_code}"]


def object_to_calls(evidence: Evidence) -> list[str]:
    """Compare the model's ledger with the calls that each request is worth."""
    assert evidence.stack.model is not None
    ledger = evidence.stack.model.ledger
    objections = []
    for outcome in evidence.outcomes:
        calls = len(ledger.calls_for(outcome.request.text)) if outcome.request.text else 0
        if calls != outcome.request.model_calls:
            objections.append(f"{outcome.request.title}: {calls} call(s) instead of {outcome.request.model_calls}")
    expected = sum(outcome.request.model_calls for outcome in evidence.outcomes)
    if len(ledger.calls) != expected:
        objections.append(f"{len(ledger.calls)} call(s) in all instead of {expected}")
    return objections


def object_to_token_sum(evidence: Evidence) -> list[str]:
    """Compare the sum that Croesus bills with the model's."""
    assert evidence.stack.model is not None
    generated = sum(
        call.prompt_tokens + call.completion_tokens for call in evidence.stack.model.ledger.calls if call.completed
    )
    billed = evidence.stack.croesus.tokens_billed
    return [] if billed == generated else [f"billed {billed}, the ledger says {generated}"]


def answer_text(result: dict[str, Any]) -> str:
    """Return the text of a completed result; empty when it has none."""
    try:
        return str(result["result"]["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError):
        return ""
