"""What the model said and could not be saved, kept for when its message comes back to this worker.

Safe from any thread. Bounded in number and bytes: GPU time is dear, but not dearer than the process.
Source: design section 7 "Redis down"; field reports R19, R75.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from inference_worker.disposition import Answered, InvalidAnswer, ModelError

MAX_BYTES = 64 * 2**20

#: a refusal is kept as well: asked again, the model would only repeat it
Said = Answered | ModelError | InvalidAnswer


class KeptAnswers:
    """At most `max_count` answers, the oldest dropped first."""

    def __init__(self, *, max_count: int, max_bytes: int = MAX_BYTES) -> None:
        self._lock = threading.Lock()
        self._max_count, self._max_bytes = max_count, max_bytes
        self._answers: OrderedDict[str, Said] = OrderedDict()
        self._bytes = 0

    def put(self, request_id: str, answer: Said) -> None:
        with self._lock:
            self._remove(request_id)
            self._answers[request_id] = answer
            self._bytes += _size_bytes(answer)
            while self._answers and (len(self._answers) > self._max_count or self._bytes > self._max_bytes):
                self._remove(next(iter(self._answers)))

    def take(self, request_id: str) -> Said | None:
        """Remove and return the answer of a request, if it was kept."""
        if not self._answers:
            return None
        with self._lock:
            return self._remove(request_id)

    def _remove(self, request_id: str) -> Said | None:
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self._bytes -= _size_bytes(answer)
        return answer


def _size_bytes(answer: Said) -> int:
    match answer:
        case Answered(body=body):
            return len(body)
        case ModelError(model_error=body):
            return len(body or b"")
        case InvalidAnswer():
            return 0
