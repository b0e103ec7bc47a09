"""How a producer follows a streamed answer: the Redis Stream `infer_stream:<request_id>`, with resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis

#: seconds that one read waits for the next entry
_BLOCK_S = 5.0


@dataclass(frozen=True, slots=True)
class Followed:
    """One entry of the stream."""

    #: the entry's id: follow on behind it after a break
    last_id: str
    #: `chunk`, `restart` (forget what you have: another attempt begins), `done` (the result is stored), `failed`
    kind: str
    #: the model's chunks, in order; of `failed` the result
    data: Any


def follow(results: redis.Redis, request_id: str, *, last_id: str = "0", give_up_after_s: float) -> Iterator[Followed]:
    """Give each entry as it comes, up to the one that ends the stream.

    Units:   give_up_after_s seconds without any entry
    Raises:  TimeoutError
    """
    key, attempt, silent_s = f"infer_stream:{request_id}", None, 0.0
    while silent_s < give_up_after_s:
        found: Any = results.xread({key: last_id}, count=100, block=round(_BLOCK_S * 1000))
        if not found:
            silent_s += _BLOCK_S
            continue
        silent_s = 0.0
        # RESP3 answers with a dict, RESP2 with a list of pairs
        ((_, entries),) = found.items() if isinstance(found, dict) else found
        for entry_id, fields in entries[0] if isinstance(found, dict) else entries:
            last_id, kind = entry_id.decode(), fields[b"type"].decode()
            if attempt not in (None, fields[b"attempt"]) and kind == "chunk":
                # an attempt that was taken over elsewhere may still say a last word
                continue
            attempt = fields[b"attempt"]
            yield Followed(last_id, kind, json.loads(fields[b"data"] or b"null"))
            if kind in ("done", "failed"):
                return
    raise TimeoutError(f"nothing more of {request_id} for {give_up_after_s:g} s")
