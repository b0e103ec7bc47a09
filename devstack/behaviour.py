"""How a server of ours answers, told as a value: late, in pieces, not at all, or with something else.

`deliver` is the one place that carries a behaviour out on the wire; it runs on the connection's thread.
"""

from __future__ import annotations

import enum
import json
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from devstack.http_server import Exchange, encode_chunk, encode_head

_BOMB_BLOCK_BYTES = 1 << 20
#: seconds for the client to read what it got: a RST may throw away what it has not
_READ_BEFORE_RESET_S = 0.1


class Fault(enum.Enum):
    """What goes wrong on the wire."""

    NONE = "none"  #: the answer arrives whole
    RESET = "reset"  #: RST before the first byte of the answer
    RESET_BODY = "reset_body"  #: half of the body, then a RST: unlike RESET never taken for an idle connection's end
    DROP = "drop"  #: an orderly close before the first byte of the answer
    CUT_OFF = "cut_off"  #: half of the body, then an orderly close: short of its length, or chunked without an end
    STALL = "stall"  #: half of the body, then nothing for `stall_s`, then the rest
    TRICKLE = "trickle"  #: the body byte by byte, `trickle_s` apart
    RAW = "raw"  #: the bytes of `raw` instead of an HTTP answer, then a close
    GZIP_BOMB = "gzip_bomb"  #: a small gzip body that unpacks to `bomb_bytes`
    ENDLESS = "endless"  #: a body of `bomb_bytes`, with its length or in chunks, for as long as somebody reads it


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """Everything that can be told about one answer. The fields of the last group concern the model server alone."""

    fault: Fault = Fault.NONE
    delay_s: float = 0.0  #: before the status line
    status: int | None = None  #: instead of the server's own
    body: str | None = None  #: instead of the server's own
    headers: Mapping[str, str] = field(default_factory=dict)  #: added to the server's own
    chunked: bool = False  #: send the body in chunks, without a length
    after_events: int = 1  #: how many events of a stream go out before a fault in the body strikes
    stall_s: float = 3600.0
    trickle_s: float = 0.05
    raw: str = ""  #: latin-1
    bomb_bytes: int = 100_000_000

    token_delay_s: float = 0.0  #: per completion token; all of it before the status line when not streaming
    content: str | None = None  #: the text of the answer
    completion_tokens: int | None = None  #: the length of the answer
    finish_reason: str | None = None
    cached_tokens: int | None = None  #: reported as prompt_tokens_details.cached_tokens

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Behaviour:
        """Build it from JSON: the fields by name, `fault` by its value, `body` as text or as any JSON value.

        Raises:  ValueError that names what is unknown
        """
        known = {each.name for each in fields(cls)}
        if unknown := set(document) - known:
            raise ValueError(f"unknown in a behaviour: {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
        values = dict(document)
        if "fault" in values:
            values["fault"] = Fault(values["fault"])
        if not isinstance(values.get("body"), str | None):
            values["body"] = json.dumps(values["body"])
        return cls(**values)


@dataclass(frozen=True)
class Answer:
    """What a server means to say, before the behaviour has its way."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    events: Iterator[bytes] | None = None  #: pieces that follow one another in time, instead of the body


class Script:
    """What a server was told: a default, and rules for requests that hold a text. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._default = Behaviour()
        self._rules: list[_Rule] = []

    def tell(self, behaviour: Behaviour, *, match: str | None = None, times: int | None = None) -> None:
        """Set the default, or add a rule for the next `times` (None: all) requests whose body holds `match`."""
        with self._lock:
            if match is None:
                self._default = behaviour
            else:
                self._rules.append(_Rule(match.encode(), times, behaviour))

    def forget(self) -> None:
        """Back to good behaviour."""
        with self._lock:
            self._default = Behaviour()
            self._rules.clear()

    def behaviour_for(self, body: bytes) -> Behaviour:
        """Return what the first fitting rule says, and use it up by one; else the default."""
        with self._lock:
            for index, rule in enumerate(self._rules):
                if rule.match not in body:
                    continue
                if rule.times is not None:
                    self._rules[index] = replace(rule, times=rule.times - 1)
                    if rule.times == 1:
                        del self._rules[index]
                return rule.behaviour
            return self._default


@dataclass(frozen=True)
class _Rule:
    match: bytes
    times: int | None
    behaviour: Behaviour


def deliver(exchange: Exchange, answer: Answer, behaviour: Behaviour) -> None:
    """Send an answer as the behaviour wants it.

    Raises:  ClientGone when the client hung up before the end
    """
    exchange.pause(behaviour.delay_s)
    connection = exchange.connection
    match behaviour.fault:
        case Fault.RESET:
            exchange.ends_connection = True
            connection.reset()
            return
        case Fault.DROP:
            exchange.ends_connection = True
            return
        case Fault.RAW:
            exchange.ends_connection = True
            connection.send(behaviour.raw.encode("latin-1"))
            return
        case Fault.GZIP_BOMB:
            bomb = gzip_bomb(behaviour.bomb_bytes)
            exchange.respond(200, bomb, headers={"Content-Type": "application/json", "Content-Encoding": "gzip"})
            return
        case Fault.ENDLESS:
            exchange.ends_connection = True
            send_endless(exchange, behaviour)
            return
        case _:
            pass
    if behaviour.body is not None:
        answer = replace(answer, body=behaviour.body.encode(), events=None)
    status = behaviour.status if behaviour.status is not None else answer.status
    headers = {**answer.headers, **behaviour.headers}
    if answer.events is not None:
        send_events(exchange, status, headers, answer.events, behaviour)
    else:
        send_body(exchange, status, headers, answer.body, behaviour)


def send_body(exchange: Exchange, status: int, headers: Mapping[str, str], body: bytes, behaviour: Behaviour) -> None:
    """Send a body that is whole from the start."""
    if behaviour.chunked:
        send_events(exchange, status, headers, iter([body[: len(body) // 2], body[len(body) // 2 :]]), behaviour)
        return
    connection = exchange.connection
    head = encode_head(status, {"Content-Length": str(len(body)), **headers})
    half = len(body) // 2
    match behaviour.fault:
        case Fault.CUT_OFF:
            exchange.ends_connection = True
            connection.send(head + body[:half])
        case Fault.RESET_BODY:
            exchange.ends_connection = True
            connection.send(head + body[:half])
            exchange.pause(_READ_BEFORE_RESET_S)
            connection.reset()
        case Fault.STALL:
            connection.send(head + body[:half])
            exchange.pause(behaviour.stall_s)
            connection.send(body[half:])
        case Fault.TRICKLE:
            connection.send(head)
            for offset in range(len(body)):
                exchange.pause(behaviour.trickle_s)
                connection.send(body[offset : offset + 1])
        case _:
            connection.send(head + body)


def send_events(
    exchange: Exchange, status: int, headers: Mapping[str, str], events: Iterator[bytes], behaviour: Behaviour
) -> None:
    """Send pieces as chunks while they come. A fault strikes after some pieces: there is no half of what is to come."""
    connection = exchange.connection
    connection.send(encode_head(status, {"Transfer-Encoding": "chunked", **headers}))
    for number, event in enumerate(events):
        if number == behaviour.after_events and behaviour.fault is Fault.CUT_OFF:
            exchange.ends_connection = True
            return
        if number == behaviour.after_events and behaviour.fault is Fault.RESET_BODY:
            exchange.ends_connection = True
            exchange.pause(_READ_BEFORE_RESET_S)
            connection.reset()
            return
        if number == behaviour.after_events and behaviour.fault is Fault.STALL:
            exchange.pause(behaviour.stall_s)
        if not event:
            continue
        if behaviour.fault is Fault.TRICKLE:
            for offset in range(len(event)):
                exchange.pause(behaviour.trickle_s)
                connection.send(encode_chunk(event[offset : offset + 1]))
        else:
            connection.send(encode_chunk(event))
    connection.send(encode_chunk(b""))


def send_endless(exchange: Exchange, behaviour: Behaviour) -> None:
    """Send a JSON text that is longer than anybody should read."""
    framing = {"Transfer-Encoding": "chunked"} if behaviour.chunked else {"Content-Length": str(behaviour.bomb_bytes)}
    exchange.connection.send(encode_head(200, {"Content-Type": "application/json", **framing}))
    block = b'["' + b"0" * _BOMB_BLOCK_BYTES
    for _ in range(behaviour.bomb_bytes // len(block)):
        exchange.connection.send(encode_chunk(block) if behaviour.chunked else block)


def gzip_bomb(size_bytes: int) -> bytes:
    """Return gzip bytes that unpack to a JSON text of about that size."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    parts = [packer.compress(b'{"bomb": "')]
    for _ in range(max(1, size_bytes // _BOMB_BLOCK_BYTES)):
        parts.append(packer.compress(b"0" * _BOMB_BLOCK_BYTES))
    parts += [packer.compress(b'"}'), packer.flush()]
    return b"".join(parts)
