"""Every result that Redis took, in order, from its append-only file.

The file is better than watching Redis: it holds what was written and nothing that was refused, it survives a kill of
Redis, and no write can happen while nobody looks. A thread follows it.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import BinaryIO

from .journal import Write
from .taps import end_of_value, load_command, set_by

_LOOK_AGAIN_S = 0.02
_TTL_WORDS = frozenset({b"PXAT", b"EX", b"PX", b"EXAT"})


class StoreLog:
    """Follows the append-only files of a folder. Safe from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._writes: list[Write] = []
        self._answered: set[str] = set()
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._rest = b""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="store-log", daemon=True)

    def start(self) -> StoreLog:
        self._thread.start()
        return self

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._file is not None:
            self._file.close()

    @property
    def writes(self) -> list[Write]:
        """All writes of results so far."""
        with self._lock:
            return list(self._writes)

    def is_answered(self, request_id: str) -> bool:
        """Whether a result of a request was ever written."""
        return request_id in self._answered

    def forget(self) -> None:
        """Forget what was read; for a run that lasts."""
        with self._lock:
            self._writes, self._answered = [], set()

    def _follow(self) -> None:
        while not self._stop.wait(_LOOK_AGAIN_S):
            while self._read():
                pass

    def _read(self) -> bool:
        """Read what is new; whether there was something."""
        if self._file is None:
            self._path = self._next_path()
            if self._path is None:
                return False
            self._file, self._rest = self._path.open("rb"), b""
        data = self._file.read(1 << 20)
        if data:
            self._understand(self._rest + data)
            return True
        if self._next_path() not in (None, self._path):
            # rewritten: what follows is in the next file
            self._file.close()
            self._file = None
            return True
        if self._rest:
            # a killed Redis cuts off half a command at the end when it starts again
            self._file.seek(-len(self._rest), 1)
            self._rest = b""
        return False

    def _next_path(self) -> Path | None:
        paths = sorted(self._folder.glob("*.incr.aof"), key=lambda path: int(path.name.split(".")[-3]))
        later = [path for path in paths if self._path is None or path.name != self._path.name]
        if self._path is None:
            return paths[0] if paths else None
        number = int(self._path.name.split(".")[-3])
        return next((path for path in later if int(path.name.split(".")[-3]) > number), None)

    def _understand(self, data: bytes) -> None:
        offset, now = 0, time.time()
        while offset < len(data):
            end = end_of_value(data, offset)
            if end is None:
                break
            words = load_command(data[offset:end]) if data[offset : offset + 1] == b"*" else []
            request_id = set_by(words)
            if request_id:
                has_ttl = any(word.upper() in _TTL_WORDS for word in words[3:])
                with self._lock:
                    self._writes.append(Write(request_id, words[2], has_ttl, now))
                    self._answered.add(request_id)
            offset = end
        self._rest = data[offset:]
