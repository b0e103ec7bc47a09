"""Failures of one neighbour in the log: when they begin, at every nth in a row, and when they end.

One thread at a time. An outage of an hour is a few lines, and none of them is missed.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Trouble:
    """The row of failures of one neighbour, logged as `<event_prefix>_failed` and `<event_prefix>_recovered`."""

    def __init__(self, event_prefix: str, *, neighbour: str, repeats: int) -> None:
        self._event_prefix = event_prefix
        self._neighbour = neighbour
        self._repeats = repeats
        self._in_a_row = 0
        self.failures_total = 0

    def failed(self, reason: str, **facts: int | None) -> None:
        self._in_a_row += 1
        self.failures_total += 1
        if self._in_a_row == 1 or self._in_a_row % self._repeats == 0:
            extra = {"neighbour": self._neighbour, "reason": reason, "failures": self._in_a_row, **facts}
            logger.warning(
                "%s fails: %s (%d in a row)",
                self._neighbour,
                reason,
                self._in_a_row,
                extra={"event": f"{self._event_prefix}_failed", **extra},
            )

    def ended(self) -> None:
        if self._in_a_row:
            logger.info(
                "%s works again after %d failures",
                self._neighbour,
                self._in_a_row,
                extra={
                    "event": f"{self._event_prefix}_recovered",
                    "neighbour": self._neighbour,
                    "failures": self._in_a_row,
                },
            )
        self._in_a_row = 0
