"""The environment as a real process reads it, and what the command line says about it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from devstack import processes
from devstack.processes import LOOPBACK
from devstack.proxy import Direction, TcpProxy
from devstack.rabbitmq import RabbitMq
from devstack.redis_server import RedisServer
from devstack.worker_process import PROJECT_FOLDER, WorkerProcess

from .support import LONG_TIMEOUT_S, Deployment, completed_text, readyz, records, said, until, wait_record

pytestmark = pytest.mark.integration

PROMPT = "How are you configured?"
SECRETS = ("S3cretA", "S3cretB", "S3cretC", "S3cretD", "S3cretE")


def run_cli(env: Mapping[str, str], *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m inference_worker` to its end, with this environment and no other."""
    return subprocess.run(
        [sys.executable, "-m", "inference_worker", *arguments],
        env={"PATH": os.defpath, "PYTHONPATH": str(PROJECT_FOLDER), **env},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONG_TIMEOUT_S * 2,
    )


# -- values -----------------------------------------------------------------------------------------------------------


def test_r76_white_space_and_quotes_around_a_value_are_taken_off(deployment: Deployment) -> None:
    url = deployment.model_url
    deployment.start_worker(MODEL_CONTAINER_URL=f" '{url}/v1/' \r", RABBITMQ_PREFETCH=" 8 ", ORG_ID='""')
    assert completed_text(deployment.wait_result(deployment.publish(deployment.request(PROMPT)))) == said(PROMPT)
    deployment.metric_server.wait_until(lambda: bool(deployment.metric_server.records), what="a record")
    assert deployment.metric_server.documents[-1]["org_id"] == ""


def test_r76_r77_every_fault_is_named_at_once_and_nothing_is_declared(deployment: Deployment) -> None:
    worker = deployment.start_worker(
        ready=False,
        RABBITMQ_PREFETCH="8 # slots",
        RABBITMQ_HEARTBEAT_S=0,
        DEPLOYMENT_ID="",
        METRIC_SERVER_SERVICE_TOKEN="S3cretC with white space",
        REDIS_URL="http://:S3cretB@localhost",
        REDIS_RESPONSE_TTL_S="3600.5",
        LOG_LEVEL="LOUD",
    )
    assert worker.wait(timeout_s=LONG_TIMEOUT_S) == 78
    log = worker.log()
    named = ("RABBITMQ_PREFETCH", "RABBITMQ_HEARTBEAT_S", "DEPLOYMENT_ID", "METRIC_SERVER_SERVICE_TOKEN", "REDIS_URL")
    assert all(
        name in log for name in (*named, "REDIS_RESPONSE_TTL_S", "LOG_LEVEL", "'8 # slots'", "'LOUD'", "'3600.5'")
    )
    assert "S3cret" not in log
    assert "Traceback" not in log
    assert "infer_req." not in deployment.rabbitmq.ctl("list_queues", "--no-table-headers", "name").split()


def test_r77_an_empty_value_is_an_unset_one(deployment: Deployment) -> None:
    seen = bytearray()
    with TcpProxy(deployment.model.port) as model_proxy:
        model_proxy.observe(Direction.TO_SERVER, seen.extend)
        deployment.start_worker(
            MODEL_CONTAINER_URL=f"http://{LOOPBACK}:{model_proxy.port}",
            MODEL_API_KEY="",
            RABBITMQ_MAX_RETRIES="",
            RABBITMQ_VHOST="",
            REDIS_PASSWORD="",
            RABBITMQ_QUEUE_TYPE="",
        )
        deployment.model.behave(match=PROMPT, fault="reset_body")
        request_id = deployment.publish(deployment.request(PROMPT))
        assert deployment.wait_result(request_id)["status_code"] == 500
    assert deployment.calls(PROMPT) == 2  # the default: one retry
    assert b"POST /v1/chat/completions" in seen
    assert b"authorization" not in seen.lower()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "//"])
def test_r78_the_base_urls_may_end_as_they_like(deployment: Deployment, suffix: str) -> None:
    tail = "/" if suffix else ""
    deployment.start_worker(
        MODEL_CONTAINER_URL=deployment.model_url + suffix,
        MODEL_INFER_PATH="v1/chat/completions" if suffix else "/v1/chat/completions",
        HEALTH_CHECK_PATH="health" if suffix else "/health",
        METRIC_SERVER_URL=deployment.metric_server.url + tail,
        CROESUS_HOST=deployment.croesus.url + tail,
    )
    request_id = deployment.publish(deployment.request(PROMPT))
    assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)
    deployment.croesus.wait_until(lambda: bool(deployment.croesus.event_for(request_id)), what="the event")
    deployment.metric_server.wait_until(
        lambda: any(document["model_metrics"] for document in deployment.metric_server.documents),
        what="numbers of the model",
    )


