"""SIGTERM: what is in work ends and is settled, what takes too long goes back unchanged, who is idle is gone at once.

And SIGKILL, which asks nobody: at worst one more call, and never one result more or less.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pika
import pytest

from devstack.proxy import Direction, TcpProxy
from devstack.worker_process import PROJECT_FOLDER, WorkerProcess

from .support import (
    GONE_TIMEOUT_S,
    LONG_TIMEOUT_S,
    Deployment,
    completed_text,
    hold_names,
    readyz,
    records,
    said,
    until,
    wait_handler,
    wait_hold,
    wait_record,
    write_launcher,
)

pytestmark = pytest.mark.integration

PROMPT = "Will you let me finish?"
linux_only = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads signal masks in /proc: Linux")


def stop_timed(worker: WorkerProcess, *, within_s: float, number: int = signal.SIGTERM) -> None:
    """Send a signal; the worker must be gone with code 0 in time, with no traceback."""
    begun_at = time.monotonic()
    worker.signal(number)
    assert worker.wait(timeout_s=within_s + LONG_TIMEOUT_S) == 0
    assert time.monotonic() - begun_at <= within_s
    assert "Traceback" not in worker.log()


# -- under load -------------------------------------------------------------------------------------------------------


def test_calls_shorter_than_the_grace_end_and_are_stored_acked_and_reported(deployment: Deployment) -> None:
    worker = deployment.start_worker(RABBITMQ_PREFETCH=8, SHUTDOWN_GRACE_S=10, METRICS_FLUSH_INTERVAL_S=3600)
    deployment.model.behave(delay_s=2.0)
    prompts = [f"{PROMPT} {number}" for number in range(40)]
    request_ids = {deployment.publish(deployment.request(prompt)): prompt for prompt in prompts}
    until(lambda: len(deployment.model.ledger.calls) == 8, "all slots are at work")
    stop_timed(worker, within_s=10.0)

    answered = {request_id: deployment.result(request_id) for request_id in request_ids}
    stored = {request_id: result for request_id, result in answered.items() if result is not None}
    assert len(stored) == 8
    assert all(completed_text(result) == said(request_ids[request_id]) for request_id, result in stored.items())
    assert deployment.queue_depth() == 40 - 8
    assert len(deployment.model.ledger.calls) == 8
    final = [record for record in deployment.metric_server.records if record["disposition"] == "ack"]
    assert {record["request_id"] for record in final} == set(stored)
    assert {event["id"] for event in deployment.croesus.events} == set(stored)

    deployment.model.forget_behaviours()
    worker = deployment.start_worker(RABBITMQ_PREFETCH=8)
    for request_id, prompt in request_ids.items():
        assert completed_text(deployment.wait_result(request_id)) == said(prompt)
    deployment.stop_empty(worker)
    assert all(deployment.calls(prompt) == 1 for prompt in prompts)
    assert deployment.dead_letters() == []


def test_usage_is_sent_while_a_long_call_drains(deployment: Deployment) -> None:
    worker = deployment.start_worker(RABBITMQ_PREFETCH=2, METRICS_FLUSH_INTERVAL_S=3600)
    deployment.model.behave(match="Take your time.", delay_s=60.0)
    deployment.publish(deployment.request("Take your time."))
    deployment.model.ledger.wait_for_calls("Take your time.")
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.wait_result(request_id)
    assert deployment.croesus.events == []
    worker.signal(signal.SIGTERM)
    deployment.croesus.wait_until(
        lambda: deployment.croesus.event_for(request_id) is not None, what="the event", timeout_s=5.0
    )
    assert worker.running
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_a_call_longer_than_the_grace_is_cut_off_and_its_message_goes_back_unchanged(
    deployment: Deployment, queue_type: str
) -> None:
    worker = deployment.start_worker(SHUTDOWN_GRACE_S=1, RABBITMQ_QUEUE_TYPE=queue_type)
    deployment.model.behave(match=PROMPT, delay_s=60.0)
    properties = pika.BasicProperties(
        content_type="application/json",
        delivery_mode=2,
        correlation_id="c-1",
        message_id="m-1",
        reply_to="answers",
        priority=4,
        expiration="3600000",
        timestamp=1_772_000_000,
        type="t",
        app_id="a",
        headers={"x-retry-count": 0, "tenant": "acme"},
    )
    body = json.dumps(deployment.request(PROMPT)).encode()
    deployment.publish(body, properties=properties)
    deployment.model.ledger.wait_for_calls(PROMPT)
    stop_timed(worker, within_s=1.0 + 5.0 + 3.0)

    call = deployment.model.ledger.wait_for_hang_up(PROMPT)
    assert not call.completed
    assert deployment.result_bytes(json.loads(body)["request_id"]) is None
    assert deployment.dead_letters() == []
    method, back, back_body = deployment.channel().basic_get(deployment.queue)
    assert method is not None
    assert back is not None
    assert method.redelivered
    assert back_body == body
    for name in ("content_type", "delivery_mode", "correlation_id", "message_id", "reply_to", "priority", "expiration"):
        assert getattr(back, name) == getattr(properties, name), name
    assert (back.timestamp, back.type, back.app_id) == (1_772_000_000, "t", "a")
    headers = {
        name: value for name, value in back.headers.items() if name not in ("x-delivery-count", "x-acquired-count")
    }
    assert headers == {"x-retry-count": 0, "tenant": "acme"}
    deployment.channel().basic_ack(method.delivery_tag)


def test_a_model_that_dies_while_we_drain_costs_no_retry(deployment: Deployment) -> None:
    worker = deployment.start_worker(SHUTDOWN_GRACE_S=20)
    deployment.model.behave(match=PROMPT, delay_s=60.0)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    worker.signal(signal.SIGTERM)
    until(lambda: readyz(worker)["state"] == "draining", "the worker drains")
    deployment.model.refuse()
    assert worker.wait() == 0
    method, back, _ = deployment.channel().basic_get(deployment.queue)
    assert method is not None
    assert back is not None
    assert "x-retry-count" not in (back.headers or {})
    assert deployment.result_bytes(request_id) is None
    deployment.channel().basic_ack(method.delivery_tag)


# -- the second signal (R60), the long wait (R62) ---------------------------------------------------------------------


def test_r62_a_call_within_the_grace_is_waited_for(deployment: Deployment) -> None:
    worker = deployment.start_worker(SHUTDOWN_GRACE_S=20)
    deployment.model.behave(match=PROMPT, delay_s=5.0)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    stop_timed(worker, within_s=5.0 + GONE_TIMEOUT_S)
    assert completed_text(deployment.result(request_id) or {}) == said(PROMPT)
    assert deployment.queue_depth() == 0
    assert deployment.calls(PROMPT) == 1


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_r60_a_second_signal_cuts_the_calls_off_at_once(deployment: Deployment, second: signal.Signals) -> None:
    worker = deployment.start_worker(SHUTDOWN_GRACE_S=60)
    deployment.model.behave(match=PROMPT, delay_s=60.0)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    worker.signal(signal.SIGTERM)
    wait_record(worker, "draining")
    cut_at = time.time()
    worker.signal(second)
    call = deployment.model.ledger.wait_for_hang_up(PROMPT)
    assert call.hung_up_at is not None
    assert call.hung_up_at - cut_at < 1.0
    if worker.running:
        worker.signal(second)  # a third one changes nothing
    assert worker.wait() == 0
    assert "Traceback" not in worker.log()
    assert deployment.queue_depth() == 1
    assert deployment.result_bytes(request_id) is None


# -- without work -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_r65_an_idle_worker_is_gone_at_once(deployment: Deployment, number: signal.Signals) -> None:
    worker = deployment.start_worker()
    stop_timed(worker, within_s=GONE_TIMEOUT_S, number=number)
    assert deployment.consumer_count() == 0


def test_a_suspended_worker_is_gone_at_once(deployment: Deployment) -> None:
    deployment.model.behave_health(status=503)
    worker = deployment.start_worker(ready=False)
    wait_record(worker, "connected")
    wait_hold(worker, "model_unhealthy")
    stop_timed(worker, within_s=GONE_TIMEOUT_S)


def test_a_worker_that_waits_for_redis_is_gone_at_once(deployment: Deployment, redis_proxy: TcpProxy) -> None:
    redis_proxy.stall()
    worker = deployment.start_worker(ready=False, REDIS_URL=f"redis://127.0.0.1:{redis_proxy.port}")
    wait_record(worker, "connected")
    wait_hold(worker, "result_store_down")
    stop_timed(worker, within_s=GONE_TIMEOUT_S)


def test_r65_a_worker_in_backoff_is_gone_at_once(deployment: Deployment, broker_proxy: TcpProxy) -> None:
    broker_proxy.refuse()
    worker = deployment.start_worker(ready=False, RABBITMQ_PORT=broker_proxy.port)
    wait_record(worker, "connect_failed")
    until(lambda: readyz(worker)["state"] == "connecting", "no connection")
    stop_timed(worker, within_s=GONE_TIMEOUT_S)


def test_r65_a_worker_whose_broker_accepts_and_says_nothing_is_gone_at_once(
    deployment: Deployment, broker_proxy: TcpProxy
) -> None:
    broker_proxy.stall()
    worker = deployment.start_worker(ready=False, RABBITMQ_PORT=broker_proxy.port)
    until(lambda: broker_proxy.link_count == 1, "the worker tries to connect")
    until(lambda: "model_unhealthy" not in hold_names(worker), "the worker has begun")
    stop_timed(worker, within_s=GONE_TIMEOUT_S)


def test_r65_a_consuming_worker_whose_broker_stalls_is_gone_at_once(
    deployment: Deployment, broker_proxy: TcpProxy
) -> None:
    worker = deployment.start_worker(RABBITMQ_PORT=broker_proxy.port)
    broker_proxy.stall()
    stop_timed(worker, within_s=GONE_TIMEOUT_S)


@linux_only
def test_r59_a_signal_right_after_the_start_is_heard(deployment: Deployment) -> None:
    worker = deployment.start_worker(ready=False)
    wait_handler(worker.pid)
    assert worker.log() == ""  # nothing slow was done before
    stop_timed(worker, within_s=GONE_TIMEOUT_S)


# -- as PID 1 ---------------------------------------------------------------------------------------------------------


def entry_point() -> list[str]:
    """Return the ENTRYPOINT of the image."""
    (line,) = [
        line for line in (PROJECT_FOLDER / "Dockerfile").read_text().splitlines() if line.startswith("ENTRYPOINT")
    ]
    return list(json.loads(line.removeprefix("ENTRYPOINT")))


@pytest.fixture
def unshare(tmp_path: Path) -> str:
    """Return what stands in for the interpreter: the image's entry point as the first process of a namespace."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a process with the number 1 needs Linux and root")
    path = shlex.quote(f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}")
    command = shlex.join(entry_point())
    return write_launcher(tmp_path, f"#!/bin/sh\nPATH={path}\nexec unshare -pf --kill-child --mount-proc {command}\n")


