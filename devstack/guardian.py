"""The guardian: a process that outlives its parent just long enough to end what the parent started.

Run as `python guardian.py`, one for each process that starts children; must not import anything of this package, so
that it starts in a few milliseconds. It reads orders, one JSON object a line, from its standard input, a pipe whose
other end the parent holds. The pipe closes when the parent ends in any way, SIGKILL included. Then the guardian ends
the process groups it watches, runs the last wills, removes the folders and exits.

PR_SET_PDEATHSIG is not used: Linux only, it reaches no grandchildren, and it fires when the *thread* that started the
child ends, not the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

#: seconds that killed groups get to disappear before their folders are removed under them
GROUPS_GONE_TIMEOUT_S = 5.0
#: seconds for one last will (`docker compose down` is the slow one)
LAST_WILL_TIMEOUT_S = 60.0


def group_alive(group: int) -> bool:
    """Tell whether a process group still has a member that is no zombie."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS says so of a group of zombies
        return False
    if not Path("/proc/self/stat").exists():
        return True
    # In a container whose first process reaps nobody, zombies stay for ever
    return any(member_state(folder, group) not in ("", "Z") for folder in Path("/proc").glob("[0-9]*"))


def member_state(folder: Path, group: int) -> str:
    """Return the state letter of a process of the group from its /proc folder; empty if it is gone or no member."""
    try:
        # "pid (name) state ppid pgrp ...", and the name may hold spaces and brackets
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[0] if int(fields[2]) == group else ""


def kill_group(group: int) -> None:
    """SIGKILL a whole group; a stopped member dies of it too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def end_all(groups: set[int], last_wills: list[list[str]], folders: set[str]) -> None:
    """End everything that the parent left behind, processes first."""
    for group in groups:
        kill_group(group)
    deadline = time.monotonic() + GROUPS_GONE_TIMEOUT_S
    while any(group_alive(group) for group in groups) and time.monotonic() < deadline:
        time.sleep(0.02)
    for argv in last_wills:
        try:
            subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=LAST_WILL_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue  # one will that fails must not keep the others from being carried out
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Take orders until the parent is gone, then end everything."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the pipe closes, never before its parent
    groups: set[int] = set()
    folders: set[str] = set()
    last_wills: list[list[str]] = []
    for line in sys.stdin:
        order = json.loads(line)
        if "watch" in order:
            groups.add(order["watch"])
        elif "forget" in order:
            groups.discard(order["forget"])
        elif "folder" in order:
            folders.add(order["folder"])
        elif "last_will" in order:
            last_wills.append(order["last_will"])
    end_all(groups, last_wills, folders)


if __name__ == "__main__":
    main()
