"""Probes and reports, and the holds that follow from them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic

import pytest

from inference_worker.disposition import Interrupted, ModelError, Unavailable
from inference_worker.errors import HttpTimeout, HttpUnreachable, StoreDown, StoreLoginRefused
from inference_worker.health_checker import HealthChecker, HealthSettings
from inference_worker.holds import HoldName, Holds
from inference_worker.model_client import ModelReply, Sign
from tests.fakes.steps import WELL
from tests.timeouts import LONG_TIMEOUT_S

UNHEALTHY, SUSPECT, BUSY = HoldName.MODEL_UNHEALTHY, HoldName.MODEL_SUSPECT, HoldName.MODEL_BUSY
STORE_DOWN = HoldName.RESULT_STORE_DOWN
INTERVAL_S, RETRY_DELAY_S = 60.0, 10.0
REFUSED = ModelReply(Unavailable("refused"), Sign.UNREACHABLE, "refused")
LEAVING = ModelReply(Unavailable("aborted"), Sign.LEAVING, "aborted")
FAILED = ModelReply(ModelError(500, "x", None), Sign.SUSPECT, "the model answered 500")


def busy(retry_after_s: float | None = None) -> ModelReply:
    return ModelReply(Unavailable("429"), Sign.BUSY, "the model answered 429", retry_after_s)


class Neighbours:
    """A model's /health and a Redis, as they are told to be."""

    def __init__(self) -> None:
        self.status: int | Exception = 200
        self.store_error: StoreDown | None = None
        self.model_probes = self.store_probes = 0
        #: called in the middle of a probe of the model
        self.meanwhile: Callable[[], None] = lambda: None
        self.holds = Holds()
        self.checker = HealthChecker(
            HealthSettings(INTERVAL_S, RETRY_DELAY_S),
            holds=self.holds,
            probe_model=self.probe_model,
            probe_store=self.probe_store,
        )

    def probe_model(self) -> int:
        self.model_probes += 1
        self.meanwhile()
        if isinstance(self.status, Exception):
            raise self.status
        return self.status

    def probe_store(self) -> None:
        self.store_probes += 1
        if self.store_error is not None:
            raise self.store_error

    def tick(self, after_s: float = 0.0) -> float:
        return self.checker.tick(monotonic() + after_s)

    @property
    def raised(self) -> set[HoldName]:
        return {hold.name for hold in self.holds.snapshot()}


@pytest.fixture
def fresh() -> Neighbours:
    """Before the first turn."""
    return Neighbours()


@pytest.fixture
def well(fresh: Neighbours) -> Neighbours:
    """After a first turn in which all was well."""
    fresh.tick()
    assert fresh.raised == set()
    return fresh


# -- the start --------------------------------------------------------------------------------------------------------


def test_nothing_is_consumed_before_the_first_good_probe_and_the_first_good_write(fresh: Neighbours) -> None:
    assert fresh.raised == {UNHEALTHY, STORE_DOWN}
    assert not fresh.checker.snapshot.healthy
    fresh.status, fresh.store_error = HttpUnreachable("refused"), StoreDown("no connection")
    fresh.tick()
    assert fresh.raised == {UNHEALTHY, STORE_DOWN}
    fresh.status = 200
    fresh.tick(INTERVAL_S + 1)
    assert fresh.raised == {STORE_DOWN}
    fresh.store_error = None
    fresh.tick(RETRY_DELAY_S + 1)
    assert fresh.raised == set()
    assert fresh.checker.snapshot.healthy


@pytest.mark.parametrize("status", [503, 500, 404, 301, 204, HttpUnreachable("refused"), HttpTimeout("slow")])
def test_healthy_is_200_and_nothing_else(well: Neighbours, status: int | Exception) -> None:
    well.status = status
    well.tick(INTERVAL_S + 1)
    assert well.raised == {UNHEALTHY}
    assert not well.checker.snapshot.healthy
    well.status = 200
    well.tick(2 * INTERVAL_S + 2)
    assert well.raised == set()


def test_the_model_is_probed_once_an_interval(well: Neighbours) -> None:
    wait_s = well.tick()
    assert well.model_probes == 1
    assert wait_s == pytest.approx(INTERVAL_S, abs=1.0)
    well.tick(INTERVAL_S + 0.1)
    assert well.model_probes == 2