def inner_pid(worker: WorkerProcess) -> int:
    """Wait for the process that is number 1 inside and return its number outside."""
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")

    def child() -> int:
        pids = children.read_text().split() if children.exists() else []
        return int(pids[0]) if pids else 0

    until(child, "the first process of the namespace")
    return child()


@pytest.fixture
def first_process(deployment: Deployment, unshare: str) -> WorkerProcess:
    """A worker that is process number 1, for all that it knows."""
    env = deployment.worker_env(SHUTDOWN_GRACE_S=10, LOG_FORMAT="json")
    return deployment.adopt(WorkerProcess(env, python=unshare))


def test_r59_as_pid_1_a_signal_right_after_the_start_is_heard(first_process: WorkerProcess) -> None:
    pid = inner_pid(first_process)
    wait_handler(pid)
    os.kill(pid, signal.SIGTERM)
    begun_at = time.monotonic()
    assert first_process.wait() == 0
    assert time.monotonic() - begun_at < GONE_TIMEOUT_S


def test_r59_as_pid_1_an_idle_worker_is_gone_at_once(first_process: WorkerProcess) -> None:
    first_process.wait_ready()
    pid = inner_pid(first_process)
    assert f"\t{1}\n" in Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].partition("\n")[0] + "\n"
    begun_at = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    assert first_process.wait() == 0
    assert time.monotonic() - begun_at < GONE_TIMEOUT_S


