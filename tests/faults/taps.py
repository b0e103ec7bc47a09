"""What passes on a worker's three wires, as events: AMQP frames, Redis' commands and replies, HTTP requests.

Each tap belongs to one link; each direction has state of its own, but for the queues between the two directions.
"""

from __future__ import annotations

import re
import struct
from collections import deque
from collections.abc import Iterator

from devstack.proxy import Direction

from .wire_proxy import Event, Piece

_FRAME_HEAD = struct.Struct(">BHI")
_METHOD, _HEADER, _BODY = 1, 2, 3
_PROTOCOL_HEADER_BYTES = 8
_START_OK, _DELIVER, _PUBLISH = (10, 11), (60, 60), (60, 40)
_ACK, _REJECT, _NACK = (60, 80), (60, 90), (60, 120)
REQUEST_ID = re.compile(rb'"request_id"\s*:\s*"([^"]*)"')
_RESULT_KEY = b"infer_resp:"
_PROBE_KEY = b"infer_resp:."
_ATTEMPT = re.compile(rb"\r\nx-request-id:\s*([^\r]+)-([0-9a-f]{8})\r\n", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)


class AmqpTap:
    """A link to the broker.

    Events of the consuming link: `acking` (the worker's ack, nack or reject of a request). Of the short link for a
    copy: `publishing` (the last of the copy), `published` (the broker's confirm).
    """

    def __init__(self) -> None:
        self._rest = dict.fromkeys(Direction, b"")
        self._contents = {direction: _Content() for direction in Direction}
        self._greeted = False
        #: "consumer" or "copies", as the worker names its connections; empty before it has
        self.purpose = ""
        #: request_id of each delivery that is not settled, by its tag
        self._deliveries: dict[int, str] = {}
        self._published: deque[str] = deque()

    def split(self, direction: Direction, data: bytes) -> Iterator[Piece]:
        data = self._rest[direction] + data
        offset = 0
        if direction is Direction.TO_SERVER and not self._greeted and len(data) >= _PROTOCOL_HEADER_BYTES:
            self._greeted = True
            offset = _PROTOCOL_HEADER_BYTES
            yield data[:offset], None
        while len(data) - offset >= _FRAME_HEAD.size:
            kind, _, size = _FRAME_HEAD.unpack_from(data, offset)
            end = offset + _FRAME_HEAD.size + size + 1
            if len(data) < end:
                break
            payload = data[offset + _FRAME_HEAD.size : end - 1]
            yield data[offset:end], self._understand(direction, kind, payload)
            offset = end
        self._rest[direction] = data[offset:]

    def _understand(self, direction: Direction, kind: int, payload: bytes) -> Event | None:
        content = self._contents[direction]
        if kind == _METHOD:
            method = struct.unpack_from(">HH", payload)
            if method in (_DELIVER, _PUBLISH):
                content.begin(method, payload)
                return None
            return self._understand_method(direction, method, payload)
        if kind == _HEADER and content.expect(struct.unpack_from(">Q", payload, 4)[0]):
            return self._end_content(direction, content)
        if kind == _BODY and content.add(payload):
            return self._end_content(direction, content)
        return None

    def _understand_method(self, direction: Direction, method: tuple[int, ...], payload: bytes) -> Event | None:
        if direction is Direction.TO_SERVER and method == _START_OK:
            # the name of the connection ends with its purpose
            self.purpose = "copies" if b" copies" in payload else "consumer"
            return None
        if direction is Direction.TO_SERVER and method in (_ACK, _REJECT, _NACK):
            (tag,) = struct.unpack_from(">Q", payload, 4)
            requeue = {_ACK: False, _REJECT: bool(payload[-1] & 1), _NACK: bool(payload[-1] & 2)}[method]
            detail = "requeue" if requeue else ("ack" if method == _ACK else "reject")
            return Event("acking", self._deliveries.pop(tag, ""), detail)
        if direction is Direction.TO_CLIENT and method == _ACK and self._published:
            return Event("published", self._published.popleft())
        return None

    def _end_content(self, direction: Direction, content: _Content) -> Event | None:
        found = REQUEST_ID.search(content.body)
        request_id = found.group(1).decode() if found else ""
        if direction is Direction.TO_SERVER:
            self._published.append(request_id)
            return Event("publishing", request_id)
        self._deliveries[content.tag] = request_id
        return None


