"""The private servers of one run, and what every figure does with them: fill a queue, start a contender, watch.

One thread; its broker connection is pika's.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pika
import pika.adapters.blocking_connection

from benchmarks import messages
from benchmarks.contender import Contender
from benchmarks.process_usage import process_tree
from benchmarks.servers.http_servers import CHAT_PATH, HttpServerProcess, MetricServer, start_instant_model
from devstack import processes
from devstack.install import provide_servers
from devstack.processes import LOOPBACK
from devstack.rabbitmq import RabbitMq
from devstack.redis_server import RedisServer
from devstack.worker_process import WorkerProcess

PROJECT_FOLDER = Path(__file__).parent.parent
#: seconds from a contender's start to its consumer, generous for a busy machine
CONSUMER_TIMEOUT_S = 30.0
_FILLED_TIMEOUT_S = 60.0


@dataclass
class Running:
    """A contender at work on a queue."""

    contender: Contender
    queue: str
    pid: int
    log: Callable[[], str]
    is_running: Callable[[], bool]
    #: ask it to end (SIGTERM) and wait until it has
    stop: Callable[[], None]

    def pids(self) -> list[int]:
        """Its processes."""
        return process_tree(self.pid)


class Bench:
    """RabbitMQ, Redis, the instant model, MetricServer and Croesus. Everything ends with the block."""

    def __init__(self) -> None:
        self._closers = contextlib.ExitStack()
        self._connection: pika.BlockingConnection | None = None
        self._channel: pika.adapters.blocking_connection.BlockingChannel | None = None

    def __enter__(self) -> Bench:
        try:
            self.servers = provide_servers()
            self.rabbitmq = self._closers.enter_context(contextlib.closing(RabbitMq(servers=self.servers)))
            self.redis_server = self._closers.enter_context(contextlib.closing(RedisServer(servers=self.servers)))
            self.rabbitmq.launch()
            self.redis_server.launch()
            self.model, self.model_kind = start_instant_model()
            self._closers.callback(self.model.close)
            self.metric_server = self._closers.enter_context(contextlib.closing(MetricServer()))
            # a program of C's speed where there is one: it stands in for a host of its own, and takes 10,000 usage
            # events in a row on the cores that are being measured
            self.billing, _ = start_instant_model()
            self._closers.callback(self.billing.close)
            self.redis_server.wait_ready()
            self.rabbitmq.wait_ready()
            self.redis: Any = self.redis_server.client()
            self._closers.callback(self.redis.close)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything."""
        self._closers.close()

    # -- the broker

    def channel(self) -> pika.adapters.blocking_connection.BlockingChannel:
        """Return a channel without confirms, a new one if the last was lost."""
        if self._connection is None or not self._connection.is_open:
            self._connection, self._channel = self.rabbitmq.connect(), None
        if self._channel is None or not self._channel.is_open:
            self._channel = self._connection.channel()
        return self._channel

    def declare(self, contender: Contender, *, queue: str | None = None) -> str:
        """Make a fresh queue as the contender would declare it; return its name."""
        queue = queue or f"infer_req.{uuid.uuid4()}"
        for name, arguments in contender.declare(queue).items():
            self.channel().queue_declare(name, durable=True, arguments=arguments)
        return queue

    def delete(self, queue: str) -> None:
        """Delete a queue and those that dramatiq declares with it."""
        for name in (queue, f"{queue}.DQ", f"{queue}.XQ"):
            self.channel().queue_delete(name)

    def publish(self, contender: Contender, queue: str, request: dict[str, Any]) -> None:
        """Publish one request as the contender's own client would."""
        body, properties = contender.wrap(request, queue)
        self.channel().basic_publish("", queue, body, properties)

    def fill(
        self, contender: Contender, queue: str, count: int, *, make_request: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        """Publish so many requests and wait until they are all there.

        Raises:  NotInTime
        """
        before = self.depth(queue)
        self.fill_unwatched(contender, queue, count, make_request=make_request)
        processes.wait_until(
            lambda: self.depth(queue) >= before + count, timeout_s=_FILLED_TIMEOUT_S, what="the queue is filled"
        )

    def fill_unwatched(
        self, contender: Contender, queue: str, count: int, *, make_request: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        """Publish so many requests to a queue that is consumed already."""
        make = make_request or messages.make_request
        for _ in range(count):
            self.publish(contender, queue, make())

    def depth(self, queue: str) -> int:
        """Count the messages that are ready."""
        return int(self.channel().queue_declare(queue, passive=True).method.message_count)

    def consumer_count(self, queue: str) -> int:
        """Count the consumers."""
        return int(self.channel().queue_declare(queue, passive=True).method.consumer_count)

    def wait_consumer(self, running: Running, *, count: int = 1) -> None:
        """Wait until the broker sees so many consumers.

        Raises:  NotInTime, with the end of the contender's log
        """
        try:
            processes.wait_until(
                lambda: self.consumer_count(running.queue) >= count or not running.is_running(),
                timeout_s=CONSUMER_TIMEOUT_S,
                what=f"{running.contender.name} consumes",
                every_s=0.004,
            )
        except processes.NotInTime as err:
            raise processes.NotInTime(f"{err}; its log:\n{running.log()[-2000:]}") from err
        if not running.is_running():
            raise processes.NotInTime(f"{running.contender.name} ended; its log:\n{running.log()[-2000:]}")

    # -- contenders

    @contextlib.contextmanager
    def running(
        self,
        contender: Contender,
        queue: str,
        *,
        prefetch: int,
        model: HttpServerProcess | None = None,
        worker_env: Mapping[str, str] | None = None,
        replica: int = 1,
    ) -> Iterator[Running]:
        """Run a contender on a queue while the block runs."""
        model = model or self.model
        if contender.is_worker:
            env = self._worker_env(queue, prefetch, model, replica)
            worker = WorkerProcess({**env, **contender.worker_env, **(worker_env or {})})
            try:
                yield Running(contender, queue, worker.pid, worker.log, lambda: worker.running, lambda: stop(worker))
            finally:
                worker.close()
            return
        folder = processes.make_folder("contender")
        child = processes.spawn(
            contender.argv(prefetch),
            env={**self._contender_env(queue, prefetch, model), "HOME": str(folder)},
            log_path=folder / "contender.log",
            cwd=folder,
        )
        try:
            yield Running(contender, queue, child.pid, child.log, lambda: child.running, child.end)
        finally:
            child.end(grace_s=0)
            processes.remove_folder(folder)

    def _contender_env(self, queue: str, prefetch: int, model: HttpServerProcess) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(PROJECT_FOLDER),
            "BENCH_AMQP_URL": f"amqp://guest:guest@{LOOPBACK}:{self.rabbitmq.port}/%2F",
            "BENCH_REDIS_URL": self.redis_server.url,
            "BENCH_MODEL_URL": model.chat_url,
            "BENCH_QUEUE": queue,
            "BENCH_PREFETCH": str(prefetch),
        }

    def _worker_env(self, queue: str, prefetch: int, model: HttpServerProcess, replica: int) -> dict[str, str]:
        """What has no default, where things are, and the prefetch: all else is as it comes."""
        return {
            "RABBITMQ_HOST": LOOPBACK,
            "RABBITMQ_PORT": str(self.rabbitmq.port),
            "RABBITMQ_PREFETCH": str(prefetch),
            "MODEL_CONTAINER_URL": model.url,
            "MODEL_INFER_PATH": CHAT_PATH,
            "REDIS_URL": self.redis_server.url,
            "METRIC_SERVER_URL": self.metric_server.url,
            "METRIC_SERVER_SERVICE_TOKEN": "token",
            "CROESUS_HOST": self.billing.url,
            "DEPLOYMENT_ID": queue.removeprefix("infer_req."),
            "REPLICA_ID": f"replica-{replica}",
            "USER_ID": "user-1",
            "HF_MODEL_ID": "acme/tiny-1",
            "WORKER_HTTP_PORT": str(processes.free_port()),
        }


def stop(worker: WorkerProcess) -> None:
    """Let a worker end by itself, its last flush included."""
    worker.stop()
