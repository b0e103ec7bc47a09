"""Does a busy model move: its token counters, looked at again and again while requests are in work.

Owned by the health thread. Pure but for what it remembers: time comes in as an argument.
Source: design section 7, field reports R47 and R72.
"""

from __future__ import annotations


class StallWatch:
    """Tells a hung engine, whose /health says 200, from one that is only slow."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tokens: float | None = None
        self._moved_at: float | None = None

    def observe(self, now: float, *, in_work_count: int, tokens: float | None) -> float | None:
        """Take one look; return for how many seconds a stalled model has stood still, or None.

        Without requests in work nothing has to move, and without counters nothing can be told. Any change is movement:
        counters that begin at 0 again belong to a model that was restarted.
        """
        if in_work_count == 0 or tokens is None:
            # what begins after this look has the whole time from the next one
            self._tokens = self._moved_at = None
            return None
        if tokens != self._tokens or self._moved_at is None:
            self._tokens, self._moved_at = tokens, now
            return None
        stood_still_s = now - self._moved_at
        return stood_still_s if stood_still_s >= self._timeout_s else None
