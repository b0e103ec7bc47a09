"""CPU time and resident memory of a process with all its descendants, from /proc. Linux; any thread."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def process_tree(root: int) -> list[int]:
    """Return a process and its living descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state ppid ...", and the name may hold spaces and brackets
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
    tree, position = [root], 0
    while position < len(tree):
        tree += children.get(tree[position], [])
        position += 1
    return tree


def cpu_s(pids: list[int]) -> float:
    """Return the user and system time of these processes, threads that have ended included, in nanosecond steps.

    The kernel's CPU clock of another process (clock_getcpuclockid): /proc/<pid>/stat only counts in steps of 10 ms.
    """
    total_s = 0.0
    for pid in pids:
        try:
            total_s += time.clock_gettime((~pid << 3) | 2)
        except OSError:
            continue  # gone
    return total_s


def rss_bytes(pids: list[int]) -> int:
    """Return the resident memory of these processes; pages that they share are counted for each."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            continue
    return total
