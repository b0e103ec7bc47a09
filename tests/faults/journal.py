"""What happened in a run, as values: written down by the harness, read by the checker and the report.

Times are of the wall clock, in seconds. The checker gets an `Evidence` and nothing else.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Expected(enum.Enum):
    """What must become of a request."""

    COMPLETED = "completed"
    MALFORMED = "malformed"  #: failed 400, and the message in the dead-letter queue
    UNREADABLE = "unreadable"  #: no result, and the message in the dead-letter queue
    EXPIRED = "expired"  #: failed 408
    REFUSED = "refused"  #: failed 400, the model's own
    UNANSWERABLE = "unanswerable"  #: failed 500 after all retries, and the message in the dead-letter queue


WITH_RESULT = frozenset(Expected) - {Expected.UNREADABLE}
DEAD_LETTERED = frozenset({Expected.MALFORMED, Expected.UNREADABLE, Expected.UNANSWERABLE})


@dataclass
class Sent:
    """A request that the broker has confirmed."""

    request_id: str
    expected: Expected
    #: what the model must say to it
    text: str
    total_tokens: int
    #: of the first confirm
    confirmed_at: float
    #: how often it went out: more than once when a confirm was lost
    publish_count: int = 1
    #: the answer is to be streamed as well
    is_streamed: bool = False


@dataclass(frozen=True)
class Write:
    """A result that Redis took, from its append-only file: in order, with what was really stored."""

    request_id: str
    value: bytes
    has_ttl: bool
    #: when it was read in the file: a little later than it was stored
    seen_at: float


@dataclass(frozen=True)
class StreamEntry:
    """One entry of a streamed answer in Redis."""

    kind: str
    attempt: str
    data: bytes


@dataclass(frozen=True)
class Called:
    """A call of the model that left a worker."""

    attempt: str
    request_id: str
    seat: str
    #: which process of the seat
    life: int
    at: float


@dataclass(frozen=True)
class ModelCall:
    """A call of the model, from its own ledger."""

    attempt: str
    begun_at: float
    #: the model sent its whole answer
    completed: bool
    #: what the model was told to do wrong
    fault: str
    hung_up_at: float | None
    answer_sha256: str | None


class Effect(enum.Enum):
    """What a fault does to those who work, as far as it can be a reason for one more call of the model."""

    PROCESS_ENDED = "the worker was killed"
    SESSION_LOST = "the worker lost its broker session"
    STORE_DOWN = "Redis could not be written, and another worker got the message"
    MODEL_FAILED = "the model failed"
    BROKER_KILLED = "the broker was killed and forgot what it had delivered"


#: reasons that are no fault of the run
PUBLISHED_TWICE = "published twice: its confirm was lost"
LATE_DELIVERY = "a frozen or cut-off worker took up a delivery of a session that the broker had ended"


@dataclass
class Injected:
    """One fault."""

    number: int
    kind: str
    point: str
    part: str
    #: which worker it struck; empty: a server
    seat: str = ""
    #: which request it struck, where that is known
    request_id: str = ""
    begun_at: float = 0.0
    #: when its cause was gone
    cleared_at: float = 0.0
    #: when all workers were consuming and all that was published before was answered; 0: never
    whole_at: float = 0.0
    effects: tuple[Effect, ...] = ()
    #: a session ends in good order: a clean stop
    ends_session: bool = False

    @property
    def recovery_s(self) -> float:
        """From the end of the cause until all is well again."""
        return self.whole_at - self.cleared_at


@dataclass(frozen=True)
class Rejected:
    """A worker told the broker to dead-letter a message."""

    request_id: str
    at: float


@dataclass(frozen=True)
class SessionEnd:
    """The end of a worker's consuming link, as its proxy saw it."""

    seat: str
    at: float


@dataclass
class Evidence:
    """All that the checker may know."""

    sent: list[Sent] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    #: at the end: (value, milliseconds to live)
    results: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    #: at the end, of streamed answers
    streams: dict[str, list[StreamEntry]] = field(default_factory=dict)
    #: request ids in the queue at the end, and what the broker counts
    queued: list[str] = field(default_factory=list)
    ready_count: int = 0
    unacked_count: int = 0
    dead_letters: list[bytes] = field(default_factory=list)
    dead_letter_queue_type: str = "quorum"
    called: list[Called] = field(default_factory=list)
    model_calls: list[ModelCall] = field(default_factory=list)
    #: that Croesus kept
    usage_events: list[dict[str, Any]] = field(default_factory=list)
    #: that Croesus dropped, since it had them
    repeated_event_count: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    faults: list[Injected] = field(default_factory=list)
    session_ends: list[SessionEnd] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    #: of workers that were told to stop
    exit_codes: list[int] = field(default_factory=list)


class Sightings:
    """What the proxies saw. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.called: list[Called] = []
        self.session_ends: list[SessionEnd] = []
        self.rejected: list[Rejected] = []

    def add_call(self, attempt: str, request_id: str, *, seat: str, life: int) -> None:
        with self._lock:
            self.called.append(Called(attempt, request_id, seat, life, time.time()))

    def add_session_end(self, seat: str) -> None:
        with self._lock:
            self.session_ends.append(SessionEnd(seat, time.time()))

    def add_reject(self, request_id: str) -> None:
        with self._lock:
            self.rejected.append(Rejected(request_id, time.time()))

    def forget(self) -> None:
        """Begin anew; for a run that lasts."""
        with self._lock:
            self.called, self.session_ends, self.rejected = [], [], []


#: says one line to the person at the terminal
Say = Callable[[str], None]