def test_the_store_is_probed_only_while_it_is_held(well: Neighbours) -> None:
    well.tick(INTERVAL_S + 1)
    assert well.store_probes == 1


# -- a model that is away or ill --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reply", "hold"), [(REFUSED, UNHEALTHY), (LEAVING, UNHEALTHY), (FAILED, SUSPECT)])
def test_a_bad_call_stops_the_consuming_at_once_and_asks_for_a_probe_now(
    well: Neighbours, reply: ModelReply, hold: HoldName
) -> None:
    well.checker.wakeup.clear()
    well.checker.report(reply)
    assert well.raised == {hold}
    assert well.checker.wakeup.is_set()
    well.tick()
    assert well.model_probes == 2


def test_a_good_probe_lifts_what_a_refused_call_raised(well: Neighbours) -> None:
    well.checker.report(REFUSED)
    well.tick()
    assert well.raised == set()


def test_a_model_that_is_going_away_is_held_for_a_second_whatever_its_probe_says(well: Neighbours) -> None:
    well.checker.report(LEAVING)
    wait_s = well.tick()
    assert well.raised == {UNHEALTHY}
    assert 0 < wait_s <= 1.0


def test_r52_the_hold_grows_up_to_the_interval_while_the_probe_says_healthy_and_calls_are_refused(
    well: Neighbours,
) -> None:
    waits_s = []
    for _ in range(8):
        well.checker.report(REFUSED)
        wait_s = well.tick()
        waits_s.append(wait_s if UNHEALTHY in well.raised else 0.0)
        well.holds.lift(UNHEALTHY)
    assert waits_s == pytest.approx([0, 1, 2, 4, 8, 16, 32, INTERVAL_S], abs=0.5)


def test_calls_of_many_slots_that_fail_at_once_count_as_one(well: Neighbours) -> None:
    for _ in range(16):
        well.checker.report(REFUSED)
    well.tick()
    assert well.raised == set()


def test_an_answered_call_ends_the_row_of_refused_ones(well: Neighbours) -> None:
    for _ in range(4):
        well.checker.report(REFUSED)
        well.holds.lift(UNHEALTHY)
    well.checker.report(WELL)
    well.checker._unhealthy_until = float("-inf")
    well.checker.report(REFUSED)
    well.tick()
    assert well.raised == set()


@pytest.mark.parametrize("reply", [REFUSED, FAILED])
def test_a_probe_that_began_before_the_report_proves_nothing(well: Neighbours, reply: ModelReply) -> None:
    """Its answer may be older than the call that failed: the hold stays until a later probe has answered."""
    well.meanwhile = lambda: well.checker.report(reply)
    wait_s = well.tick(INTERVAL_S + 1)
    assert well.raised != set()
    assert wait_s == 0.0
    well.meanwhile = lambda: None
    well.tick()
    assert well.raised == set()


def test_a_good_probe_before_a_retry_changes_nothing(well: Neighbours) -> None:
    assert well.checker.confirm_model()
    assert well.raised == set()


def test_a_bad_probe_before_a_retry_holds_and_asks_for_a_probe_of_the_health_thread(well: Neighbours) -> None:
    well.checker.wakeup.clear()
    well.status = HttpUnreachable("refused")
    assert not well.checker.confirm_model()
    assert well.raised == {SUSPECT}
    assert well.checker.wakeup.is_set()
    well.tick()
    assert well.raised == {UNHEALTHY}


def test_a_suspect_model_that_fails_its_probe_is_unhealthy(well: Neighbours) -> None:
    well.checker.report(FAILED)
    well.status = HttpUnreachable("refused")
    well.tick()
    assert well.raised == {UNHEALTHY}


def test_a_call_that_we_ended_ourselves_says_nothing_of_the_model(well: Neighbours) -> None:
    well.checker.report(ModelReply(Interrupted("cut_off"), Sign.NONE))
    assert well.raised == set()


# -- a busy model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retry_after_s", "hold_s"), [(None, 1), (0.0, 1), (-1.0, 1), (30.0, 30), (120.0, 60), (1e9, 60), (0.5, 1)]
)
def test_r50_a_busy_model_is_held_for_its_retry_after_within_1_and_60_s(
    well: Neighbours, retry_after_s: float | None, hold_s: float
) -> None:
    began_at = monotonic()
    well.checker.report(busy(retry_after_s))
    assert well.raised == {BUSY}
    (hold,) = well.holds.snapshot()
    assert hold.until is not None
    assert hold.until - began_at == pytest.approx(hold_s, abs=0.5)


