"""The requests that run in this worker: a second delivery of one waits for the first, and takes its outcome.

Safe from any thread. It happens when a session was lost while a call ran, and when a producer publishes a request
twice: the model must not compute the same answer beside itself.
Source: design section 5, "a second delivery of a request that runs in this worker".
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from inference_worker.disposition import Outcome


@dataclass(slots=True, eq=False)
class Run:
    """One request while it runs."""

    request_id: str
    #: of the delivery that runs: a retry copy is another attempt, which takes no outcome from the one before
    retry_count: int
    is_ended: bool = False
    #: what it came to; None when it was given back without one
    outcome: Outcome | None = None


class RunningRequests:
    """Which requests run, by request_id."""

    def __init__(self) -> None:
        #: one for all: an event in each run was 3 % of a message's CPU, and hardly any has somebody who waits for it
        self._changed = threading.Condition(threading.Lock())
        self._runs: dict[str, Run] = {}

    def begin(self, request_id: str, *, retry_count: int) -> tuple[Run, bool]:
        """Begin a run, or find the one that has begun: (run, whether it is ours)."""
        with self._changed:
            found = self._runs.get(request_id)
            if found is not None:
                return found, False
            run = self._runs[request_id] = Run(request_id, retry_count)
            return run, True

    def wait_end(self, run: Run, timeout_s: float) -> bool:
        """Wait until a run that is not ours has ended; False when it has not."""
        with self._changed:
            return self._changed.wait_for(lambda: run.is_ended, timeout_s)

    def end(self, run: Run, outcome: Outcome | None) -> None:
        """End our run and let those who wait for it go on."""
        with self._changed:
            del self._runs[run.request_id]
            run.outcome = outcome
            run.is_ended = True
            self._changed.notify_all()
