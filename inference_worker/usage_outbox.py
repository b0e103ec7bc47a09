"""Usage events on disk until Croesus has accepted them, so that a killed worker loses no bill.

Safe from any thread. The only file that knows sqlite3. An event is in the file before its message is acked; the next
worker with the same file sends what the last one could not. A killed process loses nothing that was written; a host
that loses its power may.
Source: design section 10 ("Usage is money"); field report R66.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterable

from inference_worker.documents import UsageEvent, decode_usage, encode_usage
from inference_worker.errors import OutboxUnusable

logger = logging.getLogger(__name__)

_TABLE = "CREATE TABLE IF NOT EXISTS usage (number INTEGER PRIMARY KEY AUTOINCREMENT, event BLOB)"
#: a failing disk is said at the first of so many failures
_SAY_EVERY = 1000


class UsageOutbox:
    """One file, for one worker at a time. Opened before the services start; closed with the process."""

    def __init__(self, path: str) -> None:
        """Open or make the file.

        Raises:  OutboxUnusable
        """
        self._lock = threading.Lock()
        self._failures = 0
        try:
            self._file = sqlite3.connect(path, timeout=0.5, isolation_level=None, check_same_thread=False)
            # two workers with one file would send each other's events, and remove them
            self._file.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = NORMAL")
            self._file.execute(_TABLE)
            self._file.execute("BEGIN EXCLUSIVE")
            self._file.execute("COMMIT")
        except sqlite3.Error as err:
            raise OutboxUnusable(f"cannot be used ({err}); each worker needs a file of its own") from err

    def load(self) -> list[tuple[int, UsageEvent]]:
        """Read what an earlier worker left, oldest first: (number, event).

        Raises:  OutboxUnusable
        """
        try:
            with self._lock:
                rows = self._file.execute("SELECT number, event FROM usage ORDER BY number").fetchall()
        except sqlite3.Error as err:
            raise OutboxUnusable(f"cannot be read ({err})") from err
        events = ((number, decode_usage(event)) for number, event in rows)
        return [(number, event) for number, event in events if event is not None]

    def put(self, event: UsageEvent) -> int | None:
        """Write one event; its number, or None when the disk does not take it: then it is in memory only."""
        try:
            with self._lock:
                return self._file.execute("INSERT INTO usage (event) VALUES (?)", (encode_usage(event),)).lastrowid
        except sqlite3.Error as err:
            self._say(err)
            return None

    def remove(self, numbers: Iterable[int]) -> None:
        """Forget events; what cannot be removed is sent once more by the next worker, under the same id."""
        try:
            with self._lock:
                self._file.executemany("DELETE FROM usage WHERE number = ?", ((number,) for number in numbers))
        except sqlite3.Error as err:
            self._say(err)

    def _say(self, err: sqlite3.Error) -> None:
        if self._failures % _SAY_EVERY == 0:
            extra = {"event": "usage_outbox_failed"}
            logger.error("USAGE_OUTBOX_PATH cannot be written, a kill would lose bills: %s", err, extra=extra)
        self._failures += 1
