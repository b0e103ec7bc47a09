"""Each check of the demo objects when what it is about is not as it must be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pika
import pytest

from devstack.demo_checks import Evidence, Outcome, run_checks
from devstack.demo_requests import DemoRequest
from devstack.ledger import Ledger
from devstack.stack import DeadLetter

GOOD = DemoRequest("good", b"{}", "id-1", "Explain tides.")
BAD = DemoRequest("bad", b"!", "", "", "", None, model_calls=0, dead_letter=True)
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def record(request_id: str | None, status: str | None, code: int | None, **fields: Any) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "status": status,
        "status_code": code,
        "disposition": "ack" if request_id else "reject",
        "retry_count": 0,
        **fields,
    }


class Scene:
    """The evidence of a run in which all went well; a test spoils one thing in it."""

    def __init__(self) -> None:
        answer = {"choices": [{"message": {"content": "You said: Explain tides."}}], "usage": USAGE}
        self.result: dict[str, Any] | None = {"status": "completed", "status_code": 200, "result": answer}
        self.ledger = Ledger()
        self.call_model()
        self.metric_server = SimpleNamespace(
            records=[record("id-1", "completed", 200), record(None, None, None)],
            documents=[{"health": {"healthy": True}, "queue": {"depth": 0}, "model_metrics": {"requests_running": 0}}],
            refusals=[],
        )
        event = {"id": "id-1", "data": dict(USAGE)}
        self.croesus = SimpleNamespace(events=[event], duplicate_count=0, refusals=[], tokens_billed=7)
        self.croesus.event_for = lambda request_id: next(
            (e for e in self.croesus.events if e["id"] == request_id), None
        )
        self.dead_letters = [DeadLetter(b"!", {}, pika.BasicProperties())]
        self.depth = 0
        self.exit_code = 0

    def call_model(self) -> None:
        call = self.ledger.begin(GOOD.text, request_id=None, streamed=False)
        call.prompt_tokens, call.completion_tokens = 3, 4
        self.ledger.mark_answered(call)

    def objections(self) -> list[str]:
        stack: Any = SimpleNamespace(
            model=SimpleNamespace(ledger=self.ledger),
            metric_server=self.metric_server,
            croesus=self.croesus,
            queue_depth=lambda: self.depth,
        )
        outcomes = [Outcome(GOOD, self.result, 0.1), Outcome(BAD, None, None)]
        checks = run_checks(Evidence(stack, outcomes, self.dead_letters, self.exit_code))
        return [objection for check in checks for objection in check.objections]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_nobody_objects_when_all_went_well(scene: Scene) -> None:
    assert scene.objections() == []


def test_a_missing_result_is_noticed(scene: Scene) -> None:
    scene.result = None
    assert "good: no result" in scene.objections()


def test_another_requests_answer_is_noticed(scene: Scene) -> None:
    assert scene.result is not None
    scene.result["result"]["choices"][0]["message"]["content"] = "You said: Explain bees."
    assert any("another request's" in objection for objection in scene.objections())


def test_a_wrong_status_code_is_noticed(scene: Scene) -> None:
    assert scene.result is not None
    scene.result["status_code"] = 201
    assert len(scene.objections()) == 1


@pytest.mark.parametrize("bodies", [[], [b"?"], [b"!", b"!"]])
def test_other_dead_letters_are_noticed(scene: Scene, bodies: list[bytes]) -> None:
    scene.dead_letters = [DeadLetter(body, {}, pika.BasicProperties()) for body in bodies]
    assert len(scene.objections()) == 1


def test_a_missing_and_a_second_record_are_noticed(scene: Scene) -> None:
    del scene.metric_server.records[1]
    scene.metric_server.records.append(record("id-1", "completed", 200))
    assert len(scene.objections()) == 2


def test_a_requeue_is_no_second_end(scene: Scene) -> None:
    scene.metric_server.records.append(record("id-1", None, None, disposition="requeue"))
    assert scene.objections() == []


def test_a_double_bill_is_noticed(scene: Scene) -> None:
    scene.croesus.duplicate_count = 1
    assert scene.objections() == ["1 event(s) came twice"]


def test_a_wrong_bill_is_noticed_in_the_event_and_in_the_sum(scene: Scene) -> None:
    scene.croesus.events[0]["data"]["total_tokens"] = 8
    scene.croesus.tokens_billed = 8
    assert len(scene.objections()) == 2


def test_a_second_model_call_is_noticed(scene: Scene) -> None:
    scene.call_model()
    assert any("2 call(s) instead of 1" in objection for objection in scene.objections())


def test_what_is_left_in_the_queue_and_a_bad_exit_are_noticed(scene: Scene) -> None:
    scene.depth, scene.exit_code = 1, 70
    assert scene.objections() == ["1 message(s) left", "it was 70"]


@pytest.mark.parametrize("name", ["health", "queue", "model_metrics"])
def test_a_document_without_one_of_its_parts_is_noticed(scene: Scene, name: str) -> None:
    scene.metric_server.documents[0][name] = None
    assert len(scene.objections()) == 1
