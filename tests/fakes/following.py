"""What one who follows a streamed answer has read when it ends, by the rules of the README."""

from __future__ import annotations

from typing import Any


def followed(client: Any, request_id: str = "r-1") -> tuple[bytes, str, bytes]:
    """Return the pieces, how the stream ended, and whose end it was. Of several attempts the last restart's counts."""
    attempt, pieces = b"", []
    for _, fields in client.xrange(f"infer_stream:{request_id}"):
        kind = fields[b"type"].decode()
        if kind == "restart" or not attempt:
            attempt, pieces = fields[b"attempt"], []
        if kind == "chunk" and fields[b"attempt"] == attempt:
            pieces.append(fields[b"data"][1:-1])
        if kind in ("done", "failed"):
            return b",".join(pieces), kind, fields[b"attempt"]
    raise AssertionError("the stream has no end")
