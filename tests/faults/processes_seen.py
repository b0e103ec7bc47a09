"""What the kernel says of a worker process: memory, threads, descriptors; and how they grow over time. Linux."""

from __future__ import annotations

import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

#: long enough that every connection that a fault closed is used, and so open, again at some time in it
_WINDOW_S = 300.0


@dataclass(frozen=True)
class Sample:
    """One look at one worker."""

    at: float
    seat: str
    process_id: int
    rss_bytes: int
    threads: int
    descriptors: int


def look(seat: str, process_id: int) -> Sample | None:
    """Look at a process; None when it is gone."""
    folder = Path(f"/proc/{process_id}")
    try:
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        descriptors = len(os.listdir(folder / "fd"))
        rss_bytes = int(fields["VmRSS"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
    return Sample(time.time(), seat, process_id, rss_bytes, int(fields["Threads"]), descriptors)


def by_process(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Part the samples by their process; the process that lived longest comes first."""
    parts: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        parts.setdefault((sample.seat, sample.process_id), []).append(sample)
    return sorted(parts.values(), key=lambda part: part[0].at - part[-1].at)


def to_rows(samples: Sequence[Sample], *, begun_at: float) -> list[tuple[float, float, int, int]]:
    """Return (minute since the begin, RSS in MB, threads, descriptors) of each sample."""
    return [(round((s.at - begun_at) / 60, 3), s.rss_bytes / 1e6, s.threads, s.descriptors) for s in samples]


def windows(times_s: Sequence[float]) -> list[range]:
    """Part the last half into five minutes each, as indices of the times; the last one takes the remainder."""
    middle = (times_s[0] + times_s[-1]) / 2
    count = max(1, int((times_s[-1] - middle) // _WINDOW_S))
    begins = [bisect_left(times_s, middle + number * _WINDOW_S) for number in range(count)]
    # one in which nothing was seen, since the machine stood still, says nothing
    return [range(begin, end) for begin, end in pairwise([*begins, len(times_s)]) if begin < end]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through points (x, y)."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


@dataclass(frozen=True)
class Growth:
    """How a process grew over the last half of its life.

    The levels are what shows a leak, the medians of five minutes each: a fault closes connections, which come back as
    they are used, and a retry's copy opens one for a moment, so that the range of the descriptors is wide without one.
    What leaks stays, and raises each five minutes above those before.
    """

    seat: str
    minutes: float
    rss_first_mb: float
    rss_last_mb: float
    rss_mb_per_hour: float
    thread_range: int
    descriptor_range: int
    rss_levels_mb: list[float]
    thread_levels: list[int]
    descriptor_levels: list[int]


def growth(samples: Sequence[Sample]) -> Growth | None:
    """Measure the last half of one process's samples; None for too few."""
    if len(samples) < 4:
        return None
    parts = [[samples[index] for index in part] for part in windows([sample.at for sample in samples])]
    last = [sample for part in parts for sample in part]
    return Growth(
        seat=last[0].seat,
        minutes=(last[-1].at - last[0].at) / 60,
        rss_first_mb=last[0].rss_bytes / 1e6,
        rss_last_mb=last[-1].rss_bytes / 1e6,
        rss_mb_per_hour=slope([(sample.at / 3600, sample.rss_bytes / 1e6) for sample in last]),
        thread_range=max(s.threads for s in last) - min(s.threads for s in last),
        descriptor_range=max(s.descriptors for s in last) - min(s.descriptors for s in last),
        rss_levels_mb=[statistics.median(s.rss_bytes / 1e6 for s in part) for part in parts],
        thread_levels=[statistics.median_low(s.threads for s in part) for part in parts],
        descriptor_levels=[statistics.median_low(s.descriptors for s in part) for part in parts],
    )
