"""What was measured, by figure, contender, case, measure and round. One thread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.stats import Spread, paired_ratios, spread


class Key(NamedTuple):
    """One series."""

    figure: str
    contender: str
    #: what was varied: "prefetch 8", "payload 10 MB"
    case: str
    #: with its unit: `wall_s`, `cpu_s`
    measure: str


class Results:
    """All series, the notes on what went wrong, and the facts about the run."""

    def __init__(self) -> None:
        self._series: dict[Key, dict[int, float]] = {}
        #: sentences for the reader: a contender that failed in a round, a figure left out
        self.notes: list[str] = []
        #: the machine, the versions, the effort
        self.facts: dict[str, str] = {}

    def add(self, figure: str, contender: str, case: str, number: int, **measures: float | None) -> None:
        """Enter what a round gave; None: it did not."""
        for measure, value in measures.items():
            if value is not None:
                self._series.setdefault(Key(figure, contender, case, measure), {})[number] = value

    def replace(self, other: Results, figure: str, case: str | None = None) -> None:
        """Take a figure, or one case of it, from another run; ours of that name goes."""

        def is_meant(key: Key) -> bool:
            return key.figure == figure and case in (None, key.case)

        kept = {key: rounds for key, rounds in self._series.items() if not is_meant(key)}
        taken = {key: rounds for key, rounds in other._series.items() if is_meant(key)}
        self._series = kept | taken

    def rounds(self, figure: str, contender: str, case: str, measure: str) -> dict[int, float]:
        """Return a series by round; empty when there is none."""
        return self._series.get(Key(figure, contender, case, measure), {})

    def spread(self, figure: str, contender: str, case: str, measure: str) -> Spread | None:
        """Sum a series up; None when there is none."""
        values = list(self.rounds(figure, contender, case, measure).values())
        return spread(values) if values else None

    def ratio(self, figure: str, case: str, measure: str, ours: str, theirs: str) -> Spread | None:
        """Sum up the ratios of two contenders, each within one round."""
        ratios = paired_ratios(self.rounds(figure, ours, case, measure), self.rounds(figure, theirs, case, measure))
        return spread(ratios) if ratios else None

    def figures(self) -> set[str]:
        """Name the figures that have any series."""
        return {key.figure for key in self._series}

    def cases(self, figure: str) -> list[str]:
        """Name a figure's cases in the order in which they were measured."""
        return list(dict.fromkeys(key.case for key in self._series if key.figure == figure))

    def contenders(self, figure: str, case: str | None = None) -> list[str]:
        """Name who took part, in the order in which they first did."""
        keys = [key for key in self._series if key.figure == figure and case in (None, key.case)]
        return list(dict.fromkeys(key.contender for key in keys))

    def encode(self) -> str:
        """Encode as JSON, so that a report can be written again without measuring again."""
        series = [[*key, sorted(rounds.items())] for key, rounds in self._series.items()]
        return json.dumps({"series": series, "notes": self.notes, "facts": self.facts}, indent=1)

    @classmethod
    def decode(cls, text: str) -> Results:
        """Read back what `encode` made."""
        document: dict[str, Any] = json.loads(text)
        results = cls()
        for *names, rounds in document["series"]:
            results._series[Key(*names)] = {int(number): float(value) for number, value in rounds}
        results.notes, results.facts = document["notes"], document["facts"]
        return results


def in_turn(items: Sequence[Any], number: int) -> list[Any]:
    """Return the items beginning with another one each round, so that none always runs first, on a cool machine."""
    if not items:
        return []
    start = number % len(items)
    return [*items[start:], *items[:start]]
