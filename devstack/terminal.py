"""What the demo shows: a progress bar, tables, marks. Plain lines where nobody watches (a CI log), no colours there."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

_BAR_WIDTH = 30
_CODES = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}


class Terminal:
    """One output stream. Owned by one thread."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        #: whether a person watches, so that a line may be drawn over
        self.interactive = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self._colours = self.interactive and not os.environ.get("NO_COLOR")

    def paint(self, text: str, colour: str) -> str:
        """Return the text in a colour, or as it is where there are none."""
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self._colours and colour in _CODES else text

    def line(self, text: str = "") -> None:
        """Print a line."""
        print(text, file=self.stream, flush=True)

    def heading(self, text: str) -> None:
        """Print a heading with an empty line before it."""
        self.line()
        self.line(self.paint(text, "bold"))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], *, colours: Sequence[str] = ()) -> None:
        """Print a table; columns of numbers are set to the right; `colours` has one for each row."""
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        right = [
            bool(rows) and all(row[column].replace(".", "").isdigit() or row[column] == "-" for row in rows)
            for column in range(len(header))
        ]

        def laid_out(row: Sequence[str]) -> str:
            cells = (
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(row, widths, right, strict=True)
            )
            return "  " + "  ".join(cells).rstrip()

        self.line(self.paint(laid_out(header), "dim"))
        for number, row in enumerate(rows):
            self.line(self.paint(laid_out(row), colours[number] if colours else ""))


class ProgressBar:
    """How many of so many are done. Drawn over itself where a person watches, else a line every tenth."""

    def __init__(self, terminal: Terminal, total: int, *, what: str) -> None:
        self._terminal = terminal
        self._total = total
        self._what = what
        self._shown = -1

    def show(self, done: int) -> None:
        """Bring it up to date."""
        if done == self._shown:
            return
        if self._terminal.interactive:
            filled = _BAR_WIDTH * done // self._total
            bar = self._terminal.paint("█" * filled, "green") + "░" * (_BAR_WIDTH - filled)
            end = "\n" if done == self._total else ""
            print(f"\r  {bar} {done} of {self._total} {self._what}", end=end, flush=True, file=self._terminal.stream)
        elif done == self._total or done // 10 > self._shown // 10:
            self._terminal.line(f"  {done} of {self._total} {self._what}")
        self._shown = done
