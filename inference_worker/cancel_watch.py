"""Ends calls whose answer nobody wants any more: asks Redis, for all calls that run at once, every so often.

A thread of its own, `cancel-watch`: Redis may take seconds to answer, and neither a probe nor the supervisor may wait
for that. Knows no library; the look and the register of calls are handed in.
Source: design section 8 "Cancelling".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from inference_worker.deadlines import Deadlines
from inference_worker.errors import StoreDown

logger = logging.getLogger(__name__)


class CancelWatch:
    """Looks every `interval_s` seconds, once for all that runs. Lives as long as the process."""

    def __init__(
        self, *, interval_s: float, deadlines: Deadlines, find_cancelled: Callable[[set[str]], set[str]]
    ) -> None:
        self._interval_s = interval_s
        self._deadlines = deadlines
        self._find_cancelled = find_cancelled
        #: never set: a wait that a debugger or a test can end
        self._wakeup = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cancel-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def look(self) -> None:
        """Cancel what is to be cancelled of what runs now. Asks nothing while nothing runs."""
        running = self._deadlines.running_names()
        if not running:
            return
        try:
            cancelled = self._find_cancelled(running)
        except StoreDown as err:
            # the slots find that out as well, and hold; here the next look is soon
            logger.debug("no look for cancels: %s", err, extra={"event": "cancels_unknown"})
            return
        self._deadlines.cancel(cancelled)

    def _run(self) -> None:
        while not self._wakeup.wait(self._interval_s):
            self.look()
