"""The servers that the fakes are held against."""

from __future__ import annotations

from tests.servers import rabbitmq, redis_server, servers

__all__ = ["rabbitmq", "redis_server", "servers"]
