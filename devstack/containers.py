"""One service of `compose.yaml`, run by docker compose in a project of its own.

Safe from any thread. The containers belong to the Docker daemon and so outlive any process of ours; the guardian's last
will takes them down when we are gone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from devstack import processes
from devstack.install import Containers

COMPOSE_FILE = Path(__file__).with_name("compose.yaml")
#: seconds for a server to answer, its image pulled first
FIRST_ANSWER_TIMEOUT_S = 600.0
#: seconds for one docker compose command
COMMAND_TIMEOUT_S = 60.0
#: what compose.yaml asks for; the variables of the service that is not used must be set as well
_UNUSED = {
    "DEVSTACK_RABBITMQ_PORT": "0",
    "DEVSTACK_RABBITMQ_CONFIG": os.devnull,
    "DEVSTACK_REDIS_PORT": "0",
    "DEVSTACK_REDIS_ARGUMENTS": "",
}


class ComposeService:
    """A service that keeps its data over kill and launch, until `remove`."""

    def __init__(self, servers: Containers, service: str, *, folder: Path, variables: Mapping[str, str]) -> None:
        self._service = service
        self._log_path = folder / "container.log"
        self._env = {**os.environ, **_UNUSED, **variables}
        project = f"devstack-{service}-{os.getpid()}-{processes.free_port()}"
        self._compose = [str(servers.docker), "compose", "-p", project, "-f", str(COMPOSE_FILE)]
        self._client: processes.Child | None = None
        settings = [f"{name}={value}" for name, value in {**_UNUSED, **variables}.items()]
        processes.guardian.order(last_will=["env", *settings, *self._compose, "down", "-v", "-t", "0"])

    @property
    def running(self) -> bool:
        """Whether the container is up, as far as the attached client knows."""
        return self._client is not None and self._client.running

    def launch(self) -> None:
        """Start the container, attached; returns before the server in it answers."""
        argv = [*self._compose, "up", "--no-color", self._service]
        self._client = processes.spawn(argv, env=self._env, log_path=self._log_path)

    def log(self) -> str:
        """Return what the container has written."""
        return self._client.log() if self._client else ""

    def command(self, *args: str) -> str:
        """Run `docker compose <args>`, followed by the service's name."""
        return processes.run([*self._compose, *args, self._service], env=self._env, timeout_s=COMMAND_TIMEOUT_S)

    def execute(self, *argv: str) -> str:
        """Run a program inside the container and return what it wrote."""
        inside = [*self._compose, "exec", "-T", self._service, *argv]
        return processes.run(inside, env=self._env, timeout_s=COMMAND_TIMEOUT_S)

    def stop(self) -> None:
        """Stop the server cleanly."""
        self.command("stop")
        self._end_client()

    def kill(self) -> None:
        """SIGKILL the server."""
        if self.running:
            self.command("kill")
        self._end_client()

    def remove(self) -> None:
        """Remove the container and its data."""
        processes.run([*self._compose, "down", "-v", "-t", "0"], env=self._env, timeout_s=COMMAND_TIMEOUT_S)
        self._end_client()

    def _end_client(self) -> None:
        if self._client:
            self._client.end()
            self._client = None
