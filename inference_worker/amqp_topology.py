"""The queue, the dead-letter exchange, the dead-letter queue and their binding: declared, or taken as they are.

Runs on the listener thread. Each declaration has a channel of its own, since a refused one closes its channel and with
it every delivery tag given out there. Source: design section 6, field reports R15, R16.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pika.exceptions

from inference_worker.errors import BrokerError, BrokerUnusable

logger = logging.getLogger(__name__)

#: not found, no right to configure, exists with other arguments
_NOT_FOUND, _REFUSED, _INEQUIVALENT = 404, 403, 406
#: the broker drops a dead letter silently when its exchange or queue is missing, so we look again before a reject; not
#: before each of a flood of malformed ones
_DEAD_LETTER_FRESH_S = 1.0
#: arguments with which a queue drops messages by itself
_DROPPING_ARGUMENTS = ("x-message-ttl", "x-max-length", "x-expires")


@dataclass(frozen=True, slots=True)
class TopologyNames:
    """What is declared under which name."""

    queue: str
    queue_type: str
    dlx: str
    dlq: str
    dlx_routing_key: str


class Topology:
    """Declares at every connect. Owned by the listener thread."""

    def __init__(self, names: TopologyNames) -> None:
        self._names = names
        self._said: set[str] = set()
        self._dead_letter_declared_at = float("-inf")

    def declare(self, connection: Any, *, now: float) -> bool:
        """Declare everything; True when the queue is not as we want it, so that a reject has to be a confirmed copy.

        Raises:  BrokerError when there is no queue and we may not make one; pika's errors when the link is lost
        """
        self._declare_dead_letter(connection, now=now)
        names = self._names
        arguments = {"x-dead-letter-exchange": names.dlx, "x-dead-letter-routing-key": names.dlx_routing_key}
        arguments |= self._type_arguments
        return not self._ensure(
            connection,
            f"queue {names.queue}",
            lambda channel: channel.queue_declare(names.queue, durable=True, arguments=arguments),
            lambda channel: channel.queue_declare(names.queue, passive=True),
        )

    @property
    def _type_arguments(self) -> dict[str, str]:
        return {"x-queue-type": self._names.queue_type} if self._names.queue_type else {}

    def ensure_dead_letter(self, connection: Any, *, now: float) -> None:
        """Declare the dead-letter side again unless that was done in the last second; done before each reject.

        Raises:  BrokerError, pika's errors when the link is lost
        """
        if now - self._dead_letter_declared_at > _DEAD_LETTER_FRESH_S:
            self._declare_dead_letter(connection, now=now)

    def _declare_dead_letter(self, connection: Any, *, now: float) -> None:
        names = self._names
        self._ensure(
            connection,
            f"exchange {names.dlx}",
            lambda channel: channel.exchange_declare(names.dlx, "direct", durable=True),
            lambda channel: channel.exchange_declare(names.dlx, passive=True),
        )
        self._ensure(
            connection,
            f"queue {names.dlq}",
            # of the type of the other queue: a classic one is whole on one node, and with that node gone a declaration
            # is refused or hangs, so that nobody could consume from a quorum queue that is well
            lambda channel: channel.queue_declare(names.dlq, durable=True, arguments=self._type_arguments),
            lambda channel: channel.queue_declare(names.dlq, passive=True),
        )
        try:
            _on_channel(connection, lambda channel: channel.queue_bind(names.dlq, names.dlx, names.dlx_routing_key))
        except pika.exceptions.ChannelClosedByBroker as err:
            if err.reply_code != _REFUSED:
                raise BrokerError(f"cannot bind {names.dlq} to {names.dlx}: {err.reply_text}") from err
            self._warn(f"binding of {names.dlq}", err.reply_text)
        self._dead_letter_declared_at = now

    def _ensure(self, connection: Any, what: str, declare: Callable[[Any], Any], look: Callable[[Any], Any]) -> bool:
        """Declare; where the broker refuses, see that it exists and take it as it is. True when it is as we want it."""
        try:
            _on_channel(connection, declare)
        except pika.exceptions.ChannelClosedByBroker as err:
            if err.reply_code not in (_REFUSED, _INEQUIVALENT):
                raise BrokerError(f"cannot declare {what}: {err.reply_code} {err.reply_text}") from err
            self._warn(what, err.reply_text)
        else:
            return True
        try:
            _on_channel(connection, look)
        except pika.exceptions.ChannelClosedByBroker as err:
            raise BrokerUnusable(f"{what} does not exist and we may not declare it: {err.reply_text}") from err
        return False

    def _warn(self, what: str, reply_text: str) -> None:
        # once: at every reconnect it would be noise
        if what in self._said:
            return
        self._said.add(what)
        extra = {"event": "topology_taken_as_is", "object": what, "reply": reply_text}
        drops = any(limit in reply_text for limit in _DROPPING_ARGUMENTS)
        logger.warning(
            "%s is taken as it is, the broker refuses our declaration: %s%s",
            what,
            reply_text,
            "; what the queue drops by itself gets no result" if drops else "",
            extra=extra,
        )


def _on_channel(connection: Any, call: Callable[[Any], Any]) -> None:
    channel = connection.channel()
    call(channel)
    channel.close()
