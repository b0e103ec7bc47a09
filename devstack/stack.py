"""The whole set for one deployment: broker, Redis, model, sinks, workers, and the eyes and hands of a test.

Owned by one thread: its broker connection is pika's.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pika
import pika.adapters.blocking_connection
import pika.exceptions

from devstack import processes
from devstack.model_server import DEFAULT_MODEL, ModelServer
from devstack.processes import LOOPBACK
from devstack.rabbitmq import RabbitMq
from devstack.redis_server import RedisServer
from devstack.sinks import Croesus, MetricServer
from devstack.worker_process import READY_TIMEOUT_S, WorkerProcess

#: seconds for a result, generous for a busy machine
RESULT_TIMEOUT_S = 20.0
METRIC_TOKEN = "devstack-metric-token"


@dataclass(frozen=True)
class DeadLetter:
    """A message found in the dead-letter queue."""

    body: bytes
    headers: dict[str, Any]
    properties: pika.BasicProperties


class Stack:
    """One deployment with queue names of its own, so that many can share a broker and a Redis.

    A broker or Redis that is handed in must be running and is left running; `model_url` names a real model server, and
    then `model` is None.
    """

    def __init__(
        self,
        *,
        rabbitmq: RabbitMq | None = None,
        redis_server: RedisServer | None = None,
        model_url: str | None = None,
        model_name: str = DEFAULT_MODEL,
    ) -> None:
        self.deployment_id = str(uuid.uuid4())
        self.queue = f"infer_req.{self.deployment_id}"
        self.dlx = f"infer.dlx.{self.deployment_id}"
        self.dlq = f"infer.dlq.{self.deployment_id}"
        self.dlx_routing_key = "dead"
        self.model_name = model_name
        self.model = None if model_url else ModelServer(model=model_name)
        self.model_url = model_url or (self.model.url if self.model else "")
        self.metric_server = MetricServer(token=METRIC_TOKEN)
        self.croesus = Croesus()
        self.workers: list[WorkerProcess] = []
        self._shared_rabbitmq, self._shared_redis = rabbitmq, redis_server
        self._closers = contextlib.ExitStack()
        self._connection: pika.BlockingConnection | None = None
        self._channel: pika.adapters.blocking_connection.BlockingChannel | None = None
        self._dead: list[DeadLetter] = []

    @classmethod
    def from_environment(cls) -> Stack:
        """Build one for the real model server that MODEL_CONTAINER_URL and MODEL name, or else for one of ours.

        Raises:  ValueError, a sentence for the person at the terminal
        """
        url, name = os.environ.get("MODEL_CONTAINER_URL", ""), os.environ.get("MODEL", "")
        if url and not name:
            raise ValueError("MODEL_CONTAINER_URL is set, so MODEL must name the model that is to answer there.")
        return cls(model_url=url, model_name=name) if url else cls()

    def __enter__(self) -> Stack:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> Stack:
        """Bring everything up but the workers; the broker, which is slow, boots while the others start."""
        try:
            self.rabbitmq = self._shared_rabbitmq or self._closers.enter_context(contextlib.closing(RabbitMq()))
            self.redis_server = self._shared_redis or self._closers.enter_context(contextlib.closing(RedisServer()))
            if self._shared_rabbitmq is None:
                self.rabbitmq.launch()
            if self._shared_redis is None:
                self.redis_server.launch()
            for server in (self.model, self.metric_server, self.croesus):
                if server is not None:
                    self._closers.enter_context(server)
            if self._shared_redis is None:
                self.redis_server.wait_ready()
            if self._shared_rabbitmq is None:
                self.rabbitmq.wait_ready()
            self._redis = self.redis_server.client()
            self._closers.callback(self._redis.close)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End the workers and whatever was started here; queues on a shared broker are deleted."""
        for worker in self.workers:
            worker.close()
        if self._shared_rabbitmq is not None and self._shared_rabbitmq.running:
            with contextlib.suppress(pika.exceptions.AMQPError, OSError):
                self.channel().queue_delete(self.queue)
                self.channel().queue_delete(self.dlq)
                self.channel().exchange_delete(self.dlx)
        self._drop_connection()
        self._closers.close()

    # workers

    def worker_env(self, **overrides: object) -> dict[str, str]:
        """Return a worker's whole configuration, quick where its defaults are slow; an override of None leaves out."""
        env: dict[str, object] = {
            "RABBITMQ_HOST": LOOPBACK,
            "RABBITMQ_PORT": self.rabbitmq.port,
            "INFERENCE_DLX": self.dlx,
            "INFERENCE_DLQ": self.dlq,
            "INFERENCE_DLX_ROUTING_KEY": self.dlx_routing_key,
            "MODEL_CONTAINER_URL": self.model_url,
            "HEALTH_CHECK_INTERVAL_S": 1,
            "REDIS_URL": self.redis_server.url,
            "REDIS_PASSWORD": self.redis_server.password or None,
            "REDIS_RETRY_DELAY_S": 1,
            "METRIC_SERVER_URL": self.metric_server.url,
            "METRIC_SERVER_SERVICE_TOKEN": METRIC_TOKEN,
            "METRICS_FLUSH_INTERVAL_S": 1,
            "CROESUS_HOST": self.croesus.url,
            "DEPLOYMENT_ID": self.deployment_id,
            "REPLICA_ID": f"replica-{len(self.workers) + 1}",
            "USER_ID": "user-1",
            "ORG_ID": "org-1",
            "HF_MODEL_ID": self.model_name,
            "WORKER_HTTP_PORT": processes.free_port(),
        }
        env.update(overrides)
        return {name: str(value) for name, value in env.items() if value is not None}

    def start_worker(
        self, *, ready: bool = True, timeout_s: float = READY_TIMEOUT_S, **overrides: object
    ) -> WorkerProcess:
        """Start a worker; with `ready`, wait until it is consuming.

        Raises:  NotInTime with the end of its log
        """
        worker = WorkerProcess(self.worker_env(**overrides))
        self.workers.append(worker)
        return worker.wait_ready(timeout_s=timeout_s) if ready else worker

    # the broker

    @property
    def amqp_url(self) -> str:
        """The broker, for a producer."""
        return f"amqp://guest:guest@{LOOPBACK}:{self.rabbitmq.port}/%2F"

    def channel(self) -> pika.adapters.blocking_connection.BlockingChannel:
        """Return a channel with confirms, a new one if the last was lost."""
        if self._connection is not None and self._connection.is_open:
            try:
                self._connection.process_data_events(0)  # learn of a loss now, not in the middle of what follows
            except pika.exceptions.AMQPError:
                self._drop_connection()
        if self._connection is None or not self._connection.is_open:
            self._connection, self._channel = self.rabbitmq.connect(), None
        if self._channel is None or not self._channel.is_open:
            self._channel = self._connection.channel()
            self._channel.confirm_delivery()
        return self._channel

    def declare_queue(self, **more_arguments: Any) -> None:
        """Declare the request queue as a worker does, so that one can publish before there is a worker."""
        arguments = {
            "x-dead-letter-exchange": self.dlx,
            "x-dead-letter-routing-key": self.dlx_routing_key,
            **more_arguments,
        }
        self.channel().queue_declare(self.queue, durable=True, arguments=arguments)

    def request(self, prompt: str = "Say hello.", *, age_s: float = 0.0, **fields: Any) -> dict[str, Any]:
        """Return a valid request; `fields` replaces fields of it, None leaves one out."""
        payload = {"model": self.model_name, "messages": [{"role": "user", "content": prompt}]}
        request = {
            "request_id": str(uuid.uuid4()),
            "received_at": time.time() - age_s,
            "timeout_s": 60.0,
            "payload": payload,
            **fields,
        }
        return {name: value for name, value in request.items() if value is not None}

    def publish(
        self,
        body: dict[str, Any] | bytes | None = None,
        *,
        properties: pika.BasicProperties | None = None,
        headers: dict[str, Any] | None = None,
    ) -> str:
        """Publish a request (None: a fresh one) and wait for the confirm; return its request_id, "" if it has none."""
        if body is None:
            body = self.request()
        request_id = str(body.get("request_id", "")) if isinstance(body, dict) else ""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        if properties is None:
            properties = pika.BasicProperties(delivery_mode=2, content_type="application/json", headers=headers)
        self.channel().basic_publish("", self.queue, raw, properties, mandatory=True)
        return request_id

    def queue_depth(self, name: str | None = None) -> int:
        """Count the messages that are ready in a queue (the request queue), unacked ones left out."""
        declared = self.channel().queue_declare(name or self.queue, passive=True)
        return int(declared.method.message_count)

    def consumer_count(self, name: str | None = None) -> int:
        """Count the consumers of a queue (the request queue)."""
        declared = self.channel().queue_declare(name or self.queue, passive=True)
        return int(declared.method.consumer_count)

    def dead_letters(self) -> list[DeadLetter]:
        """Return everything that has been in the dead-letter queue so far; what is there now is taken out."""
        while True:
            method, properties, body = self.channel().basic_get(self.dlq, auto_ack=True)
            if method is None or properties is None or body is None:
                return list(self._dead)
            self._dead.append(DeadLetter(body, properties.headers or {}, properties))

    def wait_dead_letters(self, count: int, *, timeout_s: float = RESULT_TIMEOUT_S) -> list[DeadLetter]:
        """Wait until so many messages have been in the dead-letter queue.

        Raises:  NotInTime
        """
        processes.wait_until(
            lambda: len(self.dead_letters()) >= count, timeout_s=timeout_s, what=f"{count} dead letter(s)"
        )
        return self.dead_letters()

    def _drop_connection(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None and connection.is_open:
            with contextlib.suppress(pika.exceptions.AMQPError, OSError):
                connection.close()

    # the results

    def result_bytes(self, request_id: str) -> bytes | None:
        """Return a request's result as it is stored, or None."""
        value = self._redis.get(f"infer_resp:{request_id}")
        return value if isinstance(value, bytes) else None

    def result(self, request_id: str) -> dict[str, Any] | None:
        """Return a request's result, or None."""
        value = self.result_bytes(request_id)
        return None if value is None else dict(json.loads(value))

    def result_ttl_s(self, request_id: str) -> int:
        """Return how long a result will be kept; -1 without an end, -2 when there is none."""
        return int(self._redis.ttl(f"infer_resp:{request_id}"))

    def wait_result(self, request_id: str, *, timeout_s: float = RESULT_TIMEOUT_S) -> dict[str, Any]:
        """Wait for a request's result.

        Raises:  NotInTime with the end of the workers' logs
        """
        try:
            result = processes.wait_until(
                lambda: self.result(request_id), timeout_s=timeout_s, what=f"a result for {request_id}", every_s=0.01
            )
        except processes.NotInTime as err:
            logs = "\n".join(worker.log()[-2000:] for worker in self.workers)
            raise processes.NotInTime(f"{err}; the workers' logs end with:\n{logs}") from err
        assert result is not None
        return result
