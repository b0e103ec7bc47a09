"""A private RabbitMQ node on a free loopback port.

Safe from any thread, one call at a time. Nothing of the machine is used: HOME, node name, Erlang cookie, epmd and its
port are the node's own, so it meets no other node and leaves nothing behind.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Protocol

import pika
import pika.exceptions

from devstack import processes
from devstack.containers import FIRST_ANSWER_TIMEOUT_S, ComposeService
from devstack.install import Containers, Programs, Servers, provide_servers
from devstack.processes import LOOPBACK

#: seconds for a node to boot, generous for a cold disk and a busy machine
BOOT_TIMEOUT_S = 90.0
CTL_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
_CONFIG = """\
listeners.tcp.default = {LOOPBACK}:{port}
distribution.listener.interface = {LOOPBACK}
log.file = false
log.console = true
log.console.level = warning
"""
# Two schedulers and no busy waiting: an idle Erlang would otherwise take a core from what is being measured
_ERLANG_FLAGS = "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none -start_epmd false"


class _Node(Protocol):
    """What RabbitMq needs of a node, however it runs."""

    @property
    def running(self) -> bool: ...
    def launch(self) -> None: ...
    def log(self) -> str: ...
    def ctl(self, *args: str) -> str: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def remove(self) -> None: ...


class _PrivateNode:
    """A node made of installed programs."""

    def __init__(self, programs: Programs, *, folder: Path, port: int, extra_config: str) -> None:
        self._programs = programs
        self._folder = folder
        self._epmd: processes.Child | None = None
        self._server: processes.Child | None = None
        self._epmd_port = processes.free_port()
        self._name = f"devstack-{port}@localhost"
        config_path = folder / "rabbitmq.conf"
        config_path.write_text(_CONFIG.format(LOOPBACK=LOOPBACK, port=port) + extra_config + "\n")
        (folder / "enabled_plugins").write_text("[].\n")
        search = [str(programs.erl.parent), os.environ.get("PATH", os.defpath)]
        self._env = {
            "PATH": os.pathsep.join(search),
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "RABBITMQ_NODENAME": self._name,
            "RABBITMQ_CONFIG_FILE": str(config_path),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "no-such-file"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_DIST_PORT": str(processes.free_port()),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": _ERLANG_FLAGS,
            "RABBITMQ_CTL_ERL_ARGS": _ERLANG_FLAGS,
        }

    @property
    def running(self) -> bool:
        return self._server is not None and self._server.running

    def launch(self) -> None:
        if self._epmd is None:
            # Started here, in the foreground: one that Erlang starts is a daemon that outlives the node
            argv: list[str | Path] = [self._programs.epmd, "-port", str(self._epmd_port), "-address", LOOPBACK]
            self._epmd = processes.spawn(argv, env=self._env, log_path=self._folder / "epmd.log")
            processes.wait_until(
                lambda: processes.accepts_connections(self._epmd_port), timeout_s=CONNECT_TIMEOUT_S, what="epmd listens"
            )
        # a node that is killed writes a MnesiaCore file into its working directory
        self._server = processes.spawn(
            [self._programs.rabbitmq_server],
            env=self._env,
            log_path=self._folder / "rabbitmq.log",
            cwd=self._folder,
        )

    def log(self) -> str:
        return self._server.log() if self._server else ""

    def ctl(self, *args: str) -> str:
        argv: list[str | Path] = [self._programs.rabbitmqctl, "-q", "-n", self._name, *args]
        return processes.run(argv, env=self._env, timeout_s=CTL_TIMEOUT_S)

    def stop(self) -> None:
        if self._server is not None:
            self.ctl("stop")
            self._server.wait(timeout_s=CTL_TIMEOUT_S)
            self.kill()

    def kill(self) -> None:
        if self._server is not None:
            self._server.end(grace_s=0)
            self._server = None

    def remove(self) -> None:
        self.kill()
        if self._epmd is not None:
            self._epmd.end(grace_s=0)
            self._epmd = None


class _ContainerNode:
    """A node in a container."""

    def __init__(self, servers: Containers, *, folder: Path, port: int, extra_config: str) -> None:
        config_path = folder / "rabbitmq.conf"
        config_path.write_text(extra_config + "\n")
        variables = {"DEVSTACK_RABBITMQ_PORT": str(port), "DEVSTACK_RABBITMQ_CONFIG": str(config_path)}
        self._service = ComposeService(servers, "rabbitmq", folder=folder, variables=variables)
        self.launch, self.log, self.stop = self._service.launch, self._service.log, self._service.stop
        self.kill, self.remove = self._service.kill, self._service.remove

    @property
    def running(self) -> bool:
        return self._service.running

    def ctl(self, *args: str) -> str:
        return self._service.execute("rabbitmqctl", "-q", *args)


class RabbitMq:
    """A broker that keeps its port and its durable data over `kill`, `stop` and `restart`, until `close`."""

    def __init__(self, *, servers: Servers | None = None, extra_config: str = "") -> None:
        self._servers = servers or provide_servers()
        self._extra_config = extra_config
        self._folder: Path | None = None
        self._node: _Node | None = None
        self.port = 0
        #: of the server, as it introduces itself; empty before the first start
        self.version = ""

    def __enter__(self) -> RabbitMq:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def running(self) -> bool:
        """Whether the node's process is alive."""
        return self._node is not None and self._node.running

    def launch(self) -> None:
        """Begin to boot and return at once; `wait_ready` has to follow."""
        if self._node is None:
            self._folder = processes.make_folder("rabbitmq")
            self.port = processes.free_port()
            if isinstance(self._servers, Programs):
                self._node = _PrivateNode(
                    self._servers, folder=self._folder, port=self.port, extra_config=self._extra_config
                )
            else:
                self._node = _ContainerNode(
                    self._servers, folder=self._folder, port=self.port, extra_config=self._extra_config
                )
        self._node.launch()

    def wait_ready(self) -> RabbitMq:
        """Wait until clients can log in.

        Raises:  NotInTime, with the end of the node's log
        """
        node = self._launched_node()
        timeout_s = BOOT_TIMEOUT_S if isinstance(self._servers, Programs) else FIRST_ANSWER_TIMEOUT_S

        def accepts_or_died() -> bool:
            return self._accepts_login() or not node.running

        try:
            processes.wait_until(accepts_or_died, timeout_s=timeout_s, what="RabbitMQ accepts logins", every_s=0.05)
        except processes.NotInTime as err:
            raise processes.NotInTime(f"{err}; its log:\n{node.log()[-3000:]}") from err
        if not node.running:
            raise processes.NotInTime(f"RabbitMQ ended while it booted; its log:\n{node.log()[-3000:]}")
        return self

    def start(self) -> RabbitMq:
        """Boot the node, or boot it again after `stop` or `kill`."""
        self.launch()
        return self.wait_ready()

    def stop(self) -> None:
        """Stop cleanly: connections are closed, persistent messages kept."""
        self._launched_node().stop()

    def kill(self) -> None:
        """SIGKILL the node; what had not reached its disk is lost."""
        self._launched_node().kill()

    def restart(self) -> RabbitMq:
        """Stop cleanly and boot again, on the same port, with the same durable queues."""
        self.stop()
        return self.start()

    def close(self) -> None:
        """End the node, its epmd and its folder."""
        if self._node is not None:
            self._node.remove()
            self._node = None
        if self._folder is not None:
            processes.remove_folder(self._folder)
            self._folder = None

    def ctl(self, *args: str) -> str:
        """Run rabbitmqctl on the node and return what it wrote (takes about a second).

        Raises:  CommandFailed, NotInTime
        """
        return self._launched_node().ctl(*args)

    def queue_info(self, name: str) -> dict[str, int]:
        """Return `ready`, `unacked` and `consumers` of a queue; an empty dict when there is no such queue."""
        columns = ("name", "messages_ready", "messages_unacknowledged", "consumers")
        for line in self.ctl("list_queues", "--no-table-headers", *columns).splitlines():
            cells = line.split("\t")
            if cells[0] == name:
                return dict(zip(("ready", "unacked", "consumers"), map(int, cells[1:]), strict=True))
        return {}

    def connect(self, *, username: str = "guest", password: str = "guest", vhost: str = "/") -> pika.BlockingConnection:
        """Open a connection, without heartbeats; the caller closes it."""
        parameters = pika.ConnectionParameters(
            host=LOOPBACK,
            port=self.port,
            virtual_host=vhost,
            credentials=pika.PlainCredentials(username, password),
            heartbeat=0,
            socket_timeout=CONNECT_TIMEOUT_S,
            stack_timeout=CONNECT_TIMEOUT_S,
            blocked_connection_timeout=CONNECT_TIMEOUT_S,
        )
        return pika.BlockingConnection(parameters)

    def _launched_node(self) -> _Node:
        if self._node is None:
            raise RuntimeError("this RabbitMq was not started")
        return self._node

    def _accepts_login(self) -> bool:
        if not processes.accepts_connections(self.port):
            return False
        try:
            connection = self.connect()
        except (pika.exceptions.AMQPError, OSError):
            return False
        properties = connection._impl.server_properties or {}
        version = properties.get("version", "")
        self.version = version.decode() if isinstance(version, bytes) else str(version)
        connection.close()
        return True
