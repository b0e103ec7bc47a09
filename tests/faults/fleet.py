"""The fleet under test: three seats with a worker process each, behind wires of their own, and the servers they share.

A seat outlives its workers, as a host does: replica, outbox file and wires stay. Safe from any thread, but for what
`Stack` says of its own channel.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from pathlib import Path
from types import TracebackType

import pika.exceptions

from devstack import processes
from devstack.processes import LOOPBACK
from devstack.rabbitmq import RabbitMq
from devstack.redis_server import RedisServer
from devstack.stack import Stack
from devstack.worker_process import WorkerProcess

from .journal import Sightings
from .points import Point, Traps
from .taps import AmqpTap, HttpTap, RedisTap
from .wire_proxy import Event, Link, Tap, WireProxy

#: seconds per token of an answer: with 5 to 50 tokens an answer takes 50 to 500 ms
TOKEN_DELAY_S = 0.01
PREFETCH = 16
#: results stay longer than a round of a run lasts
RESULT_TTL_S = 7200
#: every write is on the disk when it is answered: a killed Redis loses nothing that it said it had
DURABLE_REDIS = (
    *("--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-percentage", "0"),
    *("--maxmemory-policy", "noeviction"),
)
#: quick where the defaults are slow; all that is named here is named in the report
SETTINGS: dict[str, object] = {
    "RABBITMQ_PREFETCH": PREFETCH,
    "RABBITMQ_HEARTBEAT_S": 2,
    "RABBITMQ_MAX_RETRIES": 10,
    "MODEL_INFER_TIMEOUT_S": 5,
    "HEALTH_CHECK_INTERVAL_S": 1,
    "REDIS_TIMEOUT_S": 2,
    "REDIS_RETRY_DELAY_S": 1,
    "REDIS_RESPONSE_TTL_S": RESULT_TTL_S,
    "METRICS_FLUSH_INTERVAL_S": 1,
    "CROESUS_BATCH_SIZE": 100,
    "LOG_FORMAT": "json",
}
_EXIT_TIMEOUT_S = 60.0


class Seat:
    """One replica: its wires, and the worker process that has it now."""

    def __init__(self, name: str, fleet: Fleet, *, launcher: str | None) -> None:
        self.name, self._fleet, self._launcher = name, fleet, launcher
        self.life = 0
        self.worker: WorkerProcess | None = None
        #: exit codes of clean stops
        self.exit_codes: list[int] = []
        self._lock = threading.RLock()
        stack = fleet.stack
        self.amqp = WireProxy(
            stack.rabbitmq.port, make_tap=AmqpTap, on_event=self._on_amqp, on_end=self._on_amqp_end
        ).start()
        self.redis = WireProxy(stack.redis_server.port, make_tap=RedisTap, on_event=self._on_redis).start()
        assert stack.model is not None
        self.http = WireProxy(stack.model.port, make_tap=HttpTap, on_event=self._on_http).start()

    @property
    def wires(self) -> tuple[WireProxy, ...]:
        return self.amqp, self.redis, self.http

    def start(self) -> None:
        """Start a worker, and do not wait for it."""
        with self._lock:
            overrides: dict[str, object] = {
                "RABBITMQ_PORT": self.amqp.port,
                "REDIS_URL": f"redis://{LOOPBACK}:{self.redis.port}",
                "MODEL_CONTAINER_URL": f"http://{LOOPBACK}:{self.http.port}",
                "REPLICA_ID": self.name,
                "USAGE_OUTBOX_PATH": self._fleet.folder / f"{self.name}.db",
            }
            env = self._fleet.stack.worker_env(**{**SETTINGS, **self._fleet.settings, **overrides})
            self.life += 1
            self.worker = WorkerProcess(env, python=self._launcher) if self._launcher else WorkerProcess(env)

    def kill(self) -> None:
        """SIGKILL the worker."""
        with self._lock:
            if self.worker is not None:
                self.worker.kill()
                self._bury()

    def stop(self) -> int:
        """SIGTERM the worker and return its exit code."""
        worker = self.worker
        assert worker is not None
        code = worker.stop(timeout_s=_EXIT_TIMEOUT_S)
        with self._lock:
            self.exit_codes.append(code)
            self._bury()
        return code

    def ready(self) -> bool:
        """Whether its worker consumes."""
        worker = self.worker
        return worker is not None and worker.running and worker.ready()

    def has_begun(self) -> bool:
        """Whether its worker has logged anything, and so listens for signals."""
        worker = self.worker
        return worker is not None and bool(worker.log())

    def start_again(self) -> None:
        """Do what a supervisor does when a worker ended by itself: note how, and start another."""
        with self._lock:
            code = self.worker.exit_code if self.worker is not None else None
            if code is not None:
                self.exit_codes.append(code)
                self._bury()
                self.start()

    def close(self) -> None:
        """End the worker and the wires."""
        self.kill()
        for wire in self.wires:
            wire.close()

    def _bury(self) -> None:
        worker, self.worker = self.worker, None
        if worker is None:
            return
        with (self._fleet.log_folder / f"{self.name}.log").open("ab") as kept, contextlib.suppress(OSError):
            kept.write(worker.log_path.read_bytes())
        worker.close()

    # -- what passes on the wires -------------------------------------------------------------------------------------

    def _pass(self, point: Point, request_id: str) -> bool:
        return self._fleet.traps.pass_by(point, self.name, request_id)

    def _on_amqp(self, link: Link, event: Event) -> bool:
        fleet = self._fleet
        match event.name:
            case "publishing":
                return self._pass(Point.PUBLISHING, event.request_id)
            case "published":
                fleet.copied.add((self.name, event.request_id))
                return self._pass(Point.PUBLISHED, event.request_id)
            case "acking" if event.detail == "ack":
                if (self.name, event.request_id) in fleet.copied:
                    fleet.copied.discard((self.name, event.request_id))
                    return self._pass(Point.CONFIRMED, event.request_id)
                return self._pass(Point.ACKING, event.request_id)
            case "acking" if event.detail == "reject":
                fleet.sightings.add_reject(event.request_id)
                return True
            case _:
                return True

    def _on_amqp_end(self, tap: Tap) -> None:
        if isinstance(tap, AmqpTap) and tap.purpose == "consumer":
            self._fleet.sightings.add_session_end(self.name)

    def _on_redis(self, link: Link, event: Event) -> bool:
        return self._pass(Point.ANSWERED if event.name == "storing" else Point.STORED, event.request_id)

    def _on_http(self, link: Link, event: Event) -> bool:
        self._fleet.sightings.add_call(event.detail, event.request_id, seat=self.name, life=self.life)
        return self._pass(Point.RECEIVED, event.request_id)


class Fleet:
    """Broker, Redis, model, sinks and the seats."""

    def __init__(
        self,
        *,
        seat_count: int = 3,
        queue_type: str = "classic",
        settings: dict[str, object] | None = None,
        launcher: str | None = None,
        log_folder: Path | None = None,
        rabbitmq: RabbitMq | None = None,
    ) -> None:
        self.settings: dict[str, object] = {"RABBITMQ_QUEUE_TYPE": queue_type, **(settings or {})}
        self.queue_type = queue_type
        self.traps, self.sightings = Traps(), Sightings()
        #: (seat, request) of copies that the broker has confirmed and whose original is not settled
        self.copied: set[tuple[str, str]] = set()
        self._seat_count, self._launcher = seat_count, launcher
        self._closers = contextlib.ExitStack()
        self._given_rabbitmq = rabbitmq
        self.folder = processes.make_folder("fleet")
        self.log_folder = log_folder or self.folder
        self.seats: dict[str, Seat] = {}

    def __enter__(self) -> Fleet:
        try:
            self._closers.callback(processes.remove_folder, self.folder)
            self.rabbitmq = self._given_rabbitmq or self._closers.enter_context(RabbitMq())
            self.redis_server = self._closers.enter_context(RedisServer(arguments=DURABLE_REDIS))
            self.stack = self._closers.enter_context(Stack(rabbitmq=self.rabbitmq, redis_server=self.redis_server))
            assert self.stack.model is not None
            self.model = self.stack.model
            self.good_behaviour()
            self.log_folder.mkdir(parents=True, exist_ok=True)
            for number in range(1, self._seat_count + 1):
                seat = Seat(f"worker-{number}", self, launcher=self._launcher)
                self.seats[seat.name] = seat
                self._closers.callback(seat.close)
        except BaseException:
            self._closers.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closers.close()

    def start_workers(self, *, timeout_s: float = 60.0) -> None:
        """Start a worker in each seat and wait until all consume."""
        for seat in self.seats.values():
            seat.start()
        try:
            processes.wait_until(self.all_ready, timeout_s=timeout_s, what="all workers consume", every_s=0.1)
        except processes.NotInTime as err:
            logs = "\n".join(seat.worker.log()[-1500:] for seat in self.seats.values() if seat.worker is not None)
            raise processes.NotInTime(f"{err}; their logs end with:\n{logs}") from err

    def all_ready(self) -> bool:
        """Whether the workers of all seats consume."""
        return all(seat.ready() for seat in self.seats.values())

    def good_behaviour(self) -> None:
        """Have the model answer all, in a time that follows from the length of the answer."""
        self.model.forget_behaviours()
        self.model.behave(token_delay_s=TOKEN_DELAY_S)

    # -- looking, with connections of their own -----------------------------------------------------------------------

    def take_dead_letters(self) -> list[bytes]:
        """Take all that is in the dead-letter queue out of it."""
        return self._take_all(self.stack.dlq)

    def take_queued(self) -> list[bytes]:
        """Take all that is ready in the request queue out of it."""
        return self._take_all(self.stack.queue)

    def _take_all(self, queue: str) -> list[bytes]:
        bodies: list[bytes] = []
        connection = self.rabbitmq.connect()
        try:
            channel = connection.channel()
            while True:
                method, _, body = channel.basic_get(queue)
                if method is None:
                    return bodies
                bodies.append(body)
                channel.basic_ack(method.delivery_tag)
        except pika.exceptions.ChannelClosedByBroker:
            return bodies  # there is no such queue
        finally:
            with contextlib.suppress(pika.exceptions.AMQPError, OSError):
                connection.close()

    def delete_dead_letter_queue(self) -> None:
        """Delete the dead-letter queue."""
        connection = self.rabbitmq.connect()
        try:
            connection.channel().queue_delete(self.stack.dlq)
        finally:
            connection.close()

    def append_only_folder(self) -> Path:
        """Return the folder of Redis' append-only file."""
        with self.redis_server.client() as client:
            return Path(client.config_get("dir")["dir"]) / "appendonlydir"


def kept_log_folder(root: Path) -> Path:
    """Return an empty folder for the logs of a run."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    return root


def now() -> float:
    """Return the time of the journal."""
    return time.time()
