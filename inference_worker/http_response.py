"""The head of an HTTP/1.1 answer, taken apart: http.client has a parser of e-mail do it, a sixth of a message's CPU.

Runs on the thread whose connection the answer comes from. Knows http.client, which still reads the body.
Source: RFC 9112, sections 4 to 6 and 9.
"""

from __future__ import annotations

import re
import socket
from http.client import BadStatusLine, HTTPException, HTTPResponse, IncompleteRead, RemoteDisconnected
from typing import Any

#: as much as http.client takes
_MAX_LINE_BYTES = 65_536
_MAX_FIELDS = 100
_STATUS_LINE = re.compile(rb"HTTP/1\.(\d) +([1-9]\d\d)(?:[ \t][^\r\n]*)?\r?\n")
#: the answer to what nobody asked for, and the one interim status that no final one follows
_SWITCHING_PROTOCOLS = 101
#: that, No Content, Not Modified: there is no body to be cut off
_WITHOUT_BODY = frozenset({_SWITCHING_PROTOCOLS, 204, 304})
#: 18 digits: more than any answer, and no work to read
_LENGTH = re.compile(r"\d{1,18}", re.ASCII)


class Response(HTTPResponse):
    """One answer, from its first byte to its last."""

    def __init__(self, stream: socket.socket, *, method: str) -> None:
        super().__init__(stream, method=method)
        #: names in lower case; the values of one that came twice are joined by commas
        self.fields: dict[str, str] = {}
        #: False: the body ends with the connection, so nothing tells whether it was cut off
        self.is_length_known = False

    def begin(self) -> None:
        """Read the head.

        Raises:  RemoteDisconnected (nothing came), IncompleteRead (a part of it), HTTPException (no HTTP), OSError
        """
        line = self.fp.readline(_MAX_LINE_BYTES + 1)
        if not line:
            raise RemoteDisconnected("closed without an answer")
        minor, status = _read_status(line)
        fields = _read_fields(self.fp)
        while status < 200 and status != _SWITCHING_PROTOCOLS:
            # 100 Continue, 102 Processing, 103 Early Hints: the answer follows
            minor, status = _read_status(_read_line(self.fp))
            fields = _read_fields(self.fp)
        self._take(minor, status, fields)

    def _take(self, minor: int, status: int, fields: dict[str, str]) -> None:
        self.fields = fields
        self.code = self.status = status
        self.version = 11 if minor else 10
        self.chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        self.chunk_left = None
        self.length = None
        if status in _WITHOUT_BODY:
            self.length = 0
        elif not self.chunked and "content-length" in fields:
            # the same one twice is one
            found = _LENGTH.fullmatch(fields["content-length"].partition(",")[0])
            self.length = int(found[0]) if found else None
        self.is_length_known = self.chunked or self.length is not None
        options = fields.get("connection", "").lower()
        is_kept = "close" not in options if minor else "keep-alive" in options
        self.will_close = not is_kept or not self.is_length_known


def _read_line(stream: Any) -> bytes:
    line: bytes = stream.readline(_MAX_LINE_BYTES + 1)
    if not line.endswith(b"\n"):
        if len(line) > _MAX_LINE_BYTES:
            raise HTTPException("a line of the head is too long")
        # http.client would take a head that stops short for a whole one
        raise IncompleteRead(b"")
    return line


def _read_status(line: bytes) -> tuple[int, int]:
    """Return the minor version and the status."""
    found = _STATUS_LINE.fullmatch(line)
    if found is None:
        # not quoted: who knows what a peer says
        raise BadStatusLine("no status line of HTTP/1.x")
    return int(found[1]), int(found[2])


def _read_fields(stream: Any) -> dict[str, str]:
    fields: dict[str, str] = {}
    name = ""
    for _ in range(_MAX_FIELDS + 1):
        text = _read_line(stream).decode("latin-1")
        before, colon, value = text.partition(":")
        if text[0] in " \t" and name:
            # folded (RFC 9112, section 5.2)
            fields[name] = f"{fields[name]} {text.strip()}"
        elif colon:
            name, value = before.strip().lower(), value.strip()
            fields[name] = f"{fields[name]}, {value}" if name in fields else value
        elif text in ("\r\n", "\n"):
            return fields
        # else: a line that is no field costs no answer
    raise HTTPException("the head has too many fields")
