"""A broker that is short of memory takes no copy (R20): that is given up in time, and costs no message."""

from __future__ import annotations

import time

import pytest

from devstack.rabbitmq import RabbitMq

from .support import (
    LONG_TIMEOUT_S,
    Deployment,
    broker_setting,
    completed_text,
    records,
    said,
    settlements,
    until,
    wait_hold,
)

# the publish alone is waited for half a minute
pytestmark = [pytest.mark.integration, pytest.mark.slow]

#: what a copy waits for the end of an alarm (design section 6), and a little more
BLOCKED_TIMEOUT_S = 30.0
SHUTDOWN_GRACE_S = 3
PROMPT = "Do you remember?"


def test_r20_a_copy_that_an_alarm_blocks_is_given_up_after_30_s_and_its_original_stays(
    deployment: Deployment, rabbitmq: RabbitMq
) -> None:
    worker = deployment.start_worker(SHUTDOWN_GRACE_S=SHUTDOWN_GRACE_S)
    deployment.model.behave(match=PROMPT, times=1, delay_s=2.0, fault="reset_body")
    request_id = deployment.publish(deployment.request(PROMPT, timeout_s=600.0))
    deployment.model.ledger.wait_for_calls(PROMPT)
    on, off = ["set_vm_memory_high_watermark", "0"], ["set_vm_memory_high_watermark", "0.4"]
    with broker_setting(rabbitmq, on=on, off=off):
        until(lambda: "copies" in rabbitmq.ctl("list_connections", "client_properties"), "the copy is on its way")
        begun_at = time.monotonic()
        wait_hold(worker, "publish_refused", timeout_s=BLOCKED_TIMEOUT_S + LONG_TIMEOUT_S)
        took_s = time.monotonic() - begun_at
        print(f"the copy was given up after {took_s:.1f} s")
        assert took_s < BLOCKED_TIMEOUT_S + 5.0
        assert rabbitmq.queue_info(deployment.queue) == {"ready": 0, "unacked": 1, "consumers": 0}
        assert settlements(worker, request_id) == []
        assert deployment.result_bytes(request_id) is None
        begun_at = time.monotonic()
        assert worker.stop() == 0
        took_s = time.monotonic() - begun_at
        print(f"stopped in {took_s:.1f} s while the alarm lasted")
        assert took_s < SHUTDOWN_GRACE_S + 5.0 + 3.0
        assert [what for what, _ in settlements(worker, request_id)] in ([], ["requeue"], ["stale"])
        assert records(worker, "session_ended") == []
    deployment.start_worker()
    assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)
    assert deployment.calls(PROMPT) == 2
    deployment.serve_next()
    assert deployment.dead_letters() == []
