"""A delivery, the session it belongs to, and its settlement.

Pure: words only. A delivery tag means nothing outside its session (laws 3 and 4 of the design): after a reconnect the
broker numbers from 1 again, and an old tag would ack somebody else's message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inference_worker.disposition import Disposition


@dataclass(slots=True, eq=False)
class Session:
    """One life of the AMQP connection. Written by the listener thread, read by slots."""

    number: int
    #: dead-letter by a confirmed copy: the queue is not ours, and a nack might drop the message there
    rejects_by_copy: bool = False
    #: once True, a settlement of this session does nothing
    ended: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """One message as the broker handed it over."""

    session: Session
    tag: int
    redelivered: bool
    body: bytes
    #: the properties as the AMQP library gave them; `message_publisher` alone looks inside
    properties: Any
    headers: Mapping[Any, Any]
    #: monotonic
    arrived_at: float

    @property
    def retry_count(self) -> int:
        return read_retry_count(self.headers.get("x-retry-count"))

    @property
    def is_repeat(self) -> bool:
        """Whether an attempt may have come before this one."""
        return self.redelivered or self.retry_count > 0


@dataclass(frozen=True, slots=True, eq=False)
class Settlement:
    """A disposition that is ready to be carried out on the channel: what it rests on is stored or confirmed."""

    delivery: Delivery
    disposition: Disposition
    #: the broker has confirmed a copy, in the queue or in the dead-letter exchange; without it no copy earns an ack
    copy_confirmed: bool = False
    #: the broker will never take the copy for the dead letters: a nack has to do, wherever the queue sends it
    copy_refused: bool = False
    #: fields of the one log line, and of nothing else
    log_fields: dict[str, Any] = field(default_factory=dict)


def read_retry_count(value: Any) -> int:
    """Read `x-retry-count` as any producer may have written it; junk, booleans and negative numbers are 0.

    Source: field report R27. The number is capped, since a copy has to carry it as a 64-bit integer.
    """
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if isinstance(value, str):
        text = value.strip()
        if not text.isascii() or not text.isdigit():
            return 0
        value = int(text) if len(text) <= 9 else 10**9
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        return 0
    return min(int(min(value, 1e9)), 10**9)
