"""A real vLLM on the CPU, with a tiny model of random weights, on a free loopback port.

Safe from any thread, one call at a time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from devstack import processes
from devstack.processes import LOOPBACK
from devstack.tiny_model import CONTEXT_TOKENS, write_model
from devstack.vllm_install import DEFAULT_FOLDER, pip_environment, provide_vllm

MODEL_NAME = "tiny"
#: seconds from start to the first healthy answer; 20 on an idle machine of two cores
START_TIMEOUT_S = 240.0
#: seconds from SIGTERM to SIGKILL, an orchestrator's usual ones
STOP_TIMEOUT_S = 30.0
#: seconds for one direct call
CALL_TIMEOUT_S = 120.0
_OPTIONS = ("--dtype", "float32", "--enforce-eager", "--disable-uvicorn-access-log")
_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class VllmServer:
    """The server. It keeps its port over `kill_engine`, `terminate` and `start`; the options may change in between."""

    def __init__(self, *options: str, folder: Path = DEFAULT_FOLDER, max_model_tokens: int = CONTEXT_TOKENS) -> None:
        self.options = options
        self.max_model_tokens = max_model_tokens
        self.port = processes.free_port()
        self._folder = folder
        self._logs = processes.make_folder("vllm")
        self._child: processes.Child | None = None

    def __enter__(self) -> VllmServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether its process is alive."""
        return self._child is not None and self._child.running

    def launch(self) -> None:
        """Begin to start and return at once; `wait_ready` has to follow.

        Raises:  InstallFailed
        """
        venv = provide_vllm(self._folder)
        model = write_model(self._folder / "model")
        argv: list[str | Path] = [venv / "bin" / "vllm", "serve", model, "--served-model-name", MODEL_NAME, *_OPTIONS]
        argv += ["--max-model-len", str(self.max_model_tokens), "--host", LOOPBACK, "--port", str(self.port)]
        env = {**pip_environment(), **_ENVIRONMENT, "PATH": f"{venv / 'bin'}:{os.environ.get('PATH', os.defpath)}"}
        self._child = processes.spawn(
            [*argv, *self.options], env=env, log_path=self._logs / "vllm.log", cwd=self._folder
        )

    def wait_ready(self) -> VllmServer:
        """Wait until it is healthy.

        Raises:  NotInTime with the end of its log
        """
        try:
            processes.wait_until(
                lambda: self.healthy() or not self.running,
                timeout_s=START_TIMEOUT_S,
                what="vLLM is healthy",
                every_s=0.2,
            )
        except processes.NotInTime as err:
            raise processes.NotInTime(f"{err}; its log:\n{self.log()[-3000:]}") from err
        if not self.running:
            raise processes.NotInTime(f"vLLM ended while it started; its log:\n{self.log()[-3000:]}")
        return self

    def start(self) -> VllmServer:
        """Start it, or start it again; its log goes on."""
        self.launch()
        return self.wait_ready()

    def healthy(self) -> bool:
        """Ask it whether it serves."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError, http.client.HTTPException):
            return False

    def terminate(self) -> None:
        """Send SIGTERM, as an orchestrator does, and return at once."""
        assert self._child is not None
        self._child.signal(signal.SIGTERM)

    def wait_ended(self) -> int:
        """Wait until it has exited, SIGKILL it when that takes too long, and return the exit code."""
        assert self._child is not None
        with contextlib.suppress(processes.NotInTime):
            self._child.wait(timeout_s=STOP_TIMEOUT_S)
        self._child.end(grace_s=0)
        exit_code = self._child.exit_code
        assert exit_code is not None
        return exit_code

    def kill_engine(self) -> int:
        """SIGKILL the process that computes, as the kernel does when memory runs out; return its process id."""
        assert self._child is not None
        engines = [pid for pid in _children_of(self._child.pid) if b"EngineCore" in _command_line(pid)]
        (engine,) = engines
        os.kill(engine, signal.SIGKILL)
        return engine

    def stop(self) -> None:
        """End it with all its processes; `start` starts it again."""
        if self._child is not None:
            self._child.end(grace_s=STOP_TIMEOUT_S)
            self._child = None

    def close(self) -> None:
        """End it, and remove its log."""
        self.stop()
        processes.remove_folder(self._logs)

    def log(self) -> str:
        """Return what it has written, over all its starts."""
        return self._child.log() if self._child else ""

    # direct calls

    def call(self, path: str, payload: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Ask it directly, GET without a payload, and return the status and the body, an event stream too."""
        body = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(self.url + path, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as err:
            with err:
                return err.code, err.read()

    def metric(self, sample_name: str) -> float:
        """Return the sum over one metric's series, as its Prometheus page has them."""
        _, page = self.call("/metrics")
        families = text_string_to_metric_families(page.decode())
        return sum(sample.value for family in families for sample in family.samples if sample.name == sample_name)

    def running_count(self) -> int:
        """Return how many requests it computes right now."""
        return round(self.metric("vllm:num_requests_running"))

    def wait_running_count(self, count: int, *, timeout_s: float) -> float:
        """Wait until it computes so many requests, and return how many seconds that took.

        Raises:  NotInTime
        """
        begun_at = time.monotonic()
        processes.wait_until(
            lambda: self.running_count() == count,
            timeout_s=timeout_s,
            what=f"vLLM computes {count} request(s)",
            every_s=0.05,
        )
        return time.monotonic() - begun_at


def _children_of(pid: int) -> list[int]:
    """Return the direct children of a process."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/comm").read_bytes()