def test_r50_the_pause_grows_while_the_model_names_none_and_begins_anew_after_an_answer(well: Neighbours) -> None:
    def pause_s() -> float:
        began_at = monotonic()
        well.checker.report(busy())
        (hold,) = well.holds.snapshot()
        assert hold.until is not None
        well.holds.lift(HoldName.MODEL_BUSY)
        return hold.until - began_at

    assert [pause_s() for _ in range(8)] == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60], abs=0.5)
    well.checker.report(WELL)
    assert pause_s() == pytest.approx(1, abs=0.5)


def test_r50_a_burst_of_busy_answers_is_one_pause(well: Neighbours) -> None:
    began_at = monotonic()
    for _ in range(16):
        well.checker.report(busy())
    (hold,) = well.holds.snapshot()
    assert hold.until is not None
    assert hold.until - began_at == pytest.approx(1, abs=0.5)


def test_r50_a_shorter_retry_after_does_not_end_a_longer_pause(well: Neighbours) -> None:
    began_at = monotonic()
    well.checker.report(busy(40.0))
    well.checker.report(busy(5.0))
    (hold,) = well.holds.snapshot()
    assert hold.until is not None
    assert hold.until - began_at == pytest.approx(40, abs=0.5)


def test_r50_no_retry_after_makes_the_health_thread_sleep_or_spin(well: Neighbours) -> None:
    well.checker.report(busy(1e9))
    assert 30.0 < well.tick() <= 60.0
    well.checker.report(busy(0.0))
    assert well.tick() > 0.5


def test_a_pause_that_is_over_is_lifted_by_the_health_thread(well: Neighbours) -> None:
    well.holds.raise_hold(BUSY, "429", for_s=0.01)
    well.holds.raise_hold(HoldName.PUBLISH_REFUSED, "no confirm", for_s=0.01)
    assert well.tick() <= 0.01
    look_again = threading.Event()
    ends_at = monotonic() + LONG_TIMEOUT_S
    while well.raised and monotonic() < ends_at:
        look_again.wait(0.01)
        well.tick()
    assert well.raised == set()


def test_a_good_probe_does_not_end_the_pause_of_a_busy_model(well: Neighbours) -> None:
    well.checker.report(busy(30.0))
    well.tick(INTERVAL_S + 1)
    assert well.raised == {BUSY}


# -- Redis ------------------------------------------------------------------------------------------------------------


def test_a_store_that_is_down_is_held_until_a_write_succeeds(well: Neighbours) -> None:
    well.store_error = StoreDown("no connection")
    well.checker.wakeup.clear()
    well.checker.report_store_down(well.store_error)
    assert well.raised == {STORE_DOWN}
    assert well.checker.wakeup.is_set()
    assert well.tick() == pytest.approx(RETRY_DELAY_S, abs=0.5)
    assert well.store_probes == 1
    well.tick(RETRY_DELAY_S + 1)
    assert well.store_probes == 2
    assert well.raised == {STORE_DOWN}
    well.store_error = None
    well.tick(RETRY_DELAY_S * 3)
    assert well.raised == set()


def test_the_pause_doubles_up_to_60_s_while_saves_fail_although_the_probe_succeeds(well: Neighbours) -> None:
    def pause_s() -> float:
        well.checker.report_store_down(StoreDown("OOM"))
        pause_s = well.tick()
        well.tick(RETRY_DELAY_S * 10)
        assert STORE_DOWN not in well.raised
        return pause_s

    assert [pause_s() for _ in range(5)] == pytest.approx([10, 20, 40, 60, 60], abs=1.0)
    well.checker.report_saved()
    assert pause_s() == pytest.approx(10, abs=1.0)


def test_failures_of_many_slots_in_one_outage_do_not_double_the_pause(well: Neighbours) -> None:
    for _ in range(8):
        well.checker.report_store_down(StoreDown("no connection"))
    assert well.tick() == pytest.approx(RETRY_DELAY_S, abs=1.0)