VHOSTS = ["name", "/name", "a/b", "%2F"]


@pytest.fixture
def odd_login(rabbitmq: RabbitMq) -> Iterator[tuple[str, str]]:
    """A user whose name and password would mean something in a URL, allowed on vhosts that would, too."""
    name, password = "p@ss:/%40", "w@rd:/%2F?#"
    for vhost in VHOSTS:
        rabbitmq.ctl("add_vhost", vhost)
    rabbitmq.ctl("add_user", name, password)
    try:
        for vhost in VHOSTS:
            rabbitmq.ctl("set_permissions", "-p", vhost, name, ".*", ".*", ".*")
        yield name, password
    finally:
        rabbitmq.ctl("delete_user", name)
        for vhost in VHOSTS:
            rabbitmq.ctl("delete_vhost", vhost)


def test_r79_a_vhost_and_a_login_are_taken_literally(
    deployment: Deployment, odd_login: tuple[str, str], subtests: pytest.Subtests
) -> None:
    name, password = odd_login
    for vhost in VHOSTS:
        with subtests.test(vhost):
            worker = deployment.start_worker(RABBITMQ_VHOST=vhost, RABBITMQ_USERNAME=name, RABBITMQ_PASSWORD=password)
            with deployment.rabbitmq.connect(vhost=vhost, username=name, password=password) as connection:
                declared = connection.channel().queue_declare(deployment.queue, passive=True)
                assert declared.method.consumer_count == 1
            assert worker.stop() == 0


def test_r79_a_missing_vhost_is_an_error_that_names_it_and_no_end(deployment: Deployment) -> None:
    worker = deployment.start_worker(ready=False, RABBITMQ_VHOST="no-such-vhost")
    (record, *_) = wait_record(worker, "connect_failed")
    assert record["level"] == "ERROR"
    assert "no-such-vhost" in record["message"]
    assert readyz(worker)["state"] == "connecting"
    assert worker.stop() == 0


# -- secrets ----------------------------------------------------------------------------------------------------------


def test_r80_no_secret_is_written_or_served_by_a_worker_whose_neighbours_are_unreachable(
    deployment: Deployment,
) -> None:
    worker = deployment.start_worker(
        ready=False,
        LOG_LEVEL="DEBUG",
        RABBITMQ_HOST="no-such-host.invalid",
        RABBITMQ_PASSWORD="S3cretA",
        REDIS_URL="redis://:S3cretB@no-such-host.invalid/",
        METRIC_SERVER_URL="http://no-such-host.invalid",
        METRIC_SERVER_SERVICE_TOKEN="S3cretC",
        MODEL_CONTAINER_URL="http://no-such-host.invalid",
        MODEL_API_KEY="S3cretD",
        CROESUS_HOST="http://no-such-host.invalid",
    )
    wait_record(worker, "connect_failed")
    wait_record(worker, "hold_raised", hold="model_unhealthy", count=2)
    wait_record(worker, "hold_raised", hold="result_store_down", count=2)
    wait_record(worker, "metrics_flush_failed")
    served = json.dumps(readyz(worker))
    assert worker.stop() == 0
    assert not [secret for secret in SECRETS if secret in worker.log() + served]


def test_r80_no_secret_prompt_or_answer_is_written_by_a_worker_at_work(
    deployment: Deployment, redis_proxy: TcpProxy
) -> None:
    with RedisServer(password="S3cretB") as guarded:
        worker = deployment.start_worker(
            LOG_LEVEL="DEBUG",
            REDIS_URL=guarded.url,
            REDIS_PASSWORD="S3cretB",
            MODEL_API_KEY="S3cretD",
            METRIC_SERVER_SERVICE_TOKEN="S3cretC",  # which MetricServer refuses
        )
        deployment.model.behave(match="Pr1vate reset", times=1, fault="reset_body")
        deployment.model.behave(match="Pr1vate error", status=400, body='{"error":{"message":"Pr1vate answer"}}')
        prompts = ("Pr1vate good", "Pr1vate reset", "Pr1vate error")
        for prompt in prompts:
            deployment.publish(deployment.request(prompt), headers={"tenant": "Pr1vate header"})
        deployment.publish(b'{"request_id": "r", "payload": "Pr1vate malformed"}')
        wait_record(worker, "request_settled", count=5)
        wait_record(worker, "metrics_flush_failed")
        served = json.dumps(readyz(worker))
        assert worker.stop() == 0
    assert not [secret for secret in (*SECRETS, "Pr1vate") if secret in worker.log() + served]
    assert not [secret for secret in SECRETS if secret in json.dumps(deployment.croesus.events)]


