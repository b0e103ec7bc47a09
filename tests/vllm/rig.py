"""What the scenarios stand on: one broker, one Redis and one vLLM for all of them, a deployment for each."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devstack.processes import wait_until
from devstack.rabbitmq import RabbitMq
from devstack.redis_server import RedisServer
from devstack.stack import Stack
from devstack.vllm_server import MODEL_NAME, VllmServer
from devstack.worker_process import WorkerProcess

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
#: for what should happen at once: waiting for it costs nothing when it does. The first request of a kind may have
#: vLLM compile something for half a minute
LONG_TIMEOUT_S = 180.0


class ScenarioFailed(Exception):
    """Something is not as it must be; the text says what. Raised by `check`, counted by the runner."""


def check(holds: bool, what: str) -> None:
    """Have the scenario fail unless this holds.

    Raises:  ScenarioFailed
    """
    if not holds:
        raise ScenarioFailed(what)


def check_equal(seen: object, expected: object, what: str) -> None:
    """Have the scenario fail unless these two are equal.

    Raises:  ScenarioFailed
    """
    check(seen == expected, f"{what}: {seen!r} instead of {expected!r}")


@dataclass(frozen=True)
class Entry:
    """One entry of a stream in Redis."""

    #: when Redis took it, Unix milliseconds
    at_ms: int
    kind: str
    attempt: str
    data: Any


class Deployment(Stack):
    """A queue with its workers in front of the vLLM that all deployments share."""

    def ask(self, payload: dict[str, Any], *, timeout_s: float = LONG_TIMEOUT_S) -> str:
        """Publish a request with this payload and return its request_id."""
        return self.publish(self.request(payload=payload, timeout_s=timeout_s))

    def answer(self, payload: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Have a request completed; return its request_id and the answer."""
        request_id = self.ask(payload)
        return request_id, self.wait_answer(request_id)

    def wait_result(self, request_id: str, *, timeout_s: float = LONG_TIMEOUT_S) -> dict[str, Any]:
        """Wait for a request's result, as long as there is a worker.

        Raises:  NotInTime with the end of the workers' logs
        """
        wait_until(
            lambda: self.result_bytes(request_id) or not any(worker.running for worker in self.workers),
            timeout_s=timeout_s,
            what=f"a result for {request_id}",
        )
        return super().wait_result(request_id, timeout_s=0)

    def wait_answer(self, request_id: str) -> dict[str, Any]:
        """Wait for a request's result, which must be an answer, and return that.

        Raises:  ScenarioFailed
        """
        result = self.wait_result(request_id)
        check_equal(result["status"], "completed", f"the status of {json.dumps(result)[:300]}")
        return dict(result["result"])

    def stream(self, request_id: str) -> list[Entry]:
        """Return a request's whole stream in Redis, up to its last word, which comes after the result.

        Raises:  NotInTime
        """
        wait_until(
            lambda: any(entry.kind in ("done", "failed") for entry in self._entries(request_id)),
            timeout_s=LONG_TIMEOUT_S,
            what=f"the end of the stream of {request_id}",
        )
        return self._entries(request_id)

    def _entries(self, request_id: str) -> list[Entry]:
        with self.redis_server.client() as client:
            found: Any = client.xrange(f"infer_stream:{request_id}")
        return [
            Entry(
                int(entry_id.split(b"-")[0]),
                fields[b"type"].decode(),
                fields[b"attempt"].decode(),
                json.loads(fields[b"data"] or b"null"),
            )
            for entry_id, fields in found
        ]

    def record(self, request_id: str) -> dict[str, Any]:
        """Wait until MetricServer has the record of a request's last delivery, and return it."""

        def final() -> list[dict[str, Any]]:
            records = self.metric_server.records_for(request_id)
            return [record for record in records if record["disposition"] in ("ack", "reject")]

        self.metric_server.wait_until(lambda: bool(final()), what=f"a record of {request_id}", timeout_s=LONG_TIMEOUT_S)
        return final()[0]

    def check_billed(self, request_ids: list[str]) -> int:
        """Check that each of these completed requests is billed once, as vLLM counted, and nothing else is.

        Raises:  ScenarioFailed
        """
        self.croesus.wait_until(
            lambda: len(self.croesus.events) >= len(request_ids),
            what=f"{len(request_ids)} usage events",
            timeout_s=LONG_TIMEOUT_S,
        )
        check_equal(sorted(event["id"] for event in self.croesus.events), sorted(request_ids), "the requests billed")
        check_equal(self.croesus.duplicate_count, 0, "usage events sent twice")
        for request_id in request_ids:
            event = self.croesus.event_for(request_id)
            usage = self.wait_answer(request_id)["usage"]
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                check_equal(event and event["data"][name], usage[name], f"{name} billed for {request_id}")
        return self.croesus.tokens_billed


