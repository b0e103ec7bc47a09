"""Server-sent events: a byte stream, however it was cut into pieces, → the data of each event.

Pure: any thread, no I/O, no clock. Knows nothing of what an event says.
Source: the WHATWG's HTML standard, section 9.2.
"""

from __future__ import annotations

import re

from inference_worker.errors import HttpTooLarge

_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventStreamParser:
    """Takes an event stream apart, however it was cut into pieces. Owned by one thread; of no use after an error."""

    def __init__(self, *, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        #: what may become a BOM; None once the stream has begun
        self._head: bytearray | None = bytearray()
        #: a line whose end has not come
        self._line = bytearray()
        #: the last byte was a CR, which ended a line: an LF now belongs to it
        self._is_after_cr = False
        #: data lines of the event that is not over; None when it has none
        self._data: bytearray | None = None

    def feed(self, data: bytes) -> list[bytes]:
        r"""Take the next bytes, and return the data of each event that they complete.

        Shapes:  several `data` lines are joined by \n; an event without one is none; `event`, `id` and `retry` are
                 skipped; UTF-8 is not looked at
        Raises:  HttpTooLarge (one line, or the data of one event, is longer than max_event_bytes)
        Source:  HTML standard, section 9.2.6
        """
        data = self._after_bom(data)
        if data and self._is_after_cr:
            data = data.removeprefix(b"\n")
            self._is_after_cr = False
        if not data:
            return []
        self._is_after_cr = data.endswith(b"\r")
        *lines, rest = _LINE_END.split(data)
        events: list[bytes] = []
        for line in lines:
            if self._line:
                self._line += line
                line = bytes(self._line)
                self._line.clear()
            self._check(len(line))
            if line:
                self._read_field(line)
            elif self._data is not None:
                events.append(bytes(self._data))
                self._data = None
        self._line += rest
        self._check(len(self._line))
        return events

    def _after_bom(self, data: bytes) -> bytes:
        if self._head is None:
            return data
        self._head += data
        if len(self._head) < len(_BOM) and _BOM.startswith(self._head):
            return b""
        begun = bytes(self._head).removeprefix(_BOM)
        self._head = None
        return begun

    def _read_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name != b"data":
            return
        value = value.removeprefix(b" ")
        if self._data is None:
            self._data = bytearray(value)
        else:
            self._data += b"\n" + value
        self._check(len(self._data))

    def _check(self, have_bytes: int) -> None:
        if have_bytes > self._max_event_bytes:
            raise HttpTooLarge(f"an event of the stream is longer than {self._max_event_bytes} bytes")
