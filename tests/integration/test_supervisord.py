"""The section for bare GPU hosts, under a real supervisord: it starts, drains, restarts crashes and nothing else."""

from __future__ import annotations

import configparser
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devstack import processes
from devstack.worker_process import PROJECT_FOLDER, READY_TIMEOUT_S

from .support import Deployment, completed_text, said, until

pytest.importorskip("supervisor", reason="the package `supervisor` is not installed (requirements-dev.txt)")
pytestmark = pytest.mark.integration

SECTION = "program:inference-worker"
PROMPT = "Do you run on bare metal?"
#: seconds for supervisord to have acted, as its own bounds are: stopwaitsecs and a turn of its loop
ACT_TIMEOUT_S = 45.0


def load_section() -> dict[str, str]:
    """Return the section as it is shipped."""
    parser = configparser.RawConfigParser(inline_comment_prefixes=None)
    parser.read_string((PROJECT_FOLDER / "deploy/supervisord/inference-worker.conf").read_text())
    return dict(parser[SECTION])


class Supervisord:
    """A supervisord with the one program, in a folder of its own. Where the files are is replaced, nothing else."""

    def __init__(self, deployment: Deployment, **overrides: object) -> None:
        self.folder = processes.make_folder("supervisord")
        section = load_section()
        assert section.pop("user") == "inference-worker"
        section["command"] = section["command"].replace("/opt/inference_worker/bin/python", sys.executable)
        assert section["command"] == f"{sys.executable} -m inference_worker"
        section["directory"] = str(self.folder)
        section["stdout_logfile"] = str(self.folder / "worker.log")
        self.write_env(deployment, **overrides)
        socket = self.folder / "socket"
        config = configparser.RawConfigParser()
        config.read_dict(
            {
                "unix_http_server": {"file": str(socket)},
                "supervisord": {
                    "nodaemon": "true",
                    "logfile": str(self.folder / "supervisord.log"),
                    "pidfile": str(self.folder / "pid"),
                    "childlogdir": str(self.folder),
                },
                "rpcinterface:supervisor": {
                    "supervisor.rpcinterface_factory": "supervisor.rpcinterface:make_main_rpcinterface"
                },
                "supervisorctl": {"serverurl": f"unix://{socket}"},
                SECTION: section,
            }
        )
        self._config_path = self.folder / "supervisord.conf"
        with self._config_path.open("w") as file:
            config.write(file)
        self._env = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(PROJECT_FOLDER)}
        self._child = processes.spawn(
            [sys.executable, "-m", "supervisor.supervisord", "-c", self._config_path],
            env=self._env,
            log_path=self.folder / "output",
            cwd=self.folder,
        )
        until(socket.exists, "supervisord listens")

    def write_env(self, deployment: Deployment, **overrides: object) -> None:
        """Write the .env that the section's comment speaks of."""
        env = deployment.worker_env(**overrides)
        self.port = env["WORKER_HTTP_PORT"]
        (self.folder / ".env").write_text("".join(f'{name}="{value}"\n' for name, value in env.items()))

    def ctl(self, *arguments: str) -> str:
        """Run supervisorctl; its exit code is not looked at, since `status` puts the state into it."""
        argv = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(self._config_path), *arguments]
        done = subprocess.run(
            argv, env=self._env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ACT_TIMEOUT_S * 2
        )
        return done.stdout.strip()

    def state(self) -> str:
        """Return the program's state."""
        return self.ctl("status", "inference-worker").split()[1]

    def wait_state(self, state: str) -> None:
        processes.wait_until(lambda: self.state() == state, timeout_s=ACT_TIMEOUT_S, what=f"{state}: {self.log()}")

    def pid(self) -> int:
        """Return the worker's process id, 0 when there is none."""
        text = self.ctl("pid", "inference-worker")
        return int(text) if text.isdigit() else 0

    def log(self) -> str:
        """Return what supervisord says happened."""
        path = self.folder / "supervisord.log"
        return path.read_text() if path.exists() else ""

    def start_count(self) -> int:
        """Count how often the program was started."""
        return self.log().count("spawned: 'inference-worker'")

    def close(self) -> None:
        """Let supervisord end its program, and with it itself."""
        pid = self.pid() if self._child.running else 0
        self._child.end(grace_s=ACT_TIMEOUT_S)
        until(lambda: not pid or not Path(f"/proc/{pid}").exists(), "the worker is gone")
        processes.remove_folder(self.folder)


@pytest.fixture
def supervisord(deployment: Deployment) -> Iterator[Supervisord]:
    running = Supervisord(deployment)
    try:
        running.wait_state("RUNNING")
        processes.wait_until(
            lambda: deployment.queue_exists() and deployment.consumer_count() == 1,
            timeout_s=READY_TIMEOUT_S,
            what="it consumes",
        )
        yield running
    finally:
        running.close()


def test_a_stop_drains_and_is_no_reason_to_start_again(deployment: Deployment, supervisord: Supervisord) -> None:
    deployment.model.behave(match=PROMPT, delay_s=3.0)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    assert "stopped" in supervisord.ctl("stop", "inference-worker")
    assert supervisord.state() == "STOPPED"
    assert "stopped: inference-worker (exit status 0)" in supervisord.log()
    assert completed_text(deployment.result(request_id) or {}) == said(PROMPT)
    assert deployment.queue_depth() == 0
    assert supervisord.start_count() == 1
    assert "started" in supervisord.ctl("start", "inference-worker")
    deployment.serve_next()


def test_a_worker_that_was_asked_to_stop_by_somebody_else_stays_stopped(
    deployment: Deployment, supervisord: Supervisord
) -> None:
    os.kill(supervisord.pid(), signal.SIGTERM)
    supervisord.wait_state("EXITED")
    assert "exited: inference-worker (exit status 0; expected)" in supervisord.log()
    assert supervisord.start_count() == 1


def test_a_killed_worker_is_started_again(deployment: Deployment, supervisord: Supervisord) -> None:
    first = supervisord.pid()
    deployment.model.behave(match=PROMPT, times=1, delay_s=60.0)
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    os.kill(first, signal.SIGKILL)
    assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)
    assert supervisord.pid() not in (0, first)
    assert supervisord.start_count() == 2


def test_a_bad_configuration_is_not_tried_again(deployment: Deployment) -> None:
    supervisord = Supervisord(deployment, RABBITMQ_PORT="amqp")
    try:
        supervisord.wait_state("EXITED")
        assert "exited: inference-worker (exit status 78; expected)" in supervisord.log()
        assert "RABBITMQ_PORT" in (supervisord.folder / "worker.log").read_text()
        assert supervisord.start_count() == 1
        supervisord.write_env(deployment)
        supervisord.ctl("start", "inference-worker")
        until(deployment.queue_exists, "it works once the configuration is good")
    finally:
        supervisord.close()