def test_r59_as_pid_1_a_busy_worker_ends_its_call(deployment: Deployment, first_process: WorkerProcess) -> None:
    first_process.wait_ready()
    deployment.model.behave(match=PROMPT, delay_s=2.0)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    os.kill(inner_pid(first_process), signal.SIGTERM)
    assert first_process.wait() == 0
    assert completed_text(deployment.result(request_id) or {}) == said(PROMPT)
    assert deployment.queue_depth() == 0


# -- SIGKILL ----------------------------------------------------------------------------------------------------------


def check_served_after_a_kill(deployment: Deployment, request_id: str, *, calls: int) -> None:
    """The next worker gives the request its one result, with so many calls in all, and one bill."""
    deployment.model.forget_behaviours()
    worker = deployment.start_worker()
    wait_record(worker, "request_settled", request_id=request_id, disposition="ack")
    assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)
    assert deployment.calls(PROMPT) == calls
    deployment.serve_next()
    deployment.stop_empty(worker)
    assert deployment.dead_letters() == []
    assert [event["id"] for event in deployment.croesus.events].count(request_id) == 1
    assert len({(event["source"], event["id"]) for event in deployment.croesus.events}) == 2


def test_r66_a_kill_in_the_middle_of_the_call_costs_one_more_call(deployment: Deployment) -> None:
    worker = deployment.start_worker()
    deployment.model.behave(match=PROMPT, delay_s=60.0)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    worker.kill()
    check_served_after_a_kill(deployment, request_id, calls=2)


