"""Calls are cut when their time is over, once, and never after they have ended."""

from __future__ import annotations

from time import monotonic

from inference_worker.deadlines import Bounded, Deadlines

CALL, BROKER = Bounded.MODEL_CALL, Bounded.BROKER_CALL


class Cut:
    """Counts how often it was called."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def test_a_call_is_cut_when_its_time_is_over_and_once() -> None:
    deadlines, cut = Deadlines(), Cut()
    with deadlines.bound(CALL, 5.0, cut):
        began_at = monotonic()
        deadlines.cut_overdue(began_at + 4.0)
        assert cut.count == 0
        deadlines.cut_overdue(began_at + 5.1)
        deadlines.cut_overdue(began_at + 6.0)
    assert cut.count == 1


def test_a_call_is_cancelled_by_its_name_and_knows_it() -> None:
    deadlines, mine, other, nameless = Deadlines(), Cut(), Cut(), Cut()
    with (
        deadlines.bound(CALL, 5.0, mine, name="r-1") as my_bound,
        deadlines.bound(CALL, 5.0, other, name="r-2") as other_bound,
        deadlines.bound(CALL, 5.0, nameless),
    ):
        assert deadlines.running_names() == {"r-1", "r-2"}
        deadlines.cancel({"r-1", "r-3"})
        deadlines.cancel({"r-1"})
        assert (mine.count, other.count, nameless.count) == (1, 0, 0)
        assert (my_bound.was_cancelled, other_bound.was_cancelled) == (True, False)
        # a cancelled call is over: there is nothing to ask about it
        assert deadlines.running_names() == {"r-2"}
    assert deadlines.running_names() == set()


def test_a_call_whose_time_is_over_is_not_cancelled_as_well() -> None:
    deadlines, cut = Deadlines(), Cut()
    with deadlines.bound(CALL, 5.0, cut, name="r-1") as bound:
        deadlines.cut_overdue(monotonic() + 6.0)
        deadlines.cancel({"r-1"})
        assert (cut.count, bound.was_cancelled) == (1, False)


def test_a_call_that_has_ended_is_not_cut() -> None:
    deadlines, cut = Deadlines(), Cut()
    with deadlines.bound(CALL, 5.0, cut):
        pass
    deadlines.cut_overdue(monotonic() + 100.0)
    assert cut.count == 0


def test_a_call_that_raises_leaves_the_register() -> None:
    deadlines, cut = Deadlines(), Cut()
    try:
        with deadlines.bound(CALL, 5.0, cut):
            raise OSError
    except OSError:
        deadlines.cut_overdue(monotonic() + 100.0)
    assert cut.count == 0


def test_a_shortened_kind_ends_sooner_those_that_run_included_and_never_later() -> None:
    deadlines, long, short, other = Deadlines(), Cut(), Cut(), Cut()
    with (
        deadlines.bound(BROKER, 30.0, long),
        deadlines.bound(BROKER, 0.5, short),
        deadlines.bound(CALL, 30.0, other),
    ):
        deadlines.shorten(BROKER, 1.0)
        began_at = monotonic()
        deadlines.cut_overdue(began_at + 0.7)
        assert (long.count, short.count) == (0, 1)
        deadlines.cut_overdue(began_at + 1.1)
        assert (long.count, short.count, other.count) == (1, 1, 0)
    late = Cut()
    with deadlines.bound(BROKER, 30.0, late):
        deadlines.cut_overdue(monotonic() + 1.1)
    assert late.count == 1


def test_an_ended_kind_is_cut_now_and_whatever_begins_later_too() -> None:
    deadlines, running, late, other = Deadlines(), Cut(), Cut(), Cut()
    with deadlines.bound(CALL, 30.0, running), deadlines.bound(BROKER, 30.0, other):
        assert not deadlines.is_ended(CALL)
        deadlines.end(CALL)
        assert running.count == 1
        assert other.count == 0
    assert deadlines.is_ended(CALL)
    assert not deadlines.is_ended(BROKER)
    with deadlines.bound(CALL, 30.0, late):
        deadlines.cut_overdue(monotonic())
        assert late.count == 1