class Rig:
    """The servers, which live as long as the run."""

    def __init__(self, *, captures: Path | None = None) -> None:
        self._captures = captures
        self._closers = contextlib.ExitStack()
        self.rabbitmq = RabbitMq()
        self.redis_server = RedisServer()
        self.vllm = VllmServer()
        #: null in a plain answer and absent from a streamed one, as all comparisons have found
        self.absent: set[str] = set()
        #: other differences, path and what differs, by scenario
        self.other_differences: dict[str, dict[str, str]] = {}

    def __enter__(self) -> Rig:
        with self._closers:
            for server in (self.rabbitmq, self.redis_server, self.vllm):
                self._closers.callback(server.close)
            self.rabbitmq.launch()
            self.redis_server.start()
            self.rabbitmq.wait_ready()
            self._closers = self._closers.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closers.close()

    def serve(self, options: tuple[str, ...]) -> None:
        """Have vLLM serve with these options: starts it, or starts it again, unless it does already."""
        if self.vllm.running and self.vllm.options == options:
            return
        self.vllm.stop()
        self.vllm.options = options
        self.vllm.start()

    @contextlib.contextmanager
    def deployment(self, *, model_url: str = "", **variables: Any) -> Iterator[Deployment]:
        """Give a deployment with one worker, which is configured by these variables and must end with 0."""
        url = model_url or self.vllm.url
        deployment = Deployment(
            rabbitmq=self.rabbitmq, redis_server=self.redis_server, model_url=url, model_name=MODEL_NAME
        )
        with deployment:
            worker = deployment.start_worker(timeout_s=LONG_TIMEOUT_S, **variables)
            yield deployment
            if worker.running:
                check_equal(worker.stop(), 0, "the worker's exit code")
            check_equal(deployment.queue_depth(), 0, "messages left in the queue")

    def direct(self, payload: dict[str, Any], *, path: str = CHAT_PATH) -> dict[str, Any]:
        """Ask vLLM itself, which must answer with 200.

        Raises:  ScenarioFailed
        """
        status, body = self.vllm.call(path, payload)
        check_equal(status, 200, f"vLLM's status for {json.dumps(payload)[:200]}, with {body[:300]!r}")
        return dict(json.loads(body))

    def keep(self, name: str, payload: dict[str, Any], *, path: str) -> None:
        """Keep what vLLM itself says to a request, plain and streamed, when captures are asked for."""
        if self._captures is None:
            return
        _, plain = self.vllm.call(path, payload)
        _, stream = self.vllm.call(path, streamed(payload))
        (self._captures / f"vllm-{name}.json").write_bytes(plain)
        (self._captures / f"vllm-{name}.sse").write_bytes(stream)


def worker_of(deployment: Deployment) -> WorkerProcess:
    """Return the deployment's worker."""
    (worker,) = deployment.workers
    return worker


def chat(prompt: str = "Say hello.", *, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    """Return a payload to which vLLM always says the same."""
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL_NAME, "messages": messages, "temperature": 0, "max_tokens": max_tokens, **more}


def streamed(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the payload as one that asks for a stream, with usage."""
    return {**payload, "stream": True, "stream_options": {"include_usage": True}}
