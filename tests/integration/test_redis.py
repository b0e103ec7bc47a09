"""A Redis that is there and cannot be written: held, not looped; and nothing is lost or dead-lettered meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from devstack.install import Servers
from devstack.proxy import TcpProxy
from devstack.redis_server import RedisServer
from devstack.worker_process import WorkerProcess

from .support import (
    GONE_TIMEOUT_S,
    Deployment,
    completed_text,
    records,
    said,
    settlements,
    until,
    wait_hold,
    wait_record,
)

pytestmark = pytest.mark.integration

PROMPT = "Will you remember this?"


@pytest.fixture
def redis_server(servers: Servers) -> Iterator[RedisServer]:
    """A Redis of its own, whose settings are changed."""
    with RedisServer(servers=servers) as server:
        yield server


def configure(server: RedisServer, *command: str) -> None:
    with server.client() as client:
        client.execute_command(*command)


def check_held(deployment: Deployment, requests: dict[str, str]) -> None:
    """The worker holds; each message went back once at the most, and no answer was computed twice."""
    (worker,) = deployment.workers
    wait_hold(worker, "result_store_down")
    until(lambda: deployment.queue_depth() == len(requests), "every message waits in the queue")
    assert deployment.consumer_count() == 0
    # three more probes: they fail, and bring no message out of the queue
    probes = len(deployment.metric_server.documents)
    deployment.metric_server.wait_until(
        lambda: len(deployment.metric_server.documents) >= probes + 3, what="three more flushes"
    )
    assert deployment.queue_depth() == len(requests)
    assert all(deployment.calls(prompt) <= 1 for prompt in requests.values())
    assert all(len(settlements(worker, request_id)) <= 1 for request_id in requests)


def check_refused(worker: WorkerProcess) -> None:
    """The log tells a refusal from a missing Redis, and says so once a cause."""
    lines = records(worker, "hold_raised", hold="result_store_down", level="WARNING")
    assert lines
    assert len(lines) == len({line["detail"] for line in lines})
    assert all(line["detail"].startswith("refused") for line in lines)


def check_recovered(deployment: Deployment, requests: dict[str, str]) -> None:
    (worker,) = deployment.workers
    for request_id, prompt in requests.items():
        assert completed_text(deployment.wait_result(request_id)) == said(prompt)
        assert deployment.calls(prompt) == 1
    deployment.serve_next()
    deployment.stop_empty(worker)
    assert deployment.dead_letters() == []


def publish_some(deployment: Deployment, count: int = 5) -> dict[str, str]:
    prompts = [f"{PROMPT} {number}" for number in range(count)]
    return {deployment.publish(deployment.request(prompt)): prompt for prompt in prompts}


def test_r31_a_redis_that_accepts_and_never_answers_is_given_up_in_time(
    deployment: Deployment, redis_proxy: TcpProxy
) -> None:
    worker = deployment.start_worker(
        REDIS_URL=f"redis://127.0.0.1:{redis_proxy.port}", REDIS_TIMEOUT_S=2, RABBITMQ_HEARTBEAT_S=1
    )
    deployment.model.behave(match=PROMPT, times=1, delay_s=0.5)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    redis_proxy.stall()
    begun_at = time.monotonic()
    wait_hold(worker, "result_store_down")
    assert time.monotonic() - begun_at < 0.5 + 2.0 + 1.0
    until(lambda: deployment.queue_depth() == 1, "the message is back")
    assert settlements(worker, request_id) == [("requeue", "result_store_down")]
    assert records(worker, "session_ended") == []
    begun_at = time.monotonic()
    assert worker.stop() == 0
    assert time.monotonic() - begun_at < GONE_TIMEOUT_S
    redis_proxy.resume()
    deployment.start_worker()
    assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)


def test_r32_a_redis_that_became_a_replica_is_not_written_to_and_not_looped_on(
    deployment: Deployment, redis_server: RedisServer
) -> None:
    worker = deployment.start_worker(RABBITMQ_PREFETCH=2)
    deployment.serve_next()
    configure(redis_server, "REPLICAOF", "127.0.0.1", "9")
    requests = publish_some(deployment)
    check_held(deployment, requests)
    check_refused(worker)
    configure(redis_server, "REPLICAOF", "NO", "ONE")
    check_recovered(deployment, requests)


def test_r33_a_full_redis_is_not_written_to_and_not_looped_on(
    deployment: Deployment, redis_server: RedisServer
) -> None:
    worker = deployment.start_worker(RABBITMQ_PREFETCH=2)
    deployment.serve_next()
    configure(redis_server, "CONFIG", "SET", "maxmemory-policy", "noeviction")
    configure(redis_server, "CONFIG", "SET", "maxmemory", "1")
    requests = publish_some(deployment)
    check_held(deployment, requests)
    check_refused(worker)
    configure(redis_server, "CONFIG", "SET", "maxmemory", "0")
    check_recovered(deployment, requests)


def test_r33_a_redis_without_enough_replicas_is_not_written_to_and_not_looped_on(
    deployment: Deployment, redis_server: RedisServer
) -> None:
    deployment.start_worker(RABBITMQ_PREFETCH=2)
    deployment.serve_next()
    configure(redis_server, "CONFIG", "SET", "min-replicas-to-write", "1")
    requests = publish_some(deployment)
    check_held(deployment, requests)
    configure(redis_server, "CONFIG", "SET", "min-replicas-to-write", "0")
    check_recovered(deployment, requests)


def test_r36_an_empty_password_is_none_and_a_missing_one_is_said_at_error(
    deployment: Deployment, redis_server: RedisServer
) -> None:
    worker = deployment.start_worker(REDIS_PASSWORD="")
    deployment.serve_next()
    configure(redis_server, "CONFIG", "SET", "requirepass", "S3cretB")
    redis_server.password = "S3cretB"
    with redis_server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)  # who is logged in stays so
    request_id = deployment.publish(deployment.request(PROMPT))
    (record, *_) = wait_record(worker, "store_login_refused")
    assert record["level"] == "ERROR"
    wait_hold(worker, "result_store_down")
    until(lambda: deployment.queue_depth() == 1, "the message waits")
    with redis_server.client() as client:
        client.config_set("requirepass", "")
    redis_server.password = ""
    assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)
    assert len(records(worker, "store_login_refused")) == 1


@pytest.mark.parametrize("url_user", ["", "default:"])
def test_r36_a_wrong_password_is_no_outage_and_is_not_printed(
    deployment: Deployment, redis_server: RedisServer, url_user: str
) -> None:
    configure(redis_server, "CONFIG", "SET", "requirepass", "right")
    redis_server.password = "right"
    settings: dict[str, object] = {"REDIS_PASSWORD": "S3cretB"}
    if url_user:
        settings = {"REDIS_PASSWORD": "", "REDIS_URL": f"redis://{url_user}S3cretB@127.0.0.1:{redis_server.port}"}
    deployment.declare_queue()
    request_id = deployment.publish(deployment.request(PROMPT))
    worker = deployment.start_worker(ready=False, LOG_LEVEL="DEBUG", **settings)
    (record,) = wait_record(worker, "store_login_refused")
    assert record["level"] == "ERROR"
    wait_record(worker, "connected")
    assert deployment.queue_depth() == 1
    assert deployment.model.ledger.calls == []
    with redis_server.client() as client:
        client.config_set("requirepass", "S3cretB")
    redis_server.password = "S3cretB"
    worker.wait_ready()
    with redis_server.client() as client:
        until(lambda: client.get(f"infer_resp:{request_id}"), "the result")
        assert json.loads(client.get(f"infer_resp:{request_id}"))["status"] == "completed"
    assert worker.stop() == 0
    assert "S3cretB" not in worker.log()
