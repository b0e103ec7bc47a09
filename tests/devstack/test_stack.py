"""The private servers do what faults need of them, and the producer of the README gets its answer through them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from devstack import processes
from devstack.producer import send, wait_result
from devstack.rabbitmq import RabbitMq
from devstack.redis_server import RedisServer
from devstack.stack import Stack

pytestmark = pytest.mark.integration
LONG_TIMEOUT_S = 30.0
NO_RETRY = Retry(NoBackoff(), 0)


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[RabbitMq]:
    with RabbitMq() as server:
        yield server


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def stack(rabbitmq: RabbitMq, redis_server: RedisServer) -> Iterator[Stack]:
    with Stack(rabbitmq=rabbitmq, redis_server=redis_server) as running:
        yield running


def test_a_persistent_message_outlives_a_restart_and_a_kill(stack: Stack, rabbitmq: RabbitMq) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", rabbitmq.version)
    stack.declare_queue()
    stack.publish()
    rabbitmq.restart()
    assert rabbitmq.queue_info(stack.queue) == {"ready": 1, "unacked": 0, "consumers": 0}
    rabbitmq.kill()
    assert not rabbitmq.running
    rabbitmq.start()
    assert stack.queue_depth() == 1
    stack.channel().basic_get(stack.queue)
    assert rabbitmq.queue_info(stack.queue)["unacked"] == 1
    assert rabbitmq.queue_info("no-such-queue") == {}


def test_dead_letters_are_kept_across_calls(stack: Stack) -> None:
    stack.declare_queue()
    stack.channel().exchange_declare(stack.dlx, "direct", durable=True)
    stack.channel().queue_declare(stack.dlq, durable=True)
    stack.channel().queue_bind(stack.dlq, stack.dlx, stack.dlx_routing_key)
    for body in (b"first", b"second"):
        stack.publish(body, headers={"x-retry-count": 1})
        method, _, _ = stack.channel().basic_get(stack.queue)
        assert method is not None
        stack.channel().basic_nack(method.delivery_tag, requeue=False)
    assert [letter.body for letter in stack.wait_dead_letters(2)] == [b"first", b"second"]
    assert [letter.headers["x-retry-count"] for letter in stack.dead_letters()] == [1, 1]


def test_a_frozen_redis_accepts_and_is_silent_until_thawed(redis_server: RedisServer) -> None:
    redis_server.freeze()
    try:
        with (
            redis.Redis(port=redis_server.port, socket_timeout=0.1, retry=NO_RETRY) as client,
            pytest.raises(redis.TimeoutError),
        ):
            client.ping()
    finally:
        redis_server.thaw()
    with redis_server.client() as client:
        assert client.ping()


def test_a_restarted_redis_has_its_port_its_password_and_no_data() -> None:
    with RedisServer(password="secret") as server:
        port = server.port
        with server.client() as client:
            client.set("key", "value")
        server.restart()
        assert server.port == port
        with server.client() as client:
            assert client.get("key") is None
        with redis.Redis(port=port, retry=NO_RETRY) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_the_producer_gets_the_result_of_its_own_request(stack: Stack) -> None:
    stack.declare_queue()
    answered = threading.Event()

    def answer_one() -> None:
        with stack.rabbitmq.connect() as connection, stack.redis_server.client() as results:
            channel = connection.channel()
            for _, _, body in channel.consume(stack.queue, auto_ack=True):
                request = json.loads(body or b"")
                prompt = request["payload"]["messages"][0]["content"]
                results.set(
                    f"infer_resp:{request['request_id']}", json.dumps({"status": "completed", "result": prompt})
                )
                break
        answered.set()

    threading.Thread(target=answer_one, daemon=True).start()
    request_id = send("Why?", model="m", deployment_id=stack.deployment_id, amqp_url=stack.amqp_url)
    with stack.redis_server.client() as results:
        result = wait_result(results, request_id, timeout_s=LONG_TIMEOUT_S)
    assert result == {"status": "completed", "result": "Why?"}
    assert answered.wait(LONG_TIMEOUT_S)


def test_the_producer_is_told_when_there_is_no_such_deployment(stack: Stack) -> None:
    with pytest.raises(pika.exceptions.UnroutableError):
        send("Why?", model="m", deployment_id="none", amqp_url=stack.amqp_url)


def our_processes(mark: str) -> list[str]:
    """Return the command lines of living processes whose environment, command line or working folder holds a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            where = os.readlink(folder / "cwd").encode()  # Redis overwrites the other two with its title
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and int(folder.name) != os.getpid() and mark.encode() in command + environment + where:
            found.append(command.decode(errors="replace").replace("\0", " "))
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc, which is Linux")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_broker_and_a_redis_whose_parent_ended(tmp_path: Path, number: signal.Signals) -> None:
    script = (
        "from devstack import processes\n"
        "from devstack.stack import Stack\n"
        "import time\n"
        "with processes.signals_unwind(), Stack() as stack:\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # the mark
    with subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "up\n"
            names = " ".join(our_processes(str(tmp_path)))
            assert all(name in names for name in ("beam", "epmd", "redis-server"))
            parent.send_signal(number)
            parent.wait(LONG_TIMEOUT_S)
        finally:
            parent.kill()
    processes.wait_until(
        lambda: not our_processes(str(tmp_path)) and not list(tmp_path.iterdir()),
        timeout_s=LONG_TIMEOUT_S,
        what="no process and no folder is left",
    )
