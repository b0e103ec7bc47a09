"""What a model server remembers of every call, so that tests can say what really happened. Safe from any thread."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from devstack.processes import NotInTime


@dataclass
class Call:
    """One call. Filled in while it goes on; times are of the wall clock, in seconds."""

    number: int  #: from 1, in the order of arrival since the start or a `forget`
    text_sha256: str  #: of the request's text
    request_id: str | None  #: the X-Request-Id header
    streamed: bool
    begun_at: float
    answered_at: float | None = None  #: when the last byte was handed to the network
    hung_up_at: float | None = None  #: when we saw that the client was gone before that
    status: int | None = None  #: of the answer that was sent, whole or not
    fault: str = "none"
    prompt_tokens: int = 0  #: those reported to the client, 0 for a call without a completion
    completion_tokens: int = 0
    answer_sha256: str | None = None  #: of the body of a whole completion that is not streamed

    @property
    def client_closed_early(self) -> bool:
        """Whether the client left before the end of the answer."""
        return self.hung_up_at is not None

    @property
    def completed(self) -> bool:
        """Whether a whole completion was sent, which is what may be billed."""
        return self.answered_at is not None and self.completion_tokens > 0


def hash_text(text: str) -> str:
    """Return the hash under which the ledger knows a request's text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Ledger:
    """All calls since the start."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: list[Call] = []

    def begin(self, text: str, *, request_id: str | None, streamed: bool) -> Call:
        """Enter a call that has just arrived."""
        with self._changed:
            call = Call(len(self._calls) + 1, hash_text(text), request_id, streamed, begun_at=time.time())
            self._calls.append(call)
            self._changed.notify_all()
        return call

    def forget(self) -> None:
        """Forget all calls; for a run that lasts."""
        with self._changed:
            self._calls.clear()

    def mark_answered(self, call: Call) -> None:
        """Enter that the last byte is out."""
        with self._changed:
            call.answered_at = time.time()
            self._changed.notify_all()

    def mark_hung_up(self, call: Call) -> None:
        """Enter that the client was gone before the last byte."""
        with self._changed:
            call.hung_up_at = time.time()
            self._changed.notify_all()

    @property
    def calls(self) -> list[Call]:
        """All calls, in the order of arrival."""
        with self._changed:
            return list(self._calls)

    def calls_for(self, text: str) -> list[Call]:
        """Return the calls whose request had exactly this text (all message contents, joined by newlines)."""
        wanted = hash_text(text)
        return [call for call in self.calls if call.text_sha256 == wanted]

    def wait_for_calls(self, text: str, *, count: int = 1, timeout_s: float = 10.0) -> list[Call]:
        """Wait until so many calls with this text have begun.

        Raises:  NotInTime
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.calls_for(text)) >= count, timeout_s):
                raise NotInTime(f"not within {timeout_s:g} s: {count} call(s) for {text[:60]!r}")
            return self.calls_for(text)

    def wait_for_hang_up(self, text: str, *, timeout_s: float = 10.0) -> Call:
        """Wait until the client of a call with this text has hung up.

        Raises:  NotInTime
        """
        with self._changed:
            if not self._changed.wait_for(lambda: any(c.client_closed_early for c in self.calls_for(text)), timeout_s):
                raise NotInTime(f"not within {timeout_s:g} s: a hang-up of {text[:60]!r}")
            return next(call for call in self.calls_for(text) if call.client_closed_early)

    def to_documents(self) -> list[dict[str, Any]]:
        """Return all calls as JSON values."""
        return [{**asdict(call), "client_closed_early": call.client_closed_early} for call in self.calls]
