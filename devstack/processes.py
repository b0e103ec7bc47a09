"""Child processes that cannot outlive us, free ports, bounded waits.

Safe from any thread. Each child leads a process group of its own and reports to the guardian before its program starts,
so there is no moment at which it could be left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeVar

from devstack.guardian import group_alive, kill_group

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
#: seconds a child gets between SIGTERM and SIGKILL
END_GRACE_S = 5.0
#: seconds for the guardian to clean up when we end in an orderly way
GUARDIAN_TIMEOUT_S = 10.0

# The child's standard input is the pipe to the guardian, until the program replaces the shell
_ANNOUNCE_THEN_EXEC = r"""printf '{"watch": %d}\n' $$ >&0 || exit 71; exec "$@" </dev/null"""


class NotInTime(Exception):
    """Something did not happen within its bound. Raised by the waits of this module; the caller gives up."""


class CommandFailed(Exception):
    """A program exited with another code than 0; the text ends with its output. Raised by `run`."""


class Interrupted(SystemExit):
    """A signal asked us to end; it unwinds every context manager on its way. Its code is 128 + the signal's number."""


class Guardian:
    """Our end of the pipe to the guardian process. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def pipe_fd(self) -> int:
        """Return the pipe's descriptor, starting the guardian if need be."""
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(Path(__file__).with_name("guardian.py"))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            return self._process.stdin.fileno()

    def order(self, **order: object) -> None:
        """Send one order; a line below PIPE_BUF is written whole or not at all."""
        os.write(self.pipe_fd(), json.dumps(order).encode() + b"\n")

    def dismiss(self) -> None:
        """Close the pipe and wait until the guardian has ended whatever is left."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GUARDIAN_TIMEOUT_S)


guardian = Guardian()
atexit.register(guardian.dismiss)


class Child:
    """One child process, leader of its own group. Safe from any thread."""

    def __init__(self, process: subprocess.Popen[bytes], *, log_path: Path) -> None:
        self._process = process
        self.log_path = log_path

    @property
    def pid(self) -> int:
        """The process id, which is the group's id too."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not exited yet (a stopped process is running)."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def log(self) -> str:
        """Return what it has written so far, both streams."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def signal(self, number: int) -> None:
        """Send a signal to the process alone, not to its group."""
        self._process.send_signal(number)

    def wait(self, *, timeout_s: float) -> int:
        """Return the exit code.

        Raises:  NotInTime
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as err:
            raise NotInTime(
                f"process {self.pid} still runs after {timeout_s:g} s; it said:\n{self.log()[-3000:]}"
            ) from err

    def end(self, *, grace_s: float = END_GRACE_S) -> None:
        """End the process and its group: SIGTERM, and SIGKILL after the grace (at once with a grace of 0)."""
        if grace_s and self.running:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)  # a stopped process would never see the SIGTERM
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        kill_group(self.pid)
        self._process.wait()
        deadline = time.monotonic() + END_GRACE_S
        while group_alive(self.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        guardian.order(forget=self.pid)


def spawn(argv: Sequence[str | Path], *, env: Mapping[str, str], log_path: Path, cwd: Path | None = None) -> Child:
    """Start a program in a group of its own, watched by the guardian, its output appended to log_path."""
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _ANNOUNCE_THEN_EXEC, "sh", *map(str, argv)],
            env=dict(env),
            cwd=cwd,
            stdin=guardian.pipe_fd(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Child(process, log_path=log_path)


def run(argv: Sequence[str | Path], *, env: Mapping[str, str], timeout_s: float) -> str:
    """Run a program to its end and return what it wrote, both streams.

    Raises:  NotInTime; CommandFailed for any exit code but 0
    """
    with tempfile.NamedTemporaryFile(prefix="devstack-run-") as log:
        child = spawn(argv, env=env, log_path=Path(log.name))
        try:
            exit_code = child.wait(timeout_s=timeout_s)
        finally:
            child.end(grace_s=0)
        output = child.log()
    if exit_code:
        raise CommandFailed(f"`{' '.join(map(str, argv))}` exited with {exit_code}: {output[-2000:].strip()}")
    return output


def make_folder(name: str) -> Path:
    """Make a temporary folder that the guardian removes when we are gone; `remove_folder` does it sooner."""
    folder = Path(tempfile.mkdtemp(prefix=f"devstack-{name}-"))
    guardian.order(folder=str(folder))
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder made by `make_folder`."""
    shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """Return a loopback TCP port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def accepts_connections(port: int, *, host: str = LOOPBACK) -> bool:
    """Tell whether something listens on a port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def wait_until(condition: Callable[[], T], *, timeout_s: float, what: str, every_s: float = 0.02) -> T:
    """Return the first true value of condition().

    Raises:  NotInTime, naming `what`
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise NotInTime(f"not within {timeout_s:g} s: {what}")
        time.sleep(every_s)


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into `Interrupted` while the block runs. Main thread only.

    Only the first one raises: a second Ctrl-C must not break the clean-up that the first one began.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def raise_once(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            # a function, not SIG_IGN, which children would inherit
            signal.signal(each, lambda number, frame: None)
        raise Interrupted(128 + number)

    before = {number: signal.signal(number, raise_once) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
