"""Bills that survive a kill: USAGE_OUTBOX_PATH, with the worker as a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from devstack.processes import wait_until

from .support import LONG_TIMEOUT_S, Deployment

pytestmark = pytest.mark.integration


def test_r66_a_bill_that_croesus_had_not_taken_when_the_worker_was_killed_is_sent_by_the_next_one(
    deployment: Deployment, tmp_path: Path
) -> None:
    path = tmp_path / "usage.db"
    deployment.croesus.behave(status=503)
    worker = deployment.start_worker(USAGE_OUTBOX_PATH=path)
    request_id = deployment.publish(deployment.request("bill me once"))
    deployment.wait_result(request_id)
    # acked, so nothing but the file knows of the bill
    deployment.serve_next()
    worker.kill()
    assert deployment.croesus.event_for(request_id) is None
    deployment.croesus.behave(status=202)
    deployment.start_worker(USAGE_OUTBOX_PATH=path)
    wait_until(
        lambda: deployment.croesus.event_for(request_id), timeout_s=LONG_TIMEOUT_S, what="the bill reaches Croesus"
    )
    assert deployment.calls("bill me once") == 1


def test_a_second_worker_with_the_same_file_ends_with_78_and_says_so(deployment: Deployment, tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    deployment.start_worker(USAGE_OUTBOX_PATH=path)
    deployment.serve_next()
    second = deployment.start_worker(ready=False, USAGE_OUTBOX_PATH=path)
    assert second.wait(timeout_s=LONG_TIMEOUT_S) == 78
    assert "USAGE_OUTBOX_PATH" in second.log()