class _Content:
    """A message on its way: method, header, bodies."""

    def __init__(self) -> None:
        self.tag, self.body, self._missing = 0, b"", 0

    def begin(self, method: tuple[int, ...], payload: bytes) -> None:
        self.body = b""
        if method == _DELIVER:
            consumer_tag_bytes = payload[4]
            (self.tag,) = struct.unpack_from(">Q", payload, 5 + consumer_tag_bytes)

    def expect(self, size: int) -> bool:
        """Note the size of the body; whether there is none."""
        self._missing = size
        return size == 0

    def add(self, payload: bytes) -> bool:
        """Add a part of the body; whether it is the last."""
        self.body += payload
        self._missing -= len(payload)
        return self._missing <= 0


class RedisTap:
    """A link to Redis. Events: `storing` (the SET of a result), `stored` (the reply that says that it took)."""

    def __init__(self) -> None:
        self._rest = dict.fromkeys(Direction, b"")
        #: for each command without a reply yet: whose result it sets, or nothing
        self._waiting: deque[str] = deque()

    def split(self, direction: Direction, data: bytes) -> Iterator[Piece]:
        data = self._rest[direction] + data
        offset = 0
        while offset < len(data):
            end = end_of_value(data, offset)
            if end is None:
                break
            value = data[offset:end]
            yield value, self._command(value) if direction is Direction.TO_SERVER else self._reply(value)
            offset = end
        self._rest[direction] = data[offset:]

    def _command(self, value: bytes) -> Event | None:
        request_id = set_by(load_command(value))
        self._waiting.append(request_id)
        return Event("storing", request_id) if request_id else None

    def _reply(self, value: bytes) -> Event | None:
        if value[:1] == b">" or not self._waiting:
            return None  # a push belongs to no command
        request_id = self._waiting.popleft()
        return Event("stored", request_id) if request_id and value.startswith(b"+OK") else None


def end_of_value(data: bytes, offset: int) -> int | None:
    """Return where the RESP value that begins at the offset ends; None when it is not all there yet."""
    line_end = data.find(b"\r\n", offset)
    if line_end < 0:
        return None
    kind, end = data[offset : offset + 1], line_end + 2
    if kind in b"$=!":
        size = int(data[offset + 1 : line_end])
        end = end + size + 2 if size >= 0 else end
        return end if end <= len(data) else None
    if kind in b"*~>%|":
        count = int(data[offset + 1 : line_end]) * (2 if kind in b"%|" else 1)
        for _ in range(count):
            next_end = end_of_value(data, end)
            if next_end is None:
                return None
            end = next_end
    return end


def load_command(value: bytes) -> list[bytes]:
    """Return the words of a command, an array of bulk strings."""
    words, offset = [], value.find(b"\r\n") + 2
    while offset < len(value):
        line_end = value.find(b"\r\n", offset)
        size = int(value[offset + 1 : line_end])
        words.append(value[line_end + 2 : line_end + 2 + size])
        offset = line_end + 2 + size + 2
    return words


def set_by(words: list[bytes]) -> str:
    """Return the request whose result a command sets; empty for any other command."""
    if len(words) < 3 or words[0].upper() != b"SET":
        return ""
    key = words[1]
    return key.removeprefix(_RESULT_KEY).decode() if key.startswith(_RESULT_KEY) and key[:12] != _PROBE_KEY else ""


class HttpTap:
    """A link to the model. Events: `calling` (a request for inference has passed whole; detail: the attempt)."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, direction: Direction, data: bytes) -> Iterator[Piece]:
        if direction is Direction.TO_CLIENT:
            yield data, None
            return
        yield data, None
        self._rest += data
        while (head_end := self._rest.find(b"\r\n\r\n")) >= 0:
            head = self._rest[: head_end + 2]
            length = _LENGTH.search(head)
            end = head_end + 4 + (int(length.group(1)) if length else 0)
            if len(self._rest) < end:
                return
            self._rest = self._rest[end:]
            attempt = _ATTEMPT.search(head)
            if attempt is not None:
                request_id, number = attempt.group(1).decode(), attempt.group(2).decode()
                yield b"", Event("calling", request_id, f"{request_id}-{number}")
