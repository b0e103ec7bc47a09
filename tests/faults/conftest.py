"""The one broker of the run, for the tests that are marked `integration`."""

from __future__ import annotations

from tests.servers import rabbitmq, servers

__all__ = ["rabbitmq", "servers"]
