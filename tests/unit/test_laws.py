"""The seven laws of the worker's threads and settlements, each in a test that bears its name."""

from __future__ import annotations

import ast
import json
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any

import fakeredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import inference_worker
from inference_worker.delivery import Settlement
from inference_worker.disposition import (
    Ack,
    Answered,
    Circumstances,
    Interrupted,
    InvalidAnswer,
    ModelError,
    Outcome,
    Reject,
    Requeue,
    Unavailable,
    decide_disposition,
)
from inference_worker.errors import BrokerError
from inference_worker.health_checker import HealthChecker, HealthSettings
from inference_worker.holds import HoldName
from inference_worker.kept_answers import KeptAnswers
from inference_worker.message_processor import MessageProcessor, ProcessorSettings
from inference_worker.message_publisher import MessagePublisher
from inference_worker.messages import InferenceRequest
from inference_worker.model_answer import Timings, Usage
from inference_worker.model_client import ModelReply, Sign
from inference_worker.result_store import ResultStore
from inference_worker.stream_store import StreamStore
from inference_worker.supervisor import ExitCode, Parts, Supervisor
from tests.fakes.amqp import Message
from tests.fakes.listening import LATER_S, NAMES, ListenerBench
from tests.fakes.steps import RecordingBuffer, request_body
from tests.timeouts import LONG_TIMEOUT_S

PACKAGE = Path(inference_worker.__file__).parent
STORED, GONE = HoldName.RESULT_STORE_DOWN, HoldName.MODEL_UNHEALTHY


@pytest.fixture
def bench() -> Iterator[ListenerBench]:
    bench = ListenerBench()
    yield bench
    bench.close()


