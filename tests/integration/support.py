"""What the integration tests share: a deployment with the eyes they need, a producer that survives, waits."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pika
import pika.exceptions

from devstack import processes
from devstack.processes import wait_until
from devstack.rabbitmq import RabbitMq
from devstack.stack import Stack
from devstack.worker_process import WorkerProcess

#: for what should happen at once: waiting for it costs nothing when it does
LONG_TIMEOUT_S = 30.0
#: seconds, odd enough to be nobody's default
TTL_S = 1234
#: seconds that a process without work has to be gone (design section 9: 2 s and the last flush)
GONE_TIMEOUT_S = 2.0 + 3.0
#: the prompt of the request that proves that the consumer still serves
NEXT_PROMPT = "And the next one, please."

COMPLETED_KEYS = {"status", "status_code", "result"}
FAILED_KEYS = {"status", "status_code", "error", "error_type"}


class Deployment(Stack):
    """A stack whose workers log JSON, with results that live for `TTL_S`."""

    def worker_env(self, **overrides: object) -> dict[str, str]:
        return super().worker_env(**{"LOG_FORMAT": "json", "REDIS_RESPONSE_TTL_S": TTL_S, **overrides})

    def adopt(self, worker: WorkerProcess) -> WorkerProcess:
        """Have a worker that was started by other means ended with this deployment."""
        self.workers.append(worker)
        return worker

    def calls(self, prompt: str) -> int:
        """Count the calls of the model for a prompt."""
        assert self.model is not None
        return len(self.model.ledger.calls_for(prompt))

    def serve_next(self) -> None:
        """Have one more request served: with a prefetch of 1, all before it have been settled then."""
        assert self.wait_result(self.publish(self.request(NEXT_PROMPT)))["status"] == "completed"
        wait_until(lambda: self.consumer_count() == 1, timeout_s=LONG_TIMEOUT_S, what="one consumer")

    def queue_exists(self) -> bool:
        """Whether a worker has declared the queue yet."""
        try:
            self.channel().queue_declare(self.queue, passive=True)
        except pika.exceptions.ChannelClosedByBroker:
            return False
        return True

    def stop_empty(self, worker: WorkerProcess) -> None:
        """Stop a worker; it must exit with 0, and what it had not acked would be back in the queue."""
        assert worker.stop() == 0
        assert self.queue_depth() == 0

    def hand_out_once(self) -> None:
        """Take the one message of the queue and give it back, so that its next delivery is a redelivery."""
        method, _, _ = self.channel().basic_get(self.queue)
        assert method is not None
        self.channel().basic_nack(method.delivery_tag, requeue=True)
        wait_until(lambda: self.queue_depth() == 1, timeout_s=LONG_TIMEOUT_S, what="the message is back")


def completed_text(result: dict[str, Any]) -> str:
    """Return what the model said in a completed result; it says its prompt back."""
    assert result["status"] == "completed", result
    return str(result["result"]["choices"][0]["message"]["content"])


def said(prompt: str) -> str:
    """Return what the model of the stack says to a prompt."""
    return f"You said: {prompt}"


def records(worker: WorkerProcess, event: str | None = None, **fields: object) -> list[dict[str, Any]]:
    """Return the worker's log lines of one event, with these fields."""
    found = []
    for line in worker.log().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if event in (None, record.get("event")) and all(record.get(name) == value for name, value in fields.items()):
            found.append(record)
    return found


def wait_record(
    worker: WorkerProcess, event: str, *, count: int = 1, timeout_s: float = LONG_TIMEOUT_S, **fields: object
) -> list[dict[str, Any]]:
    """Wait until the worker has logged so many lines of an event."""
    return wait_until(
        lambda: (found := records(worker, event, **fields)) and len(found) >= count and found,
        timeout_s=timeout_s,
        what=f"{count} x {event} {fields} in the log",
    )


def settlements(worker: WorkerProcess, request_id: str) -> list[tuple[str, str]]:
    """Return what became of each delivery of a request: (disposition, reason)."""
    lines = records(worker, "request_settled", request_id=request_id)
    return [(line["disposition"], line["reason"]) for line in lines]


def readyz(worker: WorkerProcess) -> dict[str, Any]:
    """Return the document of the worker's /readyz, whatever its status."""
    try:
        with urllib.request.urlopen(f"{worker.http_url}/readyz", timeout=LONG_TIMEOUT_S) as answer:
            return dict(json.loads(answer.read()))
    except urllib.error.HTTPError as answer:
        with answer:
            return dict(json.loads(answer.read()))


def hold_names(worker: WorkerProcess) -> set[str]:
    """Return the names of the holds that are up."""
    return {hold["name"] for hold in readyz(worker)["holds"]}


