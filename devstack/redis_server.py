"""A private redis-server on a free loopback port, in memory only.

Safe from any thread, one call at a time.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import TracebackType

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from devstack import processes
from devstack.containers import FIRST_ANSWER_TIMEOUT_S, ComposeService
from devstack.install import Programs, Servers, provide_servers
from devstack.processes import LOOPBACK

START_TIMEOUT_S = 30.0
#: seconds for one command of `client()`
COMMAND_TIMEOUT_S = 5.0


class RedisServer:
    """A Redis that keeps its port over `kill` and `restart`, but no data."""

    def __init__(self, *, servers: Servers | None = None, password: str = "", arguments: tuple[str, ...] = ()) -> None:
        self._servers = servers or provide_servers()
        self.password = password
        self._arguments = arguments
        self._folder: Path | None = None
        self._child: processes.Child | None = None
        self._service: ComposeService | None = None
        self.port = 0

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The connection URL, without the password."""
        return f"redis://{LOOPBACK}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether the server's process is alive."""
        if self._service:
            return self._service.running
        return self._child is not None and self._child.running

    def launch(self) -> None:
        """Begin to start and return at once; `wait_ready` has to follow."""
        if self._folder is None:
            self._folder = processes.make_folder("redis")
            self.port = processes.free_port()
        arguments = [*(("--requirepass", self.password) if self.password else ()), *self._arguments]
        if isinstance(self._servers, Programs):
            argv: list[str | Path] = [self._servers.redis_server, "--port", str(self.port), "--bind", LOOPBACK]
            argv += ["--dir", str(self._folder), "--save", "", "--appendonly", "no", "--daemonize", "no", *arguments]
            env = {"PATH": os.environ.get("PATH", os.defpath)}
            self._child = processes.spawn(argv, env=env, log_path=self._folder / "redis.log")
            return
        if self._service is None:
            variables = {"DEVSTACK_REDIS_PORT": str(self.port), "DEVSTACK_REDIS_ARGUMENTS": " ".join(arguments)}
            self._service = ComposeService(self._servers, "redis", folder=self._folder, variables=variables)
        self._service.launch()

    def wait_ready(self) -> RedisServer:
        """Wait until it answers PING.

        Raises:  NotInTime, with the end of its log
        """
        timeout_s = START_TIMEOUT_S if isinstance(self._servers, Programs) else FIRST_ANSWER_TIMEOUT_S
        try:
            processes.wait_until(
                lambda: self._answers() or not self.running, timeout_s=timeout_s, what="Redis answers PING"
            )
        except processes.NotInTime as err:
            raise processes.NotInTime(f"{err}; its log:\n{self.log()[-2000:]}") from err
        if not self.running:
            raise processes.NotInTime(f"Redis ended while it started; its log:\n{self.log()[-2000:]}")
        return self

    def start(self) -> RedisServer:
        """Start the server, or start it again after `kill`."""
        self.launch()
        return self.wait_ready()

    def kill(self) -> None:
        """SIGKILL the server; connections are reset, all data is lost."""
        if self._service:
            self._service.kill()
        elif self._child:
            self._child.end(grace_s=0)
            self._child = None

    def restart(self) -> RedisServer:
        """Kill it and start it again, empty, on the same port."""
        self.kill()
        return self.start()

    def freeze(self) -> None:
        """Stop the process where it stands: connections are accepted and nothing is answered."""
        if self._service:
            self._service.command("pause")
        elif self._child:
            self._child.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on; it answers what has piled up."""
        if self._service:
            self._service.command("unpause")
        elif self._child:
            self._child.signal(signal.SIGCONT)

    def close(self) -> None:
        """End the server and its folder."""
        self.kill()
        if self._service:
            self._service.remove()
            self._service = None
        if self._folder is not None:
            processes.remove_folder(self._folder)
            self._folder = None

    def client(self) -> redis.Redis:
        """Return a new client that fails within seconds and does not retry."""
        return redis.Redis(
            host=LOOPBACK,
            port=self.port,
            password=self.password or None,
            socket_timeout=COMMAND_TIMEOUT_S,
            socket_connect_timeout=COMMAND_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )

    def log(self) -> str:
        """Return what the server has written."""
        if self._service:
            return self._service.log()
        return self._child.log() if self._child else ""

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False
