"""Pauses that double from one failure to the next, up to a limit, and begin anew after a success.

Pure but for what it remembers. Not locked: of two failures at once one may not be counted, which nobody notices.
"""

from __future__ import annotations

#: beyond this the limit has long been reached, and a power of two would grow with every failure of a long outage
_MAX_DOUBLINGS = 30


class GrowingPause:
    """1, 2, 4 ... times `first_s`, at most `max_s`; the first `free_count` failures cost none."""

    def __init__(self, first_s: float, *, max_s: float, free_count: int = 0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._free_count = free_count
        self._failures = 0

    def next_s(self) -> float:
        """Count a failure; return the pause after it, in seconds."""
        doublings = self._failures - self._free_count
        self._failures = min(self._failures + 1, self._free_count + _MAX_DOUBLINGS)
        return 0.0 if doublings < 0 else min(self._first_s * 2.0**doublings, self._max_s)

    def reset(self) -> None:
        """Forget the failures: something went well."""
        self._failures = 0
