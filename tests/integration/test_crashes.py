"""A bug in a slot costs one request; a bug in a service thread costs the process, which says so and ends with 70.

The bugs are put in from outside: a script stands in for `python -m inference_worker`, replaces one method and then
runs the same `main`. The package has no switch for that.
"""

from __future__ import annotations

import json
import shlex
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from devstack.proxy import TcpProxy
from devstack.worker_process import WorkerProcess

from .support import (
    FAILED_KEYS,
    LONG_TIMEOUT_S,
    TTL_S,
    Deployment,
    completed_text,
    readyz,
    records,
    said,
    until,
    wait_hold,
    wait_record,
    write_launcher,
)

pytestmark = pytest.mark.integration

PROMPT = "Does this crash you?"
ERRORS = ["RuntimeError", "MemoryError", "RecursionError"]
SERVICES = {
    "rmq-listener": ("rmq_listener", "RmqListener"),
    "health-checker": ("health_checker", "HealthChecker"),
    "metrics-reporter": ("metrics_reporter", "MetricsReporter"),
}

BROKEN_TURN = """
import sys
from pathlib import Path
from inference_worker import __main__
from inference_worker.{module} import {cls}

whole = {cls}.tick

def tick(self, now):
    if Path({trigger!r}).exists():
        raise {error}("put in by a test")
    return whole(self, now)

{cls}.tick = tick
sys.exit(__main__.main([]))
"""

BROKEN_CALL = """
import sys
from inference_worker import __main__
from inference_worker.model_client import ModelClient

whole = ModelClient.infer

def infer(self, request, **more):
    for error in (RuntimeError, MemoryError, RecursionError):
        if error.__name__.encode() in request.payload:
            raise error("put in by a test")
    return whole(self, request, **more)

ModelClient.infer = infer
sys.exit(__main__.main([]))
"""

STUCK_TURN = """
import sys
import threading
from pathlib import Path
from inference_worker import __main__, supervisor
from inference_worker.{module} import {cls}

whole = {cls}.tick

def tick(self, now):
    if Path({trigger!r}).exists():
        threading.Event().wait(600)
    return whole(self, now)

{cls}.tick = tick
supervisor._STUCK_AFTER_S = 2.0
sys.exit(__main__.main([]))
"""


def start_script(deployment: Deployment, folder: Path, script: str, **overrides: object) -> WorkerProcess:
    """Run a script in place of the package's own entry, as a worker of this deployment that is consuming."""
    (folder / "script.py").write_text(script)
    launcher = write_launcher(
        folder, f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(folder / 'script.py'))}\n"
    )
    worker = WorkerProcess(deployment.worker_env(**overrides), python=launcher)
    return deployment.adopt(worker).wait_ready()


# -- service threads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("service", SERVICES)
def test_law_6_r63_a_service_thread_that_dies_takes_the_process_down_with_70(
    deployment: Deployment, tmp_path: Path, service: str, error: str
) -> None:
    trigger = tmp_path / "trigger"
    module, cls = SERVICES[service]
    script = BROKEN_TURN.format(module=module, cls=cls, trigger=str(trigger), error=error)
    worker = start_script(deployment, tmp_path, script)
    trigger.touch()
    assert worker.wait(timeout_s=LONG_TIMEOUT_S) == 70
    (record,) = records(worker, "service_died")
    assert record["service"] == service
    assert "Traceback" in record["exc_info"]
    assert f"{error}: put in by a test" in record["exc_info"]


@pytest.mark.parametrize("service", SERVICES)
def test_what_a_dying_process_had_in_work_is_served_by_the_next(
    deployment: Deployment, tmp_path: Path, service: str
) -> None:
    trigger = tmp_path / "trigger"
    module, cls = SERVICES[service]
    script = BROKEN_TURN.format(module=module, cls=cls, trigger=str(trigger), error="RuntimeError")
    worker = start_script(deployment, tmp_path, script)
    deployment.model.behave(match=PROMPT, times=1, delay_s=60.0)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    trigger.touch()
    assert worker.wait(timeout_s=LONG_TIMEOUT_S) == 70
    deployment.start_worker()
    assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)
    assert deployment.calls(PROMPT) == 2
    assert deployment.dead_letters() == []


@pytest.mark.parametrize("service", SERVICES)
def test_r63_a_stuck_service_thread_is_not_called_alive(deployment: Deployment, tmp_path: Path, service: str) -> None:
    trigger = tmp_path / "trigger"
    module, cls = SERVICES[service]
    worker = start_script(deployment, tmp_path, STUCK_TURN.format(module=module, cls=cls, trigger=str(trigger)))
    assert healthz(worker) == 200
    trigger.touch()
    until(lambda: healthz(worker) == 503, "/healthz says 503")


