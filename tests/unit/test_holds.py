"""The set of holds owns the suspend event, whatever is raised and lifted, and in which order."""

from __future__ import annotations

import logging
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.holds import HoldName, Holds

BUSY, SUSPECT, UNHEALTHY = HoldName.MODEL_BUSY, HoldName.MODEL_SUSPECT, HoldName.MODEL_UNHEALTHY


@given(st.lists(st.tuples(st.sampled_from(HoldName), st.booleans())))
def test_suspended_means_that_a_hold_is_raised(changes: list[tuple[HoldName, bool]]) -> None:
    holds, raised = Holds(), set()
    for name, is_raised in changes:
        if is_raised:
            holds.raise_hold(name, "why")
            raised.add(name)
        else:
            holds.lift(name)
            raised.discard(name)
        assert holds.suspended.is_set() == bool(raised)
        assert {hold.name for hold in holds.snapshot()} == raised
        assert all(holds.is_raised(each) == (each in raised) for each in HoldName)


def test_watchers_hear_of_every_change_and_of_no_repeat() -> None:
    holds, heard = Holds(), []
    holds.watch(lambda: heard.append("a"), lambda: heard.append("b"))
    holds.raise_hold(SUSPECT, "why")
    assert heard == ["a", "b"]
    holds.raise_hold(SUSPECT, "another reason")
    assert heard == ["a", "b"]
    holds.lift(SUSPECT)
    holds.lift(SUSPECT)
    assert heard == ["a", "b"] * 2


def test_watchers_hear_when_a_hold_will_end_at_another_time() -> None:
    """The health thread lifts it, and may be asleep until the time that was."""
    holds, heard = Holds(), []
    holds.watch(lambda: heard.append("woken"))
    holds.raise_hold(HoldName.PUBLISH_REFUSED, "no confirm", for_s=30.0)
    holds.raise_hold(HoldName.PUBLISH_REFUSED, "no confirm", for_s=1.0)
    assert heard == ["woken"] * 2


def test_a_pause_ends_when_its_time_is_over_and_others_stay() -> None:
    holds = Holds()
    began_at = monotonic()
    holds.raise_hold(BUSY, "429", for_s=10.0)
    holds.raise_hold(UNHEALTHY, "refused")
    left_s = holds.expire(began_at)
    assert left_s == pytest.approx(10.0, abs=1.0)
    assert holds.expire(began_at + 11.0) is None
    assert [hold.name for hold in holds.snapshot()] == [UNHEALTHY]
    assert holds.suspended.is_set()


def test_a_pause_raised_anew_while_it_expires_is_not_lifted() -> None:
    """Between the look at the clock and the lifting, a slot may raise it again for longer."""
    holds = Holds()
    holds.raise_hold(BUSY, "429", for_s=0.0)
    holds.raise_hold(SUSPECT, "500", for_s=0.0)
    now = monotonic() + 1.0

    def raise_again() -> None:
        if not holds.is_raised(SUSPECT) or not holds.is_raised(BUSY):
            other = BUSY if holds.is_raised(BUSY) else SUSPECT
            holds.watch()
            holds.raise_hold(other, "again", for_s=60.0)

    holds.watch(raise_again)
    holds.expire(now)
    assert len(holds.snapshot()) == 1
    assert holds.suspended.is_set()


def test_a_hold_keeps_the_time_it_was_first_raised_and_tells_the_last_reason() -> None:
    holds = Holds()
    holds.raise_hold(SUSPECT, "first")
    since = holds.snapshot()[0].since
    holds.raise_hold(SUSPECT, "second")
    (hold,) = holds.snapshot()
    assert (hold.since, hold.detail) == (since, "second")


def test_changes_are_logged_and_repeats_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    holds = Holds()
    for _ in range(5):
        holds.raise_hold(UNHEALTHY, "refused")
    holds.lift(UNHEALTHY)
    events = [(entry.event, entry.hold) for entry in caplog.records]  # type: ignore[attr-defined]
    assert events == [("hold_raised", "model_unhealthy"), ("hold_lifted", "model_unhealthy")]
