"""The picture of a run: requests per second, and every fault as a bar until all was well. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from .svg_sheet import AXIS_HEIGHT, LEFT, TITLE_HEIGHT, WIDTH, Axes, draw_title, sheet, step_s_of

_PLOT_HEIGHT, _LANE_HEIGHT, _GAP = 150, 20, 26
_STYLE = ".published{stroke:#24292f;stroke-width:1.2;fill:none}.answered{fill:#a8c7fa;stroke:none}"
#: (what a kind begins with, name of the lane, colour)
_LANES = (
    ("worker:", "worker", "#cf222e"),
    ("Croesus", "worker", "#cf222e"),
    ("worker's AMQP", "worker's AMQP link", "#bf8700"),
    ("worker's Redis", "worker's Redis link", "#8250df"),
    ("broker", "broker", "#953800"),
    ("Redis", "Redis", "#6639ba"),
    ("model", "model", "#1a7f37"),
)
#: the close-up: seconds before and after the begin of the fault
_BEFORE_S, _AFTER_S = 8, 40
_CLOSE_UP_OF = "broker: kill -9 and restart"
#: the shortest bar that can be seen
_MIN_BAR = 2.0


def lane_of(kind: str) -> tuple[str, str]:
    """Return the lane of a kind of fault, and its colour."""
    return next((name, colour) for start, name, colour in _LANES if kind.startswith(start))


def draw(document: dict[str, Any]) -> str:
    """Draw a run: all of it, and a close-up of one fault."""
    origin = int(document["begun_at"])
    throughput = [tuple(point) for point in document["throughput"]]
    faults = document["faults"]
    parts: list[str] = []
    bottom = _draw_whole(parts, throughput, faults, origin, top=0)
    close_up = next((fault for fault in faults if fault["kind"] == _CLOSE_UP_OF and fault["whole_at"]), None)
    if close_up is not None:
        bottom = _draw_close_up(parts, throughput, faults, origin, close_up, top=bottom + _GAP)
    return sheet(parts, height=bottom, style=_STYLE)


class _Plot(Axes):
    """A plot of requests per second between two seconds, with lanes below it."""

    def __init__(
        self, parts: list[str], throughput: Sequence[tuple[int, ...]], *, first: int, last: int, top: int
    ) -> None:
        self._points = [point for point in throughput if first <= point[0] <= last]
        highest = sorted(max(point[1], point[2]) for point in self._points)
        # a burst after an outage may leave the picture: what matters is the pace beside it
        full = max(20, (int(highest[int(len(highest) * 0.97)] * 1.25) // 20 + 1) * 20) if highest else 20
        super().__init__(parts, first=first, last=last, full=full, top=top, height=_PLOT_HEIGHT)
        self._marks = range(0, full + 1, max(20, full // 4 // 20 * 20))

    def draw(self) -> None:
        self.draw_values(self._marks, unit="/s")
        area = [f"{self.x(second)},{self.y(answered)}" for second, _, answered in self._points]
        floor = self.y(0)
        ends = f"{self.x(self._first)},{floor}", f"{self.x(self._last)},{floor}"
        self._parts.append(f'<polygon class="answered" points="{ends[0]} {" ".join(area)} {ends[1]}"/>')
        self.draw_line([(second, published) for second, published, _ in self._points], look="published")

    def bar(self, fault: dict[str, Any], origin: int, *, y: float, colour: str) -> float:
        """Draw a fault: dark while its cause lasts, light until all is well again; return where it ends."""
        begun, cleared = fault["begun_at"] - origin, fault["cleared_at"] - origin
        whole = (fault["whole_at"] or fault["cleared_at"]) - origin
        x1, x2, x3 = self.x(begun), self.x(cleared), self.x(whole)
        x2 = max(x2, x1 + _MIN_BAR)
        for start, end, opacity in ((x1, x2, 1), (x2, max(x3, x2), 0.35)):
            self._parts.append(
                f'<rect x="{start}" y="{y}" width="{end - start:.1f}" height="{_LANE_HEIGHT - 8}" '
                f'fill="{colour}" fill-opacity="{opacity}"/>'
            )
        return max(x2, x3)


def _draw_whole(
    parts: list[str], throughput: Sequence[tuple[int, ...]], faults: list[dict[str, Any]], origin: int, *, top: int
) -> int:
    last = max(2, throughput[-1][0])
    draw_title(parts, "A run: requests published (line) and answered (area) per second, and the faults", top=top)
    plot = _Plot(parts, throughput, first=0, last=last, top=top + TITLE_HEIGHT)
    lanes = list(dict.fromkeys(name for _, name, _ in _LANES))
    lanes_top = top + TITLE_HEIGHT + _PLOT_HEIGHT + 10
    bottom = lanes_top + len(lanes) * _LANE_HEIGHT
    step_s = step_s_of(last)
    plot.draw_times(y=bottom, step_s=step_s, unit="min" if step_s >= 60 else "s", divisor=60 if step_s >= 60 else 1)
    plot.draw()
    for index, name in enumerate(lanes):
        parts.append(f'<text class="right" x="{LEFT - 8}" y="{lanes_top + index * _LANE_HEIGHT + 12}">{name}</text>')
    for fault in faults:
        name, colour = lane_of(fault["kind"])
        plot.bar(fault, origin, y=lanes_top + lanes.index(name) * _LANE_HEIGHT + 3, colour=colour)
    return bottom + AXIS_HEIGHT


def _draw_close_up(
    parts: list[str],
    throughput: Sequence[tuple[int, ...]],
    faults: list[dict[str, Any]],
    origin: int,
    close_up: dict[str, Any],
    *,
    top: int,
) -> int:
    first = int(close_up["begun_at"] - origin) - _BEFORE_S
    last = first + _BEFORE_S + _AFTER_S
    draw_title(parts, f"Closer: {_CLOSE_UP_OF} (dark: its cause lasts; light: until all is well)", top=top)
    plot = _Plot(parts, throughput, first=first, last=last, top=top + TITLE_HEIGHT)
    inside = [fault for fault in faults if first <= fault["begun_at"] - origin <= last - 6][:6]
    rows_top = top + TITLE_HEIGHT + _PLOT_HEIGHT + 10
    bottom = rows_top + len(inside) * _LANE_HEIGHT
    plot.draw_times(y=bottom, step_s=5, unit="s", divisor=1)
    plot.draw()
    for index, fault in enumerate(inside):
        y = rows_top + index * _LANE_HEIGHT
        end = plot.bar(fault, origin, y=y + 3, colour=lane_of(fault["kind"])[1])
        text = escape(f"{fault['kind']}, {fault['point']}" if fault["point"] else fault["kind"])
        begin = plot.x(fault["begun_at"] - origin)
        # on the side where there is room
        if end > WIDTH * 0.6:
            parts.append(f'<text class="right" x="{begin - 6}" y="{y + 13}">{text}</text>')
        else:
            parts.append(f'<text x="{end + 6}" y="{y + 13}">{text}</text>')
    return bottom + AXIS_HEIGHT
