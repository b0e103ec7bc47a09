"""Starting, watching, stopping: exit codes, signals, the grace, and threads that die."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from time import monotonic
from typing import Any

import pytest

from inference_worker.deadlines import Bounded, Deadlines
from inference_worker.holds import HoldName, Holds
from inference_worker.supervisor import ExitCode, Parts, Supervisor
from tests.timeouts import LONG_TIMEOUT_S

#: for a process that has nothing to wait for: the design says 2 s and a last flush
PROMPT_S = 2.0


class FakeService:
    """A service that does nothing, and what is put into `in_tick` and `in_close`."""

    def __init__(self, name: str, journal: list[str]) -> None:
        self.name = name
        self.journal = journal
        self.wakeup = threading.Event()
        self.ticked = threading.Event()
        self.wait_s = 60.0
        self.in_tick: Callable[[], Any] = lambda: None
        self.in_close: Callable[[], Any] = lambda: None
        self.threads: set[str] = set()

    def tick(self, now: float) -> float:
        self.threads.add(threading.current_thread().name)
        self.ticked.set()
        self.in_tick()
        return self.wait_s

    def close(self) -> None:
        self.journal.append(f"close {self.name}")
        self.in_close()


class FakeListener(FakeService):
    is_settled = True

    def drain(self) -> None:
        self.journal.append("drain listener")
        self.wakeup.set()


class FakeReporter(FakeService):
    def drain(self) -> None:
        self.journal.append("drain reporter")

    def flush_soon(self) -> None:
        self.journal.append("flush")


class FakeSlots:
    def __init__(self, journal: list[str]) -> None:
        self.journal = journal
        self.in_work_count = 0
        self.are_alive = True

    def start(self) -> None:
        self.journal.append("start slots")

    def stop(self) -> None:
        self.journal.append("stop slots")


class Process:
    """A supervisor with fake services, run on a thread of its own."""

    def __init__(self) -> None:
        self.journal: list[str] = []
        self.listener = FakeListener("rmq-listener", self.journal)
        self.health = FakeService("health-checker", self.journal)
        self.reporter = FakeReporter("metrics-reporter", self.journal)
        self.slots = FakeSlots(self.journal)
        self.signals: SimpleQueue[int] = SimpleQueue()
        self.holds = Holds()
        self.deadlines = Deadlines()
        self.was_cut_off = threading.Event()
        self.exit_code: ExitCode | None = None
        self.supervisor: Supervisor
        self.are_helpers_alive = True
        self.grace_s = self.cut_off_limit_s = LONG_TIMEOUT_S
        self._main = threading.Thread(target=self._run)

    @property
    def services(self) -> tuple[FakeService, ...]:
        return (self.listener, self.health, self.reporter)

    def _cut_off(self) -> None:
        self.journal.append("cut off")
        self.was_cut_off.set()

    def build(self) -> Supervisor:
        self.supervisor = Supervisor(
            Parts(listener=self.listener, health=self.health, reporter=self.reporter, slots=self.slots),
            signals=self.signals,
            holds=self.holds,
            deadlines=self.deadlines,
            cut_off=self._cut_off,
            grace_s=self.grace_s,
            helpers={"stream-writer": lambda: self.are_helpers_alive},
            cut_off_limit_s=self.cut_off_limit_s,
        )
        return self.supervisor

    def _run(self) -> None:
        self.exit_code = self.supervisor.run()

    def start(self) -> None:
        self.build()
        self._main.start()

    def started(self) -> None:
        self.start()
        for service in self.services:
            assert service.ticked.wait(LONG_TIMEOUT_S)

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.signals.put(number)

    def ended(self, timeout_s: float = LONG_TIMEOUT_S) -> ExitCode | None:
        self._main.join(timeout_s)
        assert not self._main.is_alive()
        return self.exit_code

    @property
    def is_running(self) -> bool:
        return self._main.is_alive()

    def wait_for(self, step: str) -> None:
        ends_at, look_again = monotonic() + LONG_TIMEOUT_S, threading.Event()
        while step not in self.journal:
            assert monotonic() < ends_at, f"no {step!r} in {self.journal}"
            look_again.wait(0.01)


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    if process.is_running:
        process.listener.is_settled, process.slots.in_work_count = True, 0
        process.stop()
        process.ended()


# -- an orderly stop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_r65_an_idle_worker_that_is_asked_to_stop_ends_at_once_with_0(process: Process, number: int) -> None:
    process.started()
    began_at = monotonic()
    process.stop(number)
    assert process.ended() is ExitCode.STOPPED == 0
    assert monotonic() - began_at < PROMPT_S
    assert not process.was_cut_off.is_set()


def test_services_run_on_threads_of_their_names(process: Process) -> None:
    process.started()
    for service in process.services:
        assert service.threads == {service.name}


def test_the_listener_starts_after_the_others_and_stops_before_them(process: Process) -> None:
    process.started()
    process.stop()
    process.ended()
    assert process.journal == [
        "start slots",
        "drain listener",
        "drain reporter",
        "stop slots",
        "close rmq-listener",
        "close health-checker",
        "close metrics-reporter",
    ]


def test_a_stop_before_the_first_turn_is_not_lost(process: Process) -> None:
    process.stop()
    process.start()
    assert process.ended() is ExitCode.STOPPED
    assert process.journal[-3:] == ["close rmq-listener", "close health-checker", "close metrics-reporter"]


def test_draining_is_a_hold_that_is_raised_before_the_listener_is_told(process: Process) -> None:
    process.started()
    drain = process.listener.drain
    seen: list[bool] = []

    def look_then_drain() -> None:
        seen.append(process.holds.is_raised(HoldName.DRAINING))
        drain()

    process.listener.drain = look_then_drain  # type: ignore[method-assign]
    process.stop()
    process.ended()
    assert seen == [True]


@pytest.mark.parametrize("busy", ["slots", "listener"])
def test_r62_what_is_in_work_ends_within_the_grace_and_is_settled(process: Process, busy: str) -> None:
    process.started()
    if busy == "slots":
        process.slots.in_work_count = 1
    else:
        process.listener.is_settled = False
    process.stop()
    process.wait_for("drain listener")
    assert process.is_running
    process.slots.in_work_count, process.listener.is_settled = 0, True
    assert process.ended() is ExitCode.STOPPED
    assert not process.was_cut_off.is_set()


def in_work_until_cut_off(process: Process) -> None:
    """Calls that end when they are cut off, as real ones do."""
    process.slots.in_work_count, process.listener.is_settled = 2, False
    cut_off = process._cut_off

    def cut_off_and_end() -> None:
        cut_off()
        process.slots.in_work_count, process.listener.is_settled = 0, True

    process._cut_off = cut_off_and_end  # type: ignore[method-assign]


def test_what_outlasts_the_grace_is_cut_off_and_given_back_and_that_is_a_stop_too(process: Process) -> None:
    process.grace_s = 0.1
    in_work_until_cut_off(process)
    process.started()
    process.stop()
    assert process.ended() is ExitCode.STOPPED
    assert process.was_cut_off.is_set()
    assert process.deadlines.is_ended(Bounded.MODEL_CALL)
    assert process.journal.index("cut off") < process.journal.index("stop slots")


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_r60_a_second_signal_goes_straight_to_cutting_off(process: Process, second: int) -> None:
    in_work_until_cut_off(process)
    process.started()
    process.stop()
    process.wait_for("drain listener")
    began_at = monotonic()
    process.stop(second)
    process.stop(signal.SIGTERM)
    assert process.ended() is ExitCode.STOPPED
    assert monotonic() - began_at < PROMPT_S
    assert process.journal.count("cut off") == 1


def test_what_was_cut_off_and_cannot_be_given_back_in_time_ends_with_75(process: Process) -> None:
    process.grace_s, process.cut_off_limit_s = 0.0, 0.2
    process.slots.in_work_count = 1
    process.started()
    process.stop()
    assert process.ended() is ExitCode.NOT_SETTLED == 75
    assert process.journal[-1] == "close metrics-reporter"


def test_model_calls_end_at_a_cut_off_and_a_broker_call_has_a_second_once_stop_was_asked(process: Process) -> None:
    process.started()
    cut: list[str] = []
    with (
        process.deadlines.bound(Bounded.BROKER_CALL, 30.0, lambda: cut.append("broker")),
        process.deadlines.bound(Bounded.MODEL_CALL, 30.0, lambda: cut.append("model")),
    ):
        process.slots.in_work_count = 1
        process.stop()
        ends_at, look_again = monotonic() + LONG_TIMEOUT_S, threading.Event()
        while not cut and monotonic() < ends_at:
            look_again.wait(0.01)
        assert cut == ["broker"]
        process.stop()
        process.was_cut_off.wait(LONG_TIMEOUT_S)
        while len(cut) < 2 and monotonic() < ends_at:
            look_again.wait(0.01)
        assert cut == ["broker", "model"]
    process.slots.in_work_count = 0
    process.ended()


def test_what_runs_out_of_time_is_cut_while_nothing_stops(process: Process) -> None:
    process.started()
    cut = threading.Event()
    with process.deadlines.bound(Bounded.SIDE_CALL, 0.01, cut.set):
        assert cut.wait(LONG_TIMEOUT_S)


@pytest.mark.parametrize("stuck", ["rmq-listener", "health-checker"])
def test_a_service_that_is_stuck_does_not_keep_the_process(process: Process, stuck: str) -> None:
    release = threading.Event()
    service = next(each for each in process.services if each.name == stuck)
    service.in_tick = lambda: release.wait(LONG_TIMEOUT_S)
    process.started()
    began_at = monotonic()
    process.stop()
    assert process.ended() is ExitCode.STOPPED
    release.set()
    assert monotonic() - began_at < PROMPT_S * 2


# -- threads that die -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", ["rmq-listener", "health-checker", "metrics-reporter"])
@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError(), RecursionError()])
def test_r63_r64_a_service_that_dies_ends_the_process_with_70_and_its_traceback_is_logged(
    process: Process, caplog: pytest.LogCaptureFixture, dead: str, error: Exception
) -> None:
    service = next(each for each in process.services if each.name == dead)

    def die() -> None:
        raise error

    service.in_tick = die
    process.start()
    assert process.ended() is ExitCode.SERVICE_DIED == 70
    (entry,) = [entry for entry in caplog.records if getattr(entry, "event", "") == "service_died"]
    assert (entry.levelno, entry.service) == (logging.CRITICAL, dead)  # type: ignore[attr-defined]
    assert entry.exc_info is not None
    assert {f"close {each.name}" for each in process.services if each.name != dead} <= set(process.journal)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_service_that_ends_by_what_is_no_exception_is_dead_too(process: Process) -> None:
    process.health.in_tick = lambda: (_ for _ in ()).throw(SystemExit)
    process.start()
    assert process.ended() is ExitCode.SERVICE_DIED


def test_a_helper_that_dies_ends_the_process_with_70_and_is_named(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    process.started()
    process.are_helpers_alive = False
    assert process.ended() is ExitCode.SERVICE_DIED
    (entry,) = [entry for entry in caplog.records if getattr(entry, "event", "") == "service_died"]
    assert (entry.levelno, entry.service) == (logging.CRITICAL, "stream-writer")  # type: ignore[attr-defined]


def test_a_slot_that_dies_ends_the_process_with_70(process: Process) -> None:
    process.started()
    process.slots.are_alive = False
    assert process.ended() is ExitCode.SERVICE_DIED


@pytest.mark.parametrize("when", ["while draining", "in close"])
def test_a_service_that_dies_after_a_stop_was_asked_is_a_bug_all_the_same(process: Process, when: str) -> None:
    def die() -> None:
        raise RuntimeError("a bug")

    process.started()
    if when == "in close":
        process.listener.in_close = die
    else:
        process.slots.in_work_count = 1
        process.listener.in_tick = die
        process._cut_off = lambda: setattr(process.slots, "in_work_count", 0)  # type: ignore[method-assign]
        process.supervisor._cut_off = process._cut_off
    process.stop()
    assert process.ended() is ExitCode.SERVICE_DIED


def test_when_the_listener_is_dead_nobody_waits_for_what_it_has_to_settle(process: Process) -> None:
    process.listener.is_settled = False
    process.listener.in_tick = lambda: 1 / 0
    began_at = monotonic()
    process.start()
    assert process.ended() is ExitCode.SERVICE_DIED
    assert monotonic() - began_at < PROMPT_S


# -- what /healthz is told --------------------------------------------------------------------------------------------


def test_alive_is_every_thread_alive_and_ticking(process: Process) -> None:
    process.started()
    assert process.supervisor.is_alive()
    process.slots.are_alive = False
    assert not process.supervisor.is_alive()
    process.ended()
    process.slots.are_alive = True
    assert not process.supervisor.is_alive()


def test_a_thread_whose_turn_lasts_too_long_is_not_alive_one_that_waits_for_its_next_is(process: Process) -> None:
    """An hour between two probes is no standstill."""
    process.health.wait_s = 3600.0
    process.started()
    threads = (process.supervisor._listener, process.supervisor._health)
    listener, health = threads
    ends_at, look_again = monotonic() + LONG_TIMEOUT_S, threading.Event()
    while health.stuck_at < monotonic() + 3600 and monotonic() < ends_at:
        look_again.wait(0.01)
    assert health.stuck_at > monotonic() + 3600
    assert process.supervisor.is_alive()
    listener.stuck_at = monotonic() - 1.0
    assert not process.supervisor.is_alive()


# -- the process's own signals ----------------------------------------------------------------------------------------


def test_r61_a_signal_puts_its_number_on_the_queue_and_nothing_else() -> None:
    from inference_worker.__main__ import listen_for_signals

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        signals = listen_for_signals()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        received = [signals.get(timeout=LONG_TIMEOUT_S) for _ in range(3)]
        assert sorted(received) == sorted([signal.SIGTERM, signal.SIGINT, signal.SIGTERM])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_r67_off_the_main_thread_no_handler_is_set_and_the_worker_runs(process: Process) -> None:
    from inference_worker.__main__ import listen_for_signals

    handler = signal.getsignal(signal.SIGTERM)
    made: list[SimpleQueue[int]] = []
    thread = threading.Thread(target=lambda: made.append(listen_for_signals()))
    thread.start()
    thread.join(LONG_TIMEOUT_S)
    assert signal.getsignal(signal.SIGTERM) is handler
    process.signals = made[0]
    process.started()
    process.stop()
    assert process.ended() is ExitCode.STOPPED