def test_r66_a_kill_between_the_answer_and_the_write_costs_one_more_call(
    deployment: Deployment, redis_proxy: TcpProxy
) -> None:
    worker = deployment.start_worker(REDIS_URL=f"redis://127.0.0.1:{redis_proxy.port}", REDIS_TIMEOUT_S=60)
    deployment.model.behave(match=PROMPT, delay_s=0.5)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    redis_proxy.stall(frozenset({Direction.TO_SERVER}))
    until(lambda: deployment.model.ledger.calls_for(PROMPT)[0].answered_at, "the answer")
    worker.kill()
    redis_proxy.cut()
    redis_proxy.resume()
    assert deployment.result_bytes(request_id) is None
    check_served_after_a_kill(deployment, request_id, calls=2)


def test_r66_a_kill_between_the_write_and_the_ack_costs_no_call(deployment: Deployment, broker_proxy: TcpProxy) -> None:
    worker = deployment.start_worker(RABBITMQ_PORT=broker_proxy.port, METRICS_FLUSH_INTERVAL_S=3600)
    deployment.model.behave(match=PROMPT, delay_s=0.5)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    broker_proxy.stall(frozenset({Direction.TO_SERVER}))  # the ack will not get through
    stored = deployment.wait_result(request_id)
    assert deployment.croesus.events == []
    worker.kill()
    broker_proxy.cut()
    check_served_after_a_kill(deployment, request_id, calls=1)
    assert deployment.result(request_id) == stored


def test_r74_a_kill_after_the_bill_and_before_the_ack_bills_once(
    deployment: Deployment, broker_proxy: TcpProxy
) -> None:
    worker = deployment.start_worker(RABBITMQ_PORT=broker_proxy.port)
    deployment.model.behave(match=PROMPT, delay_s=0.5)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    broker_proxy.stall(frozenset({Direction.TO_SERVER}))
    until(lambda: deployment.croesus.event_for(request_id), "the bill")
    worker.kill()
    broker_proxy.cut()
    check_served_after_a_kill(deployment, request_id, calls=1)
    assert deployment.croesus.duplicate_count == 1


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_r22_a_message_that_kills_its_worker_again_and_again_is_given_up(
    deployment: Deployment, queue_type: str
) -> None:
    deployment.model.behave(match=PROMPT, delay_s=60.0)
    body = deployment.request(PROMPT)
    settings = {"RABBITMQ_QUEUE_TYPE": queue_type, "RABBITMQ_MAX_REDELIVERIES": 1}
    deployment.start_worker(**settings)
    request_id = deployment.publish(body)
    for count in (1, 2):
        deployment.model.ledger.wait_for_calls(PROMPT, count=count)
        deployment.workers[-1].kill()
        deployment.start_worker(**settings)
    result = deployment.wait_result(request_id)
    assert (result["status_code"], result["error_type"]) == (500, "too_many_redeliveries")
    (letter,) = deployment.wait_dead_letters(1)
    assert json.loads(letter.body) == body
    deployment.serve_next()
    assert deployment.calls(PROMPT) == 2
    deployment.stop_empty(deployment.workers[-1])


# -- orders that could go wrong ---------------------------------------------------------------------------------------


def test_a_worker_that_drains_leaves_the_queue_to_others_at_once(deployment: Deployment) -> None:
    worker = deployment.start_worker(SHUTDOWN_GRACE_S=20)
    deployment.model.behave(match=PROMPT, delay_s=3.0)
    deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    for number in range(5):
        deployment.publish(deployment.request(f"I wait {number}"))
    worker.signal(signal.SIGTERM)
    until(lambda: deployment.queue_depth() == 5 and deployment.consumer_count() == 0, "five messages for others")
    assert worker.wait() == 0
    assert deployment.queue_depth() == 5
    assert records(worker, "request_settled", disposition="reject") == []