def wait_hold(worker: WorkerProcess, name: str, *, timeout_s: float = LONG_TIMEOUT_S) -> None:
    """Wait until a hold is up."""
    wait_until(lambda: name in hold_names(worker), timeout_s=timeout_s, what=f"the hold {name}")


def signal_caught(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal (Linux)."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def wait_handler(pid: int, number: int = signal.SIGTERM) -> None:
    """Wait until a process has its handler for a signal."""
    wait_until(lambda: signal_caught(pid, number), timeout_s=LONG_TIMEOUT_S, what=f"a handler in {pid}", every_s=0.001)


@dataclass
class Sent:
    """A request that a producer has sent."""

    request_id: str
    prompt: str
    #: how often it went out: more than once when the confirm was lost
    publish_count: int = 0


@dataclass
class Producer:
    """Publishes at a steady rate and waits for each confirm; a broker that goes away costs it time, no request.

    Runs on a thread of its own, with a connection of its own.
    """

    deployment: Deployment
    count: int
    per_second: float
    prefix: str
    timeout_s: float = 300.0
    sent: list[Sent] = field(default_factory=list)
    _failure: BaseException | None = None
    _connection: pika.BlockingConnection | None = None
    _channel: Any = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)

    def start(self) -> Producer:
        self._thread.start()
        return self

    def wait_sent(self, count: int, *, timeout_s: float) -> None:
        """Wait until so many are confirmed."""
        wait_until(
            lambda: len(self.sent) >= count or not self._thread.is_alive(),
            timeout_s=timeout_s,
            what=f"{count} published",
        )

    def join(self, *, timeout_s: float) -> list[Sent]:
        """Wait until all are published; return them."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"only {len(self.sent)} of {self.count} published"
        assert self._failure is None, self._failure
        return self.sent

    def _run(self) -> None:
        try:
            begun_at = time.monotonic()
            for number in range(self.count):
                delay_s = begun_at + number / self.per_second - time.monotonic()
                if delay_s > 0:
                    time.sleep(delay_s)  # the pace is what is wanted here
                self._send(number)
        except BaseException as err:
            self._failure = err
        finally:
            self._close()

    def _send(self, number: int) -> None:
        prompt = f"{self.prefix} {number}"
        request = self.deployment.request(prompt, timeout_s=self.timeout_s)
        item, body = Sent(request["request_id"], prompt), json.dumps(request).encode()
        give_up_at = time.monotonic() + 120.0
        while True:
            try:
                channel = self._open_channel()
                item.publish_count += 1
                properties = pika.BasicProperties(delivery_mode=2, content_type="application/json")
                channel.basic_publish("", self.deployment.queue, body, properties, mandatory=True)
            except (pika.exceptions.AMQPError, OSError):
                self._close()
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.2)
            else:
                self.sent.append(item)
                return

    def _open_channel(self) -> Any:
        if self._channel is None:
            self._connection = self.deployment.rabbitmq.connect()
            self._channel = self._connection.channel()
            self._channel.confirm_delivery()
        return self._channel

    def _close(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None and connection.is_open:
            with contextlib.suppress(pika.exceptions.AMQPError, OSError):
                connection.close()


def wait_results(deployment: Deployment, sent: Sequence[Sent], *, timeout_s: float) -> dict[str, dict[str, Any]]:
    """Wait for the results of all; return them by request_id."""
    keys = [f"infer_resp:{item.request_id}" for item in sent]
    with deployment.redis_server.client() as client:

        def count_missing() -> int:
            return sum(value is None for value in client.mget(keys))

        try:
            wait_until(lambda: not count_missing(), timeout_s=timeout_s, what="all results", every_s=0.2)
        except processes.NotInTime as err:
            raise processes.NotInTime(f"{err}: {count_missing()} of {len(keys)} are missing") from err
        values = client.mget(keys)
    return {item.request_id: json.loads(value) for item, value in zip(sent, values, strict=True)}


@contextlib.contextmanager
def broker_setting(rabbitmq: RabbitMq, *, on: Sequence[str], off: Sequence[str]) -> Iterator[None]:
    """Run a rabbitmqctl command, and another one at the end to undo it."""
    rabbitmq.ctl(*on)
    try:
        yield
    finally:
        rabbitmq.ctl(*off)


def write_launcher(folder: Path, text: str) -> str:
    """Write an executable that stands in for the interpreter of a `WorkerProcess`; return its path."""
    path = folder / "launcher"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def until(condition: Callable[[], object], what: str, *, timeout_s: float = LONG_TIMEOUT_S) -> None:
    """Wait until a condition holds."""
    wait_until(condition, timeout_s=timeout_s, what=what)
