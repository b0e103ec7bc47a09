"""The requests that run in this worker: a second delivery of one waits for the first, and takes its outcome.

Safe from any thread. It happens when a session was lost while a call ran, and when a producer publishes a request
twice: the model must not compute the same answer beside itself.
Source: design section 5, "a second delivery of a request that runs in this worker".
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from inference_worker.disposition import Outcome


@dataclass(slots=True, eq=False)
class Run:
    """One request while it runs."""

    request_id: str
    #: of the delivery that runs: a retry copy is another attempt, which takes no outcome from the one before
    retry_count: int
    #: set once when it has ended
    ended: threading.Event = field(default_factory=threading.Event)
    #: what it came to; None when it was given back without one
    outcome: Outcome | None = None


class RunningRequests:
    """Which requests run, by request_id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}

    def begin(self, request_id: str, *, retry_count: int) -> tuple[Run, bool]:
        """Begin a run, or find the one that has begun: (run, whether it is ours)."""
        with self._lock:
            found = self._runs.get(request_id)
            if found is not None:
                return found, False
            run = self._runs[request_id] = Run(request_id, retry_count)
            return run, True

    def end(self, run: Run, outcome: Outcome | None) -> None:
        """End our run and let those who wait for it go on."""
        with self._lock:
            del self._runs[run.request_id]
        run.outcome = outcome
        run.ended.set()
