"""What the kernel says of a worker process: memory, threads, descriptors; and slopes over time. Linux."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through points (x, y)."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


@dataclass(frozen=True)
class Growth:
    """How a process that was never ended grew over the last half of a run."""

    seat: str
    minutes: float
    rss_first_mb: float
    rss_last_mb: float
    rss_mb_per_hour: float
    thread_range: int
    descriptor_range: int


def growth(samples: Sequence[Sample]) -> Growth | None:
    """Measure the last half of one process's samples; None for too few."""
    if len(samples) < 4:
        return None
    middle = (samples[0].at + samples[-1].at) / 2
    last = [sample for sample in samples if sample.at >= middle]
    return Growth(
        seat=last[0].seat,
        minutes=(last[-1].at - last[0].at) / 60,
        rss_first_mb=last[0].rss_bytes / 1e6,
        rss_last_mb=last[-1].rss_bytes / 1e6,
        rss_mb_per_hour=slope([(sample.at / 3600, sample.rss_bytes / 1e6) for sample in last]),
        thread_range=max(s.threads for s in last) - min(s.threads for s in last),
        descriptor_range=max(s.descriptors for s in last) - min(s.descriptors for s in last),
    )
