"""The worker as a real process: `python -m inference_worker`. Safe from any thread, one call at a time."""

from __future__ import annotations

import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from devstack import processes
from devstack.processes import LOOPBACK

PROJECT_FOLDER = Path(__file__).parent.parent
#: seconds from start to consuming, generous for a busy machine
READY_TIMEOUT_S = 20.0
#: seconds from SIGTERM to exit: the grace of the worker's own, and what follows it
STOP_TIMEOUT_S = 40.0

#: as in the Dockerfile and the supervisord section: each thread would keep freed pieces of its own, which looks like a
#: leak of some MB over hours
GLIBC_TUNABLES = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"


class WorkerProcess:
    """One worker. Its environment is what is given and what a process needs to live, nothing of ours."""

    def __init__(self, env: Mapping[str, str], *, python: str = sys.executable) -> None:
        self._folder = processes.make_folder("worker")
        #: its configuration, as it was given
        self.env = dict(env)
        process_env = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self._folder),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(PROJECT_FOLDER),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "GLIBC_TUNABLES": GLIBC_TUNABLES,
        }
        # In an empty folder, since the worker reads a .env where it stands
        self._child = processes.spawn(
            [python, "-m", "inference_worker"],
            env={**process_env, **self.env},
            log_path=self._folder / "worker.log",
            cwd=self._folder,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether it has not exited yet."""
        return self._child.running

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._child.exit_code

    @property
    def log_path(self) -> Path:
        """The file it logs to; gone after `close`."""
        return self._child.log_path

    @property
    def http_url(self) -> str:
        """Where its own pages are: /healthz, /readyz."""
        return f"http://{LOOPBACK}:{self.env['WORKER_HTTP_PORT']}"

    def log(self) -> str:
        """Return what it has logged so far."""
        return self._child.log()

    def ready(self) -> bool:
        """Ask it whether it is consuming."""
        try:
            with urllib.request.urlopen(f"{self.http_url}/readyz", timeout=2.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_ready(self, *, timeout_s: float = READY_TIMEOUT_S) -> WorkerProcess:
        """Wait until it is consuming.

        Raises:  NotInTime with the end of its log, also when it has exited
        """
        try:
            processes.wait_until(
                lambda: self.ready() or not self.running, timeout_s=timeout_s, what="the worker is consuming"
            )
        except processes.NotInTime as err:
            raise processes.NotInTime(f"{err}; its log:\n{self.log()[-3000:]}") from err
        if not self.running:
            raise processes.NotInTime(f"the worker exited with {self.exit_code}; its log:\n{self.log()[-3000:]}")
        return self

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._child.signal(number)

    def wait(self, *, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Return its exit code once it has exited.

        Raises:  NotInTime with the end of its log
        """
        return self._child.wait(timeout_s=timeout_s)

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Send SIGTERM and return the exit code.

        Raises:  NotInTime with the end of its log
        """
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s=timeout_s)

    def kill(self) -> None:
        """SIGKILL it."""
        self._child.end(grace_s=0)

    def close(self) -> None:
        """SIGKILL it if it still runs, and remove its folder with the log."""
        self.kill()
        processes.remove_folder(self._folder)
