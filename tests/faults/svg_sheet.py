"""What our pictures of runs share, so that all look alike: the sheet, its titles, the axes. SVG made by hand. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

WIDTH, LEFT, RIGHT = 960, 150, 20
TITLE_HEIGHT, AXIS_HEIGHT = 34, 26
_SHEET_STYLE = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:12px;fill:#57606a}"
    ".title{font-size:15px;font-weight:600;fill:#24292f}"
    ".right{text-anchor:end}.middle{text-anchor:middle}"
    ".grid{stroke:#d0d7de;stroke-width:1}"
)


def sheet(parts: Sequence[str], *, height: int, style: str) -> str:
    """Return the whole picture; `style` is what it has beside texts and grid."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
        f'<style>{_SHEET_STYLE}{style}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def draw_title(parts: list[str], text: str, *, top: int) -> None:
    """Draw a title; what it is of begins TITLE_HEIGHT below its top."""
    parts.append(f'<text class="title" x="{LEFT}" y="{top + 20}">{escape(text)}</text>')


def step_s_of(seconds: float) -> int:
    """Return how many seconds apart the marks of an axis of time are."""
    return next(step for step in (30, 60, 120, 300, 600, 1200, 3600, 14400, 86400) if seconds / step <= 15)


class Axes:
    """Seconds to the right, from `first` to `last`; values upwards, from `low` to `full`. Nothing is drawn beyond."""

    def __init__(
        self, parts: list[str], *, first: int, last: int, low: float = 0, full: float, top: int, height: int
    ) -> None:
        self._parts, self._first, self._last = parts, first, last
        self._low, self._full = low, full
        self._top, self._height = top, height

    def x(self, second: float) -> float:
        inside = min(max(second, self._first), self._last)
        return round(LEFT + (inside - self._first) / (self._last - self._first) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        inside = min(max(value, self._low), self._full)
        return round(self._top + self._height * (1 - (inside - self._low) / (self._full - self._low)), 1)

    def draw_values(self, values: Iterable[int], *, unit: str = "") -> None:
        """Draw a line across for each value."""
        for value in values:
            y = self.y(value)
            self._parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            self._parts.append(f'<text class="right" x="{LEFT - 8}" y="{y + 4}">{value}{unit}</text>')

    def draw_times(self, *, y: float, step_s: int, unit: str, divisor: int, are_named: bool = True) -> None:
        """Draw a line down to y for each step, and what time it is."""
        first = -(-self._first // step_s) * step_s
        for second in range(first, self._last + 1, step_s):
            x = self.x(second)
            self._parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{self._top}" y2="{y}"/>')
            if are_named:
                text = f"{second // divisor} {unit}" if second == first else str(second // divisor)
                self._parts.append(f'<text class="middle" x="{x}" y="{y + 16}">{text}</text>')

    def draw_line(self, points: Iterable[tuple[float, float]], *, look: str) -> None:
        """Draw a line through points (second, value), looking like that class of the style."""
        corners = " ".join(f"{self.x(second)},{self.y(value)}" for second, value in points)
        self._parts.append(f'<polyline class="{look}" points="{corners}"/>')
