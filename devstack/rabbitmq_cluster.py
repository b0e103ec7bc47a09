"""A private RabbitMQ cluster: three nodes on one port of 127.0.0.1, 127.0.0.2 and 127.0.0.3, as a host list has them.

Linux, where the whole of 127.0.0.0/8 is loopback, and installed programs. Safe from any thread, one call at a time.
"""

from __future__ import annotations

import contextlib
import socket
from types import TracebackType

from devstack.install import Programs
from devstack.rabbitmq import RabbitMq

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


class RabbitMqCluster:
    """Three brokers that are one. Each can be killed and started again, and finds back by itself."""

    def __init__(self, *, servers: Programs) -> None:
        self.port = _free_port()
        first = RabbitMq(servers=servers, host=HOSTS[0], port=self.port)
        others = [RabbitMq(servers=servers, host=host, port=self.port, neighbour=first) for host in HOSTS[1:]]
        self.nodes = [first, *others]

    def __enter__(self) -> RabbitMqCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> RabbitMqCluster:
        """Boot all nodes and join them, which takes half a minute."""
        first, *others = self.nodes
        try:
            first.launch()  # it owns what the others find each other by
            for node in others:
                node.launch()
            for node in self.nodes:
                node.wait_ready()
            for node in others:
                node.ctl("stop_app")
                node.ctl("join_cluster", first.node_name)
                node.ctl("start_app")
                node.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End all nodes; the first one last, whose epmd the others use."""
        for node in reversed(self.nodes):
            node.close()


def _free_port() -> int:
    """Return a port that is free on every host."""
    while True:
        with contextlib.ExitStack() as probes:
            port = 0
            try:
                for host in HOSTS:
                    probe = probes.enter_context(socket.socket())
                    probe.bind((host, port))
                    port = probe.getsockname()[1]
            except OSError:
                continue
            return port
