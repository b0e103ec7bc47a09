"""The picture of a soak: memory, threads and descriptors of the worker that lived through it, in minutes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median_low

from .processes_seen import slope, windows
from .svg_sheet import AXIS_HEIGHT, LEFT, TITLE_HEIGHT, Axes, draw_title, sheet, step_s_of

_PLOT_HEIGHT, _CAPTION_HEIGHT, _GAP = 110, 22, 14
_STYLE = (
    ".half{fill:#eaf2fe}"
    ".seen{stroke:#24292f;stroke-width:1.2;fill:none;stroke-linejoin:round}"
    ".measured{stroke:#cf222e;stroke-width:1.6;fill:none}"
)
#: between two marks of an axis; less than 5 would blow up what is none of our business, such as a page of memory
_STEPS = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_MOST_STEPS = 4

#: (minute, RSS in MB, threads, descriptors), see processes_seen.to_rows
Row = Sequence[float]
_Points = list[tuple[float, float]]


@dataclass(frozen=True)
class _Plot:
    """What was seen of one number, and what was measured of it in the last half."""

    caption: str
    seen: _Points
    measured: _Points
    marks: range
    unit: str = ""


def draw(rows: Sequence[Row]) -> str:
    """Draw the samples of one process, one at least."""
    times_s = [row[0] * 60 for row in rows]
    parts = windows(times_s)
    half_s = times_s[parts[0].start], times_s[-1]
    plots = _plots(rows, times_s, parts)
    drawn: list[str] = []
    draw_title(drawn, "The worker that lived through the soak; shaded: the last half, which is measured", top=0)
    bottom = TITLE_HEIGHT - _GAP
    for plot in plots:
        bottom = _draw_plot(drawn, plot, half_s, top=bottom + _GAP, is_last=plot is plots[-1])
    return sheet(drawn, height=bottom + AXIS_HEIGHT, style=_STYLE)


def _plots(rows: Sequence[Row], times_s: Sequence[float], parts: Sequence[range]) -> list[_Plot]:
    memory, threads, descriptors = (
        [(time_s, row[column]) for time_s, row in zip(times_s, rows, strict=True)] for column in (1, 2, 3)
    )
    last_half = memory[parts[0].start :]
    per_hour = slope([(time_s / 3600, megabytes) for time_s, megabytes in last_half])
    marks = _marks(min(row[1] for row in rows), max(row[1] for row in rows))
    low = f"; the axis begins at {marks[0]} MB" if marks[0] else ""
    memory_caption = f"Memory (RSS); red: its least-squares line, {per_hour:+.2f} MB an hour{low}"
    plots = [_Plot(memory_caption, memory, _least_squares(last_half), marks, " MB")]
    for name, points in (("Threads", threads), ("Descriptors (files and connections)", descriptors)):
        caption = f"{name}; red: the median of each five minutes"
        plots.append(_Plot(caption, points, _levels(points, parts), _marks(0, max(number for _, number in points))))
    return plots


def _least_squares(points: _Points) -> _Points:
    """Return both ends of the line."""
    per_s = slope(points)
    middle_s = sum(time_s for time_s, _ in points) / len(points)
    middle = sum(value for _, value in points) / len(points)
    return [(time_s, middle + per_s * (time_s - middle_s)) for time_s in (points[0][0], points[-1][0])]


def _levels(points: _Points, parts: Sequence[range]) -> _Points:
    """Return the corners of the steps from level to level."""
    corners = []
    for part in parts:
        level = median_low(points[index][1] for index in part)
        # up to where the next one begins
        end = min(part.stop, len(points) - 1)
        corners += [(points[part.start][0], level), (points[end][0], level)]
    return corners


def _marks(lowest: float, highest: float) -> range:
    """Return the marks of an axis that has room for both."""
    step = next(step for step in _STEPS if highest // step + 1 - lowest // step <= _MOST_STEPS)
    return range(int(lowest // step) * step, (int(highest // step) + 1) * step + 1, step)


def _draw_plot(drawn: list[str], plot: _Plot, half_s: tuple[float, float], *, top: int, is_last: bool) -> int:
    """Draw a plot below its caption; return where it ends."""
    last = max(1, ceil(half_s[1]))
    drawn.append(f'<text x="{LEFT}" y="{top + 14}">{plot.caption}</text>')
    top += _CAPTION_HEIGHT
    bottom = top + _PLOT_HEIGHT
    axes = Axes(drawn, first=0, last=last, low=plot.marks[0], full=plot.marks[-1], top=top, height=_PLOT_HEIGHT)
    begin, end = map(axes.x, half_s)
    drawn.append(f'<rect class="half" x="{begin}" y="{top}" width="{end - begin:.1f}" height="{_PLOT_HEIGHT}"/>')
    axes.draw_times(y=bottom, step_s=max(60, step_s_of(last)), unit="min", divisor=60, are_named=is_last)
    axes.draw_values(plot.marks, unit=plot.unit)
    axes.draw_line(plot.seen, look="seen")
    axes.draw_line(plot.measured, look="measured")
    return bottom
