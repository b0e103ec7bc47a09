"""Medians, percentiles and paired ratios of the benchmark."""

from __future__ import annotations

import pytest

from benchmarks.results import Results, in_turn
from benchmarks.stats import Spread, paired_ratios, percentile, spread


def test_a_spread_is_the_median_between_the_least_and_the_greatest() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)


def test_nothing_has_no_spread() -> None:
    with pytest.raises(ValueError):
        spread([])


@pytest.mark.parametrize(
    ("percent", "expected"), [(50, 50.0), (99, 99.0), (99.5, 100.0), (100, 100.0), (1, 1.0), (0.1, 1.0)]
)
def test_a_percentile_is_a_measured_value(percent: float, expected: float) -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, percent) == expected


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 101)])
def test_a_percentile_of_nothing_or_of_no_percentage_is_refused(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError):
        percentile(values, percent)


def test_ratios_are_taken_within_a_round() -> None:
    # round 1 was slow for both, round 2 is missing on one side
    assert paired_ratios({0: 2.0, 1: 20.0, 2: 5.0}, {0: 1.0, 1: 10.0, 3: 1.0}) == [2.0, 2.0]


def test_each_round_begins_with_another_contender() -> None:
    turns = [in_turn("abc", number) for number in range(4)]
    assert turns == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_results_are_read_back_as_they_were() -> None:
    results = Results()
    results.add("throughput", "bare loop", "prefetch 1", 0, wall_s=0.5, cpu_s=None)
    results.add("throughput", "bare loop", "prefetch 1", 1, wall_s=0.7)
    results.notes.append("a note")
    results.facts["CPU"] = "one"
    again = Results.decode(results.encode())
    assert again.rounds("throughput", "bare loop", "prefetch 1", "wall_s") == {0: 0.5, 1: 0.7}
    assert again.spread("throughput", "bare loop", "prefetch 1", "cpu_s") is None
    assert (again.notes, again.facts) == (results.notes, results.facts)
