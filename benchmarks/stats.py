"""Medians, spreads, percentiles and paired ratios. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """What some rounds gave."""

    median: float
    low: float
    high: float
    #: rounds
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Sum up at least one value.

    Raises:  ValueError for none
    """
    if not values:
        raise ValueError("no values")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of all values do not exceed (nearest rank: a measured one).

    Raises:  ValueError for no values, or for a percentage outside (0, 100]
    """
    if not values or not 0 < percent <= 100:
        raise ValueError("no values, or no percentage")
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def paired_ratios(numerators: Mapping[int, float], denominators: Mapping[int, float]) -> list[float]:
    """Return the ratio of each round that both have, in order: what slowed a round down slowed both."""
    rounds = sorted(numerators.keys() & denominators.keys())
    return [numerators[number] / denominators[number] for number in rounds if denominators[number]]