@cache
def trees() -> tuple[tuple[str, ast.Module], ...]:
    return tuple((path.stem, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py")))


# -- law 1 ------------------------------------------------------------------------------------------------------------


class PatientEvent(threading.Event):
    """Pauses between two tries of a copy take no time; a short look-again does."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(0.001 if timeout is not None and timeout >= 1.0 else min(timeout or 0.0, 0.005))


class Worker:
    """Listener, slots, processor, publisher, store and health checker, all real, on a fake broker and fakeredis."""

    def __init__(self, outcomes: list[Outcome], *, prefetch: int) -> None:
        self.outcomes = list(outcomes)
        self.lock = threading.Lock()
        self.redis = fakeredis.FakeServer()
        self.client = fakeredis.FakeRedis(server=self.redis)
        self.looker = fakeredis.FakeRedis(server=self.redis)
        self.bench = ListenerBench(prefetch=prefetch, work=lambda delivery: self.processor.process(delivery))
        bench = self.bench
        self.health = HealthChecker(
            HealthSettings(0.01, 0.01), holds=bench.holds, probe_model=lambda: 200, probe_store=self.probe_store
        )
        store = ResultStore(self.client, ttl_s=60, replica_id="r")
        self.store = store
        self.processor = MessageProcessor(
            ProcessorSettings(
                max_retries=1,
                max_redeliveries=10,
                respects_deadline=False,
                looks_for_cancels=True,
                deployment_id="d",
                replica_id="r",
                user_id="u",
                org_id="",
                model_id="m",
            ),
            model=self,
            store=store,
            streams=StreamStore(self.client, ttl_s=60),
            publisher=MessagePublisher(
                lambda: bench.broker.connect("copies"),
                bench.deadlines,
                queue=NAMES.queue,
                dlx=NAMES.dlx,
                dlx_key=NAMES.dlx_routing_key,
            ),
            health=self.health,
            buffer=RecordingBuffer([]),
            holds=bench.holds,
            kept=KeptAnswers(max_count=prefetch),
            hand_in=lambda settlement: bench.listener.hand_in(settlement),
        )
        self.processor.cut_off = PatientEvent()
        self.unearned: list[str] = []
        bench.broker.on_ack = self.check_ack

    def probe_store(self) -> None:
        self.store.probe()

    def infer(self, request: InferenceRequest, *, trace: Any, sink: Any = None) -> ModelReply:
        with self.lock:
            outcome = self.outcomes.pop(0) if self.outcomes else ANSWERED
        if outcome is BUG:
            raise RuntimeError("a bug")
        sign = {Unavailable: Sign.UNREACHABLE, ModelError: Sign.SUSPECT}.get(type(outcome), Sign.WELL)
        return ModelReply(outcome, sign, "detail")

    def check_ack(self, message: Message) -> None:
        """An ack has to be earned at the moment it is made."""
        request_id = json.loads(message.body).get("request_id") if message.body.startswith(b"{") else None
        # to look, a Redis that is away for the worker is there
        was_connected, self.redis.connected = self.redis.connected, True
        has_result = request_id is not None and self.looker.exists(f"infer_resp:{request_id}")
        self.redis.connected = was_connected
        copies = self.bench.broker.ready(NAMES.queue) + self.bench.broker.unacked(NAMES.queue)
        copies += self.bench.broker.ready(NAMES.dlq)
        if not has_result and not any(each.body == message.body and each is not message for each in copies):
            self.unearned.append(message.body.decode())

    def turn(self) -> None:
        self.bench.turn(later_s=LATER_S)
        self.health.tick(monotonic() + LATER_S)
        self.bench.holds.expire(monotonic() + LATER_S)

    def close(self) -> None:
        self.redis.connected = True
        self.processor.cut_off.set()
        self.bench.close()
        self.client.close()
        self.looker.close()


ANSWERED = Answered(200, b'{"choices": []}', Usage(1, 1), Timings())
BUG: Any = object()
OUTCOMES = st.sampled_from(
    [
        ANSWERED,
        ModelError(400, "x", None),
        ModelError(500, "x", None),
        InvalidAnswer("x"),
        Unavailable("x"),
        Unavailable("x"),
        Interrupted("cut_off"),
        BUG,
    ]
)
KINDS = st.sampled_from(["valid", "valid", "valid", "expired", "no id", "malformed"])
TROUBLES = st.sampled_from(
    ["none", "redis away", "redis back", "nack", "cut after publish", "cut", "close channel", "cancel", "no dlx"]
)


def body_of(kind: str, number: int) -> bytes:
    match kind:
        case "valid":
            return request_body(request_id=f"r-{number}")
        case "expired":
            return request_body(request_id=f"r-{number}", received_at=1.0)
        case "malformed":
            return request_body(request_id=f"r-{number}", timeout_s="soon")
        case _:
            return b"no json %d" % number


def make_trouble(worker: Worker, trouble: str) -> None:
    broker, listener = worker.bench.broker, worker.bench.listener
    has_session = not listener._session.ended and listener._connection is not None and listener._channel.is_open
    match trouble:
        case "redis away":
            worker.redis.connected = False
        case "redis back":
            worker.redis.connected = True
        case "nack":
            broker.refuse_confirms(2)
        case "cut after publish":
            broker.drop_links_after_publish(1)
        case "cut" if has_session:
            broker.drop_link(listener._connection)
        case "close channel" if has_session:
            broker.close_channel(listener._channel, 406, "PRECONDITION_FAILED - ack timed out")
        case "cancel" if broker.has_queue(NAMES.queue):
            broker.cancel_consumers(NAMES.queue)
        case "no dlx":
            broker.delete_exchange(NAMES.dlx)


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(KINDS, min_size=1, max_size=6),
    outcomes=st.lists(OUTCOMES, max_size=8),
    troubles=st.lists(TROUBLES, max_size=6),
    prefetch=st.integers(1, 3),
    is_queue_ours=st.booleans(),
)
def test_law_1_nothing_is_acked_unless_its_result_is_stored_or_its_copy_confirmed_or_it_was_found(
    kinds: list[str], outcomes: list[Outcome], troubles: list[str], prefetch: int, is_queue_ours: bool
) -> None:
    worker = Worker(outcomes, prefetch=prefetch)
    broker = worker.bench.broker
    try:
        if not is_queue_ours:
            broker.make_queue(NAMES.queue, arguments={"x-max-priority": 2})
        worker.bench.turn_until(lambda: not worker.bench.listener._session.ended)
        bodies = [body_of(kind, number) for number, kind in enumerate(kinds)]
        worker.bench.publish(*bodies)
        for trouble in troubles:
            make_trouble(worker, trouble)
            worker.turn()
            worker.turn()
        worker.redis.connected = True
        broker.refuse_confirms(0)
        broker.drop_links_after_publish(0)
        ends_at, look_again = monotonic() + LONG_TIMEOUT_S, threading.Event()
        lost_dlx = "no dlx" in troubles
        while worker.bench.ready() or worker.bench.unacked() or not worker.bench.listener.is_settled:
            assert monotonic() < ends_at, "the queue does not become empty"
            worker.turn()
            if lost_dlx and not broker.has_exchange(NAMES.dlx):
                broker.make_exchange(NAMES.dlx)
                broker.connect("a person").channel().queue_bind(NAMES.dlq, NAMES.dlx, NAMES.dlx_routing_key)
            look_again.wait(0.001)
        assert worker.unearned == []
        # and so nothing is lost: a request with an id has its result, one without is a dead letter
        dead = set(worker.bench.dead())
        for number, (kind, body) in enumerate(zip(kinds, bodies, strict=True)):
            if kind == "no id":
                # a nack right after the exchange was deleted is the one gap: it is looked at every 30 s
                assert body in dead or (lost_dlx and is_queue_ours)
            else:
                assert worker.looker.exists(f"infer_resp:r-{number}")
    finally:
        worker.close()


# -- law 2 ------------------------------------------------------------------------------------------------------------


def calls_in(tree: ast.AST, names: set[str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
            yield node


def test_law_2_a_disposition_is_pure_code_and_every_ack_and_nack_is_made_in_one_function() -> None:
    settling = {"basic_ack", "basic_nack", "basic_reject"}
    places = {}
    for module, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(calls_in(node, settling)):
                places[f"{module}.{node.name}"] = len(list(calls_in(node, settling)))
        assert not any(isinstance(node, ast.Attribute) and node.attr == "multiple" for node in ast.walk(tree))
    assert set(places) == {"rmq_listener.settle"}
    tree = dict(trees())["disposition"]
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    assert imported == {
        "__future__",
        "dataclasses",
        "typing",
        "inference_worker.messages",
        "inference_worker.model_answer",
    }
    given_ = Circumstances(retry_count=0, max_retries=1, redelivered=False, draining=False)
    with pytest.raises(AssertionError):
        decide_disposition("no outcome", given_)  # type: ignore[arg-type]


def test_law_2_every_settlement_is_made_on_the_listener_thread() -> None:
    bench = ListenerBench(prefetch=4, work=lambda each: bench.listener.hand_in(Settlement(each, Ack("completed"))))
    stop = threading.Event()

    def listen() -> None:
        while not stop.is_set():
            bench.listener.tick(monotonic())

    listener = threading.Thread(target=listen, name="rmq-listener")
    listener.start()
    bench.broker.wait_until(lambda: bench.consumer_count == 1, what="consuming")
    bench.publish(*[b"x"] * 20)
    bench.broker.wait_until(lambda: len(bench.calls("basic_ack")) == 20, what="all settled")
    stop.set()
    bench.listener.wake()
    listener.join(LONG_TIMEOUT_S)
    assert {call.thread for call in bench.broker.methods("basic_ack")} == {"rmq-listener"}
    bench.close()


# -- law 3 ------------------------------------------------------------------------------------------------------------


def test_law_3_settling_in_another_session_does_nothing_and_is_counted_and_the_first_settlement_wins(
    bench: ListenerBench,
) -> None:
    bench.consume()
    bench.publish(b"a")
    (old,) = bench.take(1)
    bench.broker.drop_link(bench.connection)
    bench.turn_until(lambda: len(bench.begun) == 2)
    new = bench.begun[1]
    assert new.tag == old.tag
    for disposition in (Ack("completed"), Reject("malformed_request"), Requeue("held")):
        bench.settle(old, disposition)
    assert bench.calls("basic_ack", "basic_nack") == []
    assert bench.listener.stale_settlements_total == 3
    bench.holds.raise_hold(GONE, "so that it does not come again")
    bench.settle(new, Requeue("held"))
    bench.settle(new, Ack("completed"))
    assert bench.calls("basic_ack", "basic_nack") == [("basic_nack", 1, True)]
    assert bench.listener.stale_settlements_total == 4


# -- law 4 ------------------------------------------------------------------------------------------------------------


def test_law_4_the_listener_pumps_the_connection_at_all_times(bench: ListenerBench) -> None:
    def pumps_in_every_turn() -> None:
        before = len(bench.calls("process_data_events"))
        for _ in range(5):
            bench.turn()
        assert len(bench.calls("process_data_events")) == before + 5

    bench.may_end.clear()
    bench.consume()
    bench.publish(b"a", b"b")
    bench.take(2)
    pumps_in_every_turn()
    bench.holds.raise_hold(GONE, "while suspended")
    pumps_in_every_turn()
    bench.holds.raise_hold(STORED, "while Redis is down")
    pumps_in_every_turn()
    bench.holds.raise_hold(HoldName.DRAINING, "while draining")
    bench.listener.drain()
    pumps_in_every_turn()
    assert bench.connection.is_open


# -- law 5 ------------------------------------------------------------------------------------------------------------


def test_law_5_no_wait_is_without_an_end() -> None:
    """A helper thread waits for its next call for ever: a daemon that owns nothing."""
    waiting = {"wait", "join", "get", "acquire", "result"}
    for module, tree in trees():
        assert not list(calls_in(tree, {"sleep"})), module
        if module == "helper_thread":
            continue
        unbounded = [call.lineno for call in calls_in(tree, waiting) if not call.args and not call.keywords]
        assert unbounded == [], module


class Quiet:
    """A service that does nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wakeup = threading.Event()

    def tick(self, now: float) -> float:
        return 60.0

    def close(self) -> None: ...
    def drain(self) -> None: ...


def run_process(bench: ListenerBench, signals: SimpleQueue[int]) -> Callable[[], ExitCode]:
    """Run the supervisor with the real listener; return what waits for its end."""
    supervisor = Supervisor(
        Parts(listener=bench.listener, health=Quiet("health-checker"), reporter=Quiet("reporter"), slots=Unstarted()),
        signals=signals,
        holds=bench.holds,
        deadlines=bench.deadlines,
        cut_off=lambda: None,
        grace_s=0.5,
    )
    codes: list[ExitCode] = []
    main = threading.Thread(target=lambda: codes.append(supervisor.run()))
    main.start()

    def ended() -> ExitCode:
        main.join(LONG_TIMEOUT_S)
        assert not main.is_alive()
        return codes[0]

    return ended


class Unstarted:
    """Slots that the bench has started already, and ends."""

    in_work_count = 0
    are_alive = True

    def start(self) -> None: ...
    def stop(self) -> None: ...


@pytest.mark.parametrize("when", ["idle", "in backoff", "on a stalled link"])
def test_law_5_every_wait_ends_at_once_when_stop_is_asked(bench: ListenerBench, when: str) -> None:
    if when == "in backoff":
        bench.broker.connect_errors.extend(BrokerError("refused") for _ in range(100))
        bench.listener._failures = 6
    signals: SimpleQueue[int] = SimpleQueue()
    ended = run_process(bench, signals)
    if when == "in backoff":
        bench.broker.wait_until(lambda: bench.calls("connect"), what="the first try to connect")
    else:
        bench.broker.wait_until(lambda: bench.consumer_count == 1, what="consuming")
    if when == "on a stalled link":
        bench.broker.stall(bench.connection)
    began_at = monotonic()
    signals.put(15)
    assert ended() is ExitCode.STOPPED
    assert monotonic() - began_at < 4.0


# -- law 6 ------------------------------------------------------------------------------------------------------------


def test_law_6_a_service_thread_that_dies_takes_the_process_down(bench: ListenerBench) -> None:
    bench.broker.connect_errors.append(ZeroDivisionError("a bug"))
    ended = run_process(bench, SimpleQueue())
    assert ended() is ExitCode.SERVICE_DIED
    assert ExitCode.SERVICE_DIED != 0


# -- law 7 ------------------------------------------------------------------------------------------------------------


def is_wall_clock(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    return name in {"time", "time_ns", "now", "utcnow"} and not node.args


def test_law_7_the_wall_clock_only_meets_received_at() -> None:
    """Sums, differences and comparisons: everywhere else a jump of the clock would make a wait long or negative."""
    meetings = []
    for module, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.BinOp | ast.Compare) and any(is_wall_clock(each) for each in ast.walk(node)):
                meetings.append(f"{module}: {ast.unparse(node)}")
    assert meetings == ["message_processor: time() - request.received_at"]