def test_r36_a_refused_login_is_said_once_at_error_until_it_works_again(
    well: Neighbours, caplog: pytest.LogCaptureFixture
) -> None:
    def errors() -> int:
        return sum(entry.levelno == logging.ERROR for entry in caplog.records)

    well.store_error = StoreLoginRefused("Redis refuses the login")
    well.checker.report_store_down(well.store_error)
    for turn in range(1, 4):
        well.tick((RETRY_DELAY_S + 1) * turn)
    assert errors() == 1
    well.store_error = None
    well.tick((RETRY_DELAY_S + 1) * 5)
    well.store_error = StoreLoginRefused("Redis refuses the login")
    well.checker.report_store_down(well.store_error)
    assert errors() == 2


def test_reports_of_many_threads_at_once_leave_no_hold_behind_when_all_is_well_again(well: Neighbours) -> None:
    barrier = threading.Barrier(8)

    def report() -> None:
        barrier.wait(LONG_TIMEOUT_S)
        for reply in (REFUSED, FAILED, WELL, LEAVING):
            well.checker.report(reply)
            well.checker.check_model()

    threads = [threading.Thread(target=report) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_TIMEOUT_S)
    well.checker._unhealthy_until = float("-inf")
    well.tick(INTERVAL_S + 1)
    assert well.raised == set()


# -- thresholds and stalls --------------------------------------------------------------------------------------------


def checker_with(
    statuses: list[int], *, tokens: list[float | None] | None = None, in_work_count: int = 0, **settings: float
) -> tuple[HealthChecker, Holds]:
    """A checker whose probes answer in turn, the last one for ever; Redis is fine."""
    holds = Holds()
    counts = list(tokens or [None])
    checker = HealthChecker(
        HealthSettings(INTERVAL_S, RETRY_DELAY_S, **settings),  # type: ignore[arg-type]
        holds=holds,
        probe_model=lambda: statuses.pop(0) if len(statuses) > 1 else statuses[0],
        probe_store=lambda: None,
        count_tokens=lambda: counts.pop(0) if len(counts) > 1 else counts[0],
        count_in_work=lambda: in_work_count,
    )
    return checker, holds


def unhealthy_after_each(checker: HealthChecker, holds: Holds, count: int) -> list[bool]:
    now, seen = monotonic(), []
    for number in range(count):
        checker.tick(now + number * 10_000)
        seen.append(holds.is_raised(HoldName.MODEL_UNHEALTHY))
    return seen


def test_r47_one_bad_probe_is_nothing_where_two_are_asked_for() -> None:
    checker, holds = checker_with([200, 503, 200, 503, 503, 200], failure_threshold=2)
    assert unhealthy_after_each(checker, holds, 6) == [False, False, False, False, True, False]


def test_consuming_begins_again_after_as_many_good_probes_as_are_asked_for() -> None:
    checker, holds = checker_with([200, 200, 503, 200, 503, 200, 200], success_threshold=2)
    assert unhealthy_after_each(checker, holds, 7) == [True, False, True, True, True, True, False]


def test_r47_a_model_that_stands_still_with_requests_in_work_is_unhealthy_until_it_moves() -> None:
    checker, holds = checker_with([200], tokens=[5.0, 5.0, 5.0, 6.0], in_work_count=1, stall_timeout_s=15_000.0)
    assert unhealthy_after_each(checker, holds, 4) == [False, False, True, False]
    assert checker.snapshot.healthy


def test_r47_without_a_stall_timeout_the_counters_are_not_read() -> None:
    checker, holds = checker_with([200], tokens=[5.0], in_work_count=1)
    checker._count_tokens = lambda: pytest.fail("read")
    assert unhealthy_after_each(checker, holds, 3) == [False, False, False]


def test_bad_probes_before_retries_use_no_threshold_up_and_hold_until_a_good_one() -> None:
    checker, holds = checker_with([200, 503, 503, 503, 503, 200], failure_threshold=3)
    checker.tick(monotonic())
    for _ in range(3):
        assert not checker.confirm_model()
    checker.tick(monotonic())
    assert [hold.name for hold in holds.snapshot()] == [HoldName.MODEL_SUSPECT]
    checker.tick(monotonic() + 10_000)
    assert holds.snapshot() == []
