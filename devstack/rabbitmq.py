"""A private RabbitMQ node on a free loopback port, or on another address; several can be made a cluster.

Safe from any thread, one call at a time. Nothing of the machine is used: HOME, node name, Erlang cookie, epmd and its
port are the node's own, so it meets no other node and leaves nothing behind.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import pika
import pika.exceptions

from devstack import processes
from devstack.containers import FIRST_ANSWER_TIMEOUT_S, ComposeService
from devstack.http_server import bound_socket
from devstack.install import Containers, Programs, Servers, provide_servers
from devstack.processes import LOOPBACK

#: seconds for a node to boot, generous for a cold disk and a busy machine
BOOT_TIMEOUT_S = 90.0
CTL_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
_CONFIG = """\
listeners.tcp.default = {host}:{port}
distribution.listener.interface = {LOOPBACK}
log.file = false
log.console = true
log.console.level = warning
"""
# A mount namespace of its own, which ends with the command: this machine never sees a mount below the root. The nodes'
# folders, and the project's with its certificates, are where they are outside. Words: root, two folders, command
_ENTER_CHROOT = """\
root=$0 && mount -t proc proc "$root/proc" &&
for folder in "$1" "$2"; do mkdir -p "$root$folder" && mount --bind "$folder" "$root$folder" || exit; done &&
shift 2 && exec chroot "$root" env --chdir="$HOME" "$@"
"""
_CHROOTED_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_PROJECT_FOLDER = Path(__file__).parent.parent
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


class _ErlangNet:
    """An epmd on a port of its own and a cookie: nodes that share them can meet, and nobody else can meet them."""

    def __init__(self) -> None:
        self.port = processes.free_port()
        self.cookie = secrets.token_hex(16)
        self._epmd: processes.Child | None = None

    def start(self, command: list[str | Path], *, env: dict[str, str], log_path: Path) -> None:
        """Start the epmd unless it runs: one that Erlang starts is a daemon that outlives the node."""
        if self._epmd is not None:
            return
        self._epmd = processes.spawn([*command, "-address", LOOPBACK], env=env, log_path=log_path)

        def answers() -> bool:
            try:
                processes.run([*command, "-names"], env=env, timeout_s=CONNECT_TIMEOUT_S)
            except processes.CommandFailed:
                return False
            return True

        processes.wait_until(answers, timeout_s=CONNECT_TIMEOUT_S, what="epmd answers")

    def end(self) -> None:
        if self._epmd is not None:
            self._epmd.end(grace_s=0)
            self._epmd = None


class _PrivateNode:
    """A node made of installed programs, or of those of a chroot."""

    def __init__(
        self,
        programs: Programs,
        *,
        folder: Path,
        host: str,
        port: int,
        extra_config: str,
        neighbour: _PrivateNode | None,
        run_under: Sequence[str],
    ) -> None:
        self._programs = programs
        self._folder = folder
        self._owns_net = neighbour is None
        self._net: _ErlangNet = neighbour._net if neighbour else _ErlangNet()
        self._run_under = run_under
        self._server: processes.Child | None = None
        self.name = f"devstack-{host.replace('.', '-')}-{port}@localhost"
        config = _CONFIG.format(LOOPBACK=LOOPBACK, host=host, port=port)
        (folder / "rabbitmq.conf").write_text(config + extra_config + "\n")
        (folder / "enabled_plugins").write_text("[].\n")
        cookie = folder / ".erlang.cookie"
        cookie.write_text(self._net.cookie)
        cookie.chmod(0o400)  # Erlang takes no other
        self._chrooted = programs.rabbitmq_root != Path("/")
        search = _CHROOTED_PATH if self._chrooted else os.environ.get("PATH", os.defpath)
        self._env = {
            "PATH": os.pathsep.join([str(programs.erl.parent), search]),
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "ERL_EPMD_PORT": str(self._net.port),
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
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
        epmd = self._command(self._programs.epmd, "-port", str(self._net.port))
        self._net.start(epmd, env=self._env, log_path=self._folder / "epmd.log")
        # a node that is killed writes a MnesiaCore file into its working directory
        self._server = processes.spawn(
            self._command(self._programs.rabbitmq_server),
            env=self._env,
            log_path=self._folder / "rabbitmq.log",
            cwd=self._folder,
        )

    def log(self) -> str:
        return self._server.log() if self._server else ""

    def ctl(self, *args: str) -> str:
        argv = self._command(self._programs.rabbitmqctl, "-q", "-n", self.name, *args)
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
        if self._owns_net:
            self._net.end()

    def _command(self, program: Path, *args: str) -> list[str | Path]:
        if not self._chrooted:
            return [*self._run_under, program, *args]
        root, shared = self._programs.rabbitmq_root, (tempfile.gettempdir(), _PROJECT_FOLDER)
        enter = ("unshare", "--mount", "sh", "-c", _ENTER_CHROOT)
        return [*self._run_under, *enter, root, *shared, program, *args]


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
    """A broker that keeps its port and its durable data over `kill`, `stop` and `restart`, until `close`.

    For installed programs alone: `host` is the address to listen on, `neighbour` a running broker that it can be joined
    to, `run_under` a command that runs a command, in a network namespace for example.
    """

    def __init__(
        self,
        *,
        servers: Servers | None = None,
        extra_config: str = "",
        host: str = LOOPBACK,
        port: int = 0,
        neighbour: RabbitMq | None = None,
        run_under: Sequence[str] = (),
    ) -> None:
        self._servers = servers or provide_servers()
        self._extra_config = extra_config
        self._neighbour = neighbour
        self._run_under = run_under
        self._folder: Path | None = None
        self._node: _Node | None = None
        self._reservation: socket.socket | None = None
        self.host = host
        #: chosen at the first start when it is 0
        self.port = port
        #: of the server, as it introduces itself; empty before the first start
        self.version = ""

    def __enter__(self) -> RabbitMq:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def node_name(self) -> str:
        """The node's name in its cluster."""
        node = self._launched_node()
        assert isinstance(node, _PrivateNode)
        return node.name

    @property
    def running(self) -> bool:
        """Whether the node's process is alive."""
        return self._node is not None and self._node.running

    def launch(self) -> None:
        """Begin to boot and return at once; `wait_ready` has to follow."""
        if self._node is None:
            self._folder = processes.make_folder("rabbitmq")
            if sys.platform == "linux" and isinstance(self._servers, Programs) and not self._run_under:
                # ours until the end: a node takes seconds to boot, and a port that was merely free may be gone by then
                self._reservation = bound_socket(self.port, host=self.host)
                self.port = self._reservation.getsockname()[1]
            self.port = self.port or processes.free_port()
            self._node = self._make_node(self._servers, self._folder)
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
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None

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
            host=self.host,
            port=self.port,
            virtual_host=vhost,
            credentials=pika.PlainCredentials(username, password),
            heartbeat=0,
            socket_timeout=CONNECT_TIMEOUT_S,
            stack_timeout=CONNECT_TIMEOUT_S,
            blocked_connection_timeout=CONNECT_TIMEOUT_S,
        )
        return pika.BlockingConnection(parameters)

    def _make_node(self, servers: Servers, folder: Path) -> _Node:
        if isinstance(servers, Containers):
            return _ContainerNode(servers, folder=folder, port=self.port, extra_config=self._extra_config)
        neighbour = self._neighbour._node if self._neighbour else None
        assert neighbour is None or isinstance(neighbour, _PrivateNode)
        return _PrivateNode(
            servers,
            folder=folder,
            host=self.host,
            port=self.port,
            extra_config=self._extra_config,
            neighbour=neighbour,
            run_under=self._run_under,
        )

    def _launched_node(self) -> _Node:
        if self._node is None:
            raise RuntimeError("this RabbitMq was not started")
        return self._node

    def _accepts_login(self) -> bool:
        if not processes.accepts_connections(self.port, host=self.host):
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