def healthz(worker: WorkerProcess) -> int:
    """Return the status of /healthz."""
    try:
        with urllib.request.urlopen(f"{worker.http_url}/healthz", timeout=LONG_TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as answer:
        answer.close()
        return answer.code


# -- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_r63_a_bug_in_a_slot_is_a_500_and_a_dead_letter_and_the_slot_takes_the_next(
    deployment: Deployment, tmp_path: Path, queue_type: str
) -> None:
    worker = start_script(deployment, tmp_path, BROKEN_CALL, RABBITMQ_QUEUE_TYPE=queue_type)
    for number, error in enumerate(ERRORS, start=1):
        request = deployment.request(f"{PROMPT} {error}")
        request_id = deployment.publish(request)
        result = deployment.wait_result(request_id)
        assert set(result) == FAILED_KEYS
        assert (result["status"], result["status_code"], result["error_type"]) == ("failed", 500, "internal_error")
        assert "put in by a test" not in result["error"]  # ours to know, not the producer's
        assert TTL_S - 100 < deployment.result_ttl_s(request_id) <= TTL_S
        letters = deployment.wait_dead_letters(number)
        assert json.loads(letters[-1].body) == request
        assert letters[-1].headers["x-death"][0]["reason"] == "rejected"
        (record,) = records(worker, "internal_error", request_id=request_id)
        assert record["level"] == "ERROR"
        assert f"{error}: put in by a test" in record["exc_info"]
        deployment.serve_next()
    assert len(deployment.model.ledger.calls) == len(ERRORS)  # those of `serve_next`
    deployment.stop_empty(worker)


# -- exit codes -------------------------------------------------------------------------------------------------------


def test_r64_a_bad_configuration_ends_with_78_and_names_every_fault(deployment: Deployment) -> None:
    worker = deployment.start_worker(ready=False, RABBITMQ_PORT="amqp", DEPLOYMENT_ID=None, REDIS_RESPONSE_TTL_S=0)
    assert worker.wait(timeout_s=LONG_TIMEOUT_S) == 78
    assert all(name in worker.log() for name in ("RABBITMQ_PORT", "DEPLOYMENT_ID", "REDIS_RESPONSE_TTL_S"))
    assert "Traceback" not in worker.log()


def test_r64_a_refused_login_is_no_end(deployment: Deployment) -> None:
    worker = deployment.start_worker(ready=False, RABBITMQ_PASSWORD="S3cretA")
    (record, *_) = wait_record(worker, "connect_failed")
    assert record["level"] == "ERROR"
    wait_record(worker, "hold_lifted", hold="model_unhealthy")
    document = readyz(worker)
    assert (document["ready"], document["state"]) == (False, "connecting")
    assert worker.running
    assert "S3cretA" not in worker.log()
    assert worker.stop() == 0


def test_r64_what_was_cut_off_and_could_not_be_given_back_ends_with_75(
    deployment: Deployment, redis_proxy: TcpProxy
) -> None:
    url = f"redis://127.0.0.1:{redis_proxy.port}"
    worker = deployment.start_worker(REDIS_URL=url, REDIS_TIMEOUT_S=600, SHUTDOWN_GRACE_S=1)
    deployment.model.behave(match=PROMPT, delay_s=0.5)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    redis_proxy.stall()  # the slot writes, and nothing can end that
    until(lambda: deployment.model.ledger.calls_for(PROMPT)[0].answered_at, "the answer")
    assert worker.stop() == 75
    until(lambda: deployment.queue_depth() == 1, "the broker has given the message back")
    assert deployment.result_bytes(request_id) is None


def test_a_service_that_dies_while_it_drains_is_no_clean_end(deployment: Deployment, tmp_path: Path) -> None:
    trigger = tmp_path / "trigger"
    script = BROKEN_TURN.format(
        module="health_checker", cls="HealthChecker", trigger=str(trigger), error="RuntimeError"
    )
    worker = start_script(deployment, tmp_path, script)
    deployment.model.behave(match=PROMPT, delay_s=60.0)
    deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    worker.signal(15)
    wait_record(worker, "draining")
    trigger.touch()
    assert worker.wait(timeout_s=LONG_TIMEOUT_S) == 70
    until(lambda: deployment.queue_depth() == 1, "the message is back")


def test_r63_trouble_that_is_expected_ends_no_thread(deployment: Deployment, redis_proxy: TcpProxy) -> None:
    url = f"redis://127.0.0.1:{redis_proxy.port}"
    worker = deployment.start_worker(REDIS_URL=url)
    deployment.model.refuse()
    deployment.metric_server.refuse()
    deployment.croesus.refuse()
    redis_proxy.refuse()
    wait_hold(worker, "model_unhealthy")
    wait_record(worker, "metrics_flush_failed")
    redis_proxy.start()
    for server in (deployment.model, deployment.metric_server, deployment.croesus):
        server.start()
    worker.wait_ready()
    deployment.serve_next()
    assert worker.stop() == 0