# -- addresses --------------------------------------------------------------------------------------------------------


class Ipv6Relay:
    """Passes connections on from `[::1]:port` to the same port on 127.0.0.1, which is where the servers listen."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("::1", port), family=socket.AF_INET6)
        self._listener.settimeout(0.2)
        self._port = port
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                link = threading.Thread(target=self._relay, args=(client,))
                self._threads.append(link)
                link.start()

    def _relay(self, client: socket.socket) -> None:
        with client, socket.create_connection((LOOPBACK, self._port)) as server:
            others = {client: server, server: client}
            while not self._closing.is_set():
                for source in select.select(list(others), [], [], 0.2)[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    others[source].sendall(data)

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()


@pytest.fixture
def ipv6(deployment: Deployment) -> Iterator[None]:
    """The broker, Redis and the model can be had on ::1 as well."""
    with contextlib.ExitStack() as relays:
        try:
            for port in (deployment.rabbitmq.port, deployment.redis_server.port, deployment.model.port):
                relays.callback(Ipv6Relay(port).close)
        except OSError as err:
            pytest.skip(f"no IPv6 on this machine: {err}")
        yield


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_r81_localhost_is_whatever_answers(deployment: Deployment, host: str) -> None:
    deployment.start_worker(
        RABBITMQ_HOST=host,
        REDIS_URL=f"redis://{host}:{deployment.redis_server.port}",
        MODEL_CONTAINER_URL=f"http://{host}:{deployment.model.port}",
    )
    request_id = deployment.publish(deployment.request(PROMPT))
    assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)
    assert deployment.calls(PROMPT) == 1


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_r81_an_ipv6_address_means_the_same_with_and_without_brackets(
    deployment: Deployment, ipv6: None, host: str
) -> None:
    worker = deployment.start_worker(
        RABBITMQ_HOST=host,
        REDIS_URL=f"redis://[::1]:{deployment.redis_server.port}",
        MODEL_CONTAINER_URL=f"http://[::1]:{deployment.model.port}",
    )
    request_id = deployment.publish(deployment.request(PROMPT))
    assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)
    assert deployment.calls(PROMPT) == 1
    assert worker.stop() == 0


def test_the_status_pages_can_be_served_on_ipv6(deployment: Deployment, ipv6: None) -> None:
    worker = deployment.start_worker(ready=False, WORKER_HTTP_HOST="::1")
    wait_record(worker, "consuming")
    with urllib.request.urlopen(f"http://[::1]:{worker.env['WORKER_HTTP_PORT']}/readyz", timeout=5) as answer:
        assert json.loads(answer.read())["ready"]


def test_a_taken_port_of_the_status_pages_is_a_warning_and_no_end(deployment: Deployment) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        worker = deployment.start_worker(ready=False, WORKER_HTTP_PORT=taken.getsockname()[1])
        wait_record(worker, "consuming")
        (record,) = records(worker, "status_server_off")
    assert record["level"] == "WARNING"
    deployment.serve_next()
    assert worker.stop() == 0


# -- .env -------------------------------------------------------------------------------------------------------------


def test_the_env_file_of_the_working_directory_is_read_and_the_environment_wins(
    deployment: Deployment, tmp_path: Path
) -> None:
    env = deployment.worker_env(REPLICA_ID="from-the-file", LOG_LEVEL="LOUD")
    (tmp_path / ".env").write_text("# ours\n" + "".join(f"export {name}='{value}'\n" for name, value in env.items()))
    child = processes.spawn(
        [sys.executable, "-m", "inference_worker"],
        env={"PATH": os.defpath, "PYTHONPATH": str(PROJECT_FOLDER), "LOG_LEVEL": "DEBUG"},
        log_path=tmp_path / "log",
        cwd=tmp_path,
    )
    try:
        until(deployment.queue_exists, "the worker has connected")
        request_id = deployment.publish(deployment.request(PROMPT))
        assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)
        deployment.metric_server.wait_until(lambda: bool(deployment.metric_server.records), what="a record")
        assert {each["replica_id"] for each in deployment.metric_server.documents} == {"from-the-file"}
        child.signal(15)
        assert child.wait(timeout_s=LONG_TIMEOUT_S) == 0
    finally:
        child.end(grace_s=0)


# -- the command line -------------------------------------------------------------------------------------------------

NEIGHBOURS = ("RabbitMQ", "Redis", "model", "MetricServer", "Croesus")


def check_lines(output: str) -> dict[str, bool]:
    """Return what `--check` says of each neighbour."""
    found = re.findall(r"^(ok|FAIL) +(\w+):", output, re.MULTILINE)
    return {name: verdict == "ok" for verdict, name in found}


def test_check_names_every_neighbour_declares_nothing_and_posts_nothing(deployment: Deployment, tmp_path: Path) -> None:
    env = deployment.worker_env(MODEL_API_KEY="S3cretD", HEALTH_CHECK_INTERVAL_S=7)
    done = run_cli(env, "--check", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert check_lines(done.stdout) == dict.fromkeys(NEIGHBOURS, True)
    assert "HEALTH_CHECK_INTERVAL_S=7" in done.stdout
    assert f"DEPLOYMENT_ID={deployment.deployment_id}" in done.stdout
    assert "S3cretD" not in done.stdout + done.stderr
    assert not deployment.queue_exists()
    assert deployment.dlx not in deployment.rabbitmq.ctl("list_exchanges", "--no-table-headers", "name")
    assert deployment.dlq not in deployment.rabbitmq.ctl("list_queues", "--no-table-headers", "name")
    assert deployment.metric_server.post_count == deployment.croesus.post_count == 0
    assert deployment.model.ledger.calls == []
    with deployment.redis_server.client() as client:
        assert list(client.scan_iter(f"*{env['REPLICA_ID']}*")) == []


def test_check_names_those_that_do_not_answer_and_ends_with_1(deployment: Deployment, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind((LOOPBACK, 0))
        closed = f"{LOOPBACK}:{holder.getsockname()[1]}"
        faults = {
            "RabbitMQ": {"RABBITMQ_PASSWORD": "S3cretA"},
            "Redis": {"REDIS_URL": f"redis://:S3cretB@{closed}"},
            "model": {"MODEL_CONTAINER_URL": f"http://{closed}"},
            "MetricServer": {"METRIC_SERVER_URL": f"http://{closed}", "METRIC_SERVER_SERVICE_TOKEN": "S3cretC"},
            "Croesus": {"CROESUS_HOST": f"http://{closed}"},
        }
        for name, settings in faults.items():
            done = run_cli(deployment.worker_env(**settings), "--check", folder=tmp_path)
            assert done.returncode == 1
            assert check_lines(done.stdout) == {each: each != name for each in NEIGHBOURS}
            assert "S3cret" not in done.stdout + done.stderr
            assert "Traceback" not in done.stderr


def test_check_is_done_in_time_when_broker_and_redis_accept_and_say_nothing(
    deployment: Deployment, tmp_path: Path
) -> None:
    with TcpProxy(deployment.rabbitmq.port) as silent:
        silent.stall()
        url = f"redis://{LOOPBACK}:{silent.port}"
        env = deployment.worker_env(RABBITMQ_PORT=silent.port, REDIS_URL=url, REDIS_TIMEOUT_S=1)
        begun_at = time.monotonic()
        done = run_cli(env, "--check", folder=tmp_path)
    assert time.monotonic() - begun_at < 20.0
    assert done.returncode == 1
    assert check_lines(done.stdout) == {name: name not in ("RabbitMQ", "Redis") for name in NEIGHBOURS}


def test_check_of_a_bad_configuration_ends_with_78(tmp_path: Path) -> None:
    done = run_cli({"RABBITMQ_PORT": "0"}, "--check", folder=tmp_path)
    assert done.returncode == 78
    required = ("METRIC_SERVER_URL", "METRIC_SERVER_SERVICE_TOKEN", "CROESUS_HOST", "DEPLOYMENT_ID", "REPLICA_ID")
    assert all(name in done.stderr for name in (*required, "USER_ID", "HF_MODEL_ID", "RABBITMQ_PORT"))


def test_help_names_every_variable_and_every_flag(tmp_path: Path) -> None:
    done = run_cli({}, "--help", folder=tmp_path)
    assert done.returncode == 0
    names = ("RABBITMQ_HOST", "MODEL_CONTAINER_URL", "REDIS_URL", "CROESUS_HOST", "DEPLOYMENT_ID", "SHUTDOWN_GRACE_S")
    assert all(name in done.stdout for name in (*names, "--check", "--healthcheck", "--version"))


def test_healthcheck_says_whether_the_worker_of_this_environment_is_alive(
    deployment: Deployment, tmp_path: Path
) -> None:
    worker: WorkerProcess = deployment.start_worker()
    assert run_cli(worker.env, "--healthcheck", folder=tmp_path).returncode == 0
    deployment.model.behave_health(status=503)  # not ready, and alive
    until(lambda: not worker.ready(), "not consuming")
    assert run_cli(worker.env, "--healthcheck", folder=tmp_path).returncode == 0
    assert worker.stop() == 0
    assert run_cli(worker.env, "--healthcheck", folder=tmp_path).returncode == 1
