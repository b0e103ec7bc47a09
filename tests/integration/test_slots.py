"""`RABBITMQ_PREFETCH` is how many requests are in work at once: never more, and not fewer while there are enough."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest

from devstack.ledger import Call

from .support import Deployment, completed_text, said, wait_hold

pytestmark = pytest.mark.integration


def most_at_once(calls: Sequence[Call]) -> int:
    """Return how many calls overlapped at the most, by the ledger's clock."""
    changes = [(call.begun_at, 1) for call in calls] + [(call.answered_at or call.begun_at, -1) for call in calls]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def run_requests(deployment: Deployment, count: int) -> float:
    """Publish requests and wait for every answer; return the seconds from the first publish to the last result."""
    prompts = [f"Request {number}" for number in range(count)]
    begun_at = time.monotonic()
    request_ids = [deployment.publish(deployment.request(prompt)) for prompt in prompts]
    results = [deployment.wait_result(request_id, timeout_s=60.0) for request_id in request_ids]
    taken_s = time.monotonic() - begun_at
    assert [completed_text(result) for result in results] == [said(prompt) for prompt in prompts]
    assert all(deployment.calls(prompt) == 1 for prompt in prompts)
    return taken_s


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_eight_slots_serve_80_requests_of_a_second_in_under_12_s(deployment: Deployment, queue_type: str) -> None:
    worker = deployment.start_worker(RABBITMQ_PREFETCH=8, RABBITMQ_QUEUE_TYPE=queue_type)
    deployment.model.behave(delay_s=1.0)
    assert run_requests(deployment, 80) < 12.0
    assert most_at_once(deployment.model.ledger.calls) == 8
    deployment.stop_empty(worker)


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_one_slot_works_strictly_one_at_a_time(deployment: Deployment, queue_type: str) -> None:
    worker = deployment.start_worker(RABBITMQ_PREFETCH=1, RABBITMQ_QUEUE_TYPE=queue_type)
    deployment.model.behave(delay_s=0.1)
    run_requests(deployment, 20)
    calls = deployment.model.ledger.calls
    assert len(calls) == 20
    for before, after in itertools.pairwise(calls):
        assert before.answered_at is not None
        assert after.begun_at >= before.answered_at
    deployment.stop_empty(worker)


def test_one_slot_stays_one_over_a_suspension(deployment: Deployment) -> None:
    worker = deployment.start_worker(RABBITMQ_PREFETCH=1)
    deployment.model.behave(match="Request 0", delay_s=4.0)
    first = deployment.publish(deployment.request("Request 0"))
    deployment.model.ledger.wait_for_calls("Request 0")
    deployment.model.behave_health(status=503)
    wait_hold(worker, "model_unhealthy")
    deployment.model.behave_health()
    worker.wait_ready()
    others = [deployment.publish(deployment.request(f"Later {number}")) for number in range(3)]
    for request_id in (first, *others):
        assert deployment.wait_result(request_id)["status"] == "completed"
    assert most_at_once(deployment.model.ledger.calls) == 1
    deployment.stop_empty(worker)


def test_the_slots_of_two_workers_add_up(deployment: Deployment) -> None:
    workers = [deployment.start_worker(RABBITMQ_PREFETCH=4) for _ in range(2)]
    deployment.model.behave(delay_s=0.5)
    run_requests(deployment, 40)
    assert most_at_once(deployment.model.ledger.calls) == 8
    for worker in workers:
        deployment.stop_empty(worker)
