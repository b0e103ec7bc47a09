"""The picture of a run, an SVG of horizontal bars made by hand. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from benchmarks import contender as who
from benchmarks import tables as write
from benchmarks.figures import latency, slots, throughput
from benchmarks.results import Results

_WIDTH = 890
_LABEL_WIDTH = 280
_VALUE_WIDTH = 130
_BAR_HEIGHT = 18
_ROW_HEIGHT = 26
_HEAD_HEIGHT = 44
_GAP = 18
_OURS, _THEIRS = ("#1f6feb", "#a8c7fa"), ("#6e7781", "#d0d7de")
_STYLE = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:13px;fill:#57606a}"
    ".title{font-size:15px;font-weight:600}"
    ".ours{font-weight:600}"
)


@dataclass(frozen=True)
class Bar:
    """One contender."""

    label: str
    value: float
    text: str
    #: the dark part of the bar, at most `value`
    part: float | None = None
    is_ours: bool = False


@dataclass(frozen=True)
class Panel:
    """Bars on one scale."""

    title: str
    bars: Sequence[Bar]
    #: the bar that fills the width; None: the longest
    full: float | None = None


def panels(results: Results) -> list[Panel]:
    """Choose what is shown: time per message, added latency, slots kept busy."""
    made = []
    case = throughput.case_of(1)
    bars = []
    for name in results.contenders(throughput.NAME, case):
        wall = results.spread(throughput.NAME, name, case, "wall_s")
        cpu = results.spread(throughput.NAME, name, case, "cpu_s")
        if wall and cpu:
            text = f"{write.milliseconds(wall.median)} ms"
            bars.append(Bar(name, wall.median, text, min(cpu.median, wall.median), _is_ours(name)))
    made.append(Panel("Time per message, instant model, prefetch 1 (dark: CPU)", bars))
    case = latency.case_of(latency.INSTANT, 1)
    bars = []
    for name in results.contenders(latency.NAME, case):
        p50 = results.spread(latency.NAME, name, case, "p50_s")
        p99 = results.spread(latency.NAME, name, case, "p99_s")
        if p50 and p99:
            text = f"{write.milliseconds(p50.median)} / {write.milliseconds(p99.median)} ms"
            bars.append(Bar(name, p99.median, text, p50.median, _is_ours(name)))
    made.append(Panel("Added latency per request (dark: p50, light: p99)", bars))
    bars = []
    for name in results.contenders(slots.NAME):
        share = results.spread(slots.NAME, name, slots.CASE, "share")
        if share:
            bars.append(Bar(name, share.median, write.percent(share.median), share.median, _is_ours(name)))
    made.append(Panel("Model of 100 ms, 64 slots: share of 640 requests a second", bars, 1.0))
    return [panel for panel in made if panel.bars]


def draw(shown: Sequence[Panel]) -> str:
    """Return the SVG."""
    height = _GAP + sum(_HEAD_HEIGHT + _ROW_HEIGHT * len(panel.bars) for panel in shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="What a message costs">',
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    top = 0
    for panel in shown:
        parts.append(f'<text class="title" x="{_GAP}" y="{top + 30}">{escape(panel.title)}</text>')
        top += _HEAD_HEIGHT
        full = panel.full or max(bar.value for bar in panel.bars) or 1.0
        scale = (_WIDTH - _LABEL_WIDTH - _VALUE_WIDTH) / full
        for bar in panel.bars:
            parts += _draw_bar(bar, top, scale)
            top += _ROW_HEIGHT
    return "\n".join([*parts, "</svg>", ""])


def _draw_bar(bar: Bar, top: int, scale: float) -> list[str]:
    dark, light = _OURS if bar.is_ours else _THEIRS
    width, baseline = max(1.0, bar.value * scale), top + 14
    drawn = [
        f'<text{" class=" + chr(34) + "ours" + chr(34) if bar.is_ours else ""} x="{_LABEL_WIDTH - 10}" y="{baseline}" '
        f'text-anchor="end">{escape(bar.label)}</text>',
        f'<rect x="{_LABEL_WIDTH}" y="{top}" width="{width:.1f}" height="{_BAR_HEIGHT}" fill="{light}"/>',
    ]
    if bar.part is not None:
        part = max(1.0, min(bar.part * scale, width))
        drawn.append(f'<rect x="{_LABEL_WIDTH}" y="{top}" width="{part:.1f}" height="{_BAR_HEIGHT}" fill="{dark}"/>')
    drawn.append(f'<text x="{_LABEL_WIDTH + width + 8:.1f}" y="{baseline}">{escape(bar.text)}</text>')
    return drawn


def _is_ours(name: str) -> bool:
    return name.startswith(who.WORKER.name)
