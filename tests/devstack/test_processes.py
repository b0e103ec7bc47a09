"""Nothing that was started is left when its parent is gone, however it went."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devstack import processes
from devstack.guardian import group_alive

LONG_TIMEOUT_S = 10.0

#: a parent with a child that has a child of its own and ignores SIGTERM, and a folder; prints their names, then sleeps
PARENT = """
import sys, time
from devstack import processes

with processes.signals_unwind():
    folder = processes.make_folder("test")
    child = processes.spawn(
        ["/bin/sh", "-c", "trap '' TERM; sleep 600 & sleep 600"], env={"PATH": "/usr/bin:/bin"}, log_path=folder / "log"
    )
    print(child.pid, folder, flush=True)
    if sys.argv[1] == "sleep":
        time.sleep(600)
    if sys.argv[1] == "raise":
        raise RuntimeError("a bug")
"""


@contextlib.contextmanager
def running_parent(ending: str) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """Start a parent; yields it, its child's group and its folder."""
    argv = [sys.executable, "-c", PARENT, ending]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        try:
            assert parent.stdout is not None
            group, folder = parent.stdout.readline().split()
            yield parent, int(group), Path(folder)
        finally:
            parent.kill()


def wait_until_gone(group: int, folder: Path) -> None:
    processes.wait_until(
        lambda: not group_alive(group) and not folder.exists(), timeout_s=LONG_TIMEOUT_S, what="nothing is left"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_a_parent_that_a_signal_ended(number: signal.Signals) -> None:
    with running_parent("sleep") as (parent, group, folder):
        assert group_alive(group)
        parent.send_signal(number)
        assert parent.wait(LONG_TIMEOUT_S) == (-number if number == signal.SIGKILL else 128 + number)
        wait_until_gone(group, folder)


@pytest.mark.parametrize(("ending", "code"), [("return", 0), ("raise", 1)])
def test_nothing_is_left_when_the_parent_has_returned(ending: str, code: int) -> None:
    with running_parent(ending) as (parent, group, folder):
        assert parent.wait(LONG_TIMEOUT_S) == code
        assert not group_alive(group)
        assert not folder.exists()


def spawn_shell(folder: Path, script: str) -> processes.Child:
    return processes.spawn(["/bin/sh", "-c", script], env={"PATH": "/usr/bin:/bin"}, log_path=folder / "log")


def test_end_takes_the_whole_group(tmp_path: Path) -> None:
    child = spawn_shell(tmp_path, "sleep 600 & sleep 600")
    child.end()
    assert not child.running
    assert not group_alive(child.pid)


def test_end_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    child = spawn_shell(tmp_path, "trap '' TERM; echo ready; while :; do sleep 600; done")
    processes.wait_until(lambda: "ready" in child.log(), timeout_s=LONG_TIMEOUT_S, what="the trap is set")
    child.end(grace_s=0.1)
    assert child.exit_code == -signal.SIGKILL


def test_end_reaches_a_stopped_process(tmp_path: Path) -> None:
    child = spawn_shell(tmp_path, "exec sleep 600")
    child.signal(signal.SIGSTOP)
    child.end()
    assert child.exit_code == -signal.SIGTERM


def test_a_childs_input_is_empty_and_its_output_is_its_log(tmp_path: Path) -> None:
    child = spawn_shell(tmp_path, "cat; echo out; echo err >&2; exit 3")
    assert child.wait(timeout_s=LONG_TIMEOUT_S) == 3
    child.end()
    assert child.log() == "out\nerr\n"


def test_run_returns_the_output_or_says_what_failed() -> None:
    env = {"PATH": os.environ["PATH"]}
    assert processes.run(["echo", "hello"], env=env, timeout_s=LONG_TIMEOUT_S) == "hello\n"
    with pytest.raises(processes.CommandFailed, match="exited with 4: broken"):
        processes.run(["sh", "-c", "echo broken; exit 4"], env=env, timeout_s=LONG_TIMEOUT_S)
    with pytest.raises(processes.NotInTime):
        processes.run(["sleep", "600"], env=env, timeout_s=0.05)


def test_a_wait_is_bounded_and_says_for_what() -> None:
    with pytest.raises(processes.NotInTime, match=r"not within 0\.01 s: pigs fly"):
        processes.wait_until(lambda: False, timeout_s=0.01, what="pigs fly")
