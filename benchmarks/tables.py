"""Tables, and how numbers are written in them. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.stats import Spread

#: what is shown where nothing was measured
NOTHING = "-"
_LINE_LENGTH = 120


@dataclass(frozen=True)
class Table:
    """One table with its heading and what has to be known to read it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    how: str = ""

    def to_markdown(self) -> str:
        """Write it for the document."""
        lines = [
            f"## {self.title}",
            "",
            *([textwrap.fill(self.how, _LINE_LENGTH, break_on_hyphens=False), ""] if self.how else []),
        ]
        lines.append("| " + " | ".join(self.columns) + " |")
        lines.append("|---" + "|---:" * (len(self.columns) - 1) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, ""])

    def to_text(self) -> str:
        """Write it for the terminal."""
        rows = [list(self.columns), *map(list, self.rows)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.columns))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.title, *("  " + line for line in lines), ""])


def with_spread(value: Spread | None, write: Callable[[float], str]) -> str:
    """Write the median, and the least and the greatest of several rounds behind it."""
    if value is None:
        return NOTHING
    if value.count == 1:
        return write(value.median)
    return f"{write(value.median)} ({write(value.low)}–{write(value.high)})"


def milliseconds(seconds: float) -> str:
    """0.000702 -> 0.70 ms's number; more digits for what is small, fewer for what is large."""
    value = seconds * 1000
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def seconds(value: float) -> str:
    """Two digits behind the point."""
    return f"{value:.2f}"


def ratio(value: float) -> str:
    """Two digits behind the point."""
    return f"{value:.2f}"


def percent(value: float) -> str:
    """A share of 1 as a percentage."""
    return f"{value * 100:.1f} %"


def megabytes(value: float) -> str:
    """Bytes as MB, which are 10^6 bytes."""
    return f"{value / 1e6:.2f}" if abs(value) < 10e6 else f"{value / 1e6:.1f}"


def whole(value: float) -> str:
    """A number without a point."""
    return f"{value:,.0f}"
