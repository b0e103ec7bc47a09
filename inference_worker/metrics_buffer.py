"""Where records and usage events wait for the next flush: one lock, bounded, the oldest goes first.

Slots append, `metrics-reporter` takes. Memory, and for usage an outbox when one is handed in: it knows nothing of
sinks or files. Records wait as JSON: that is smaller than the objects, and a flush of 10,000 has neither to encode nor
to free them all at once, for which every slot would wait.
Source: design section 10; field report R71.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from inference_worker.documents import InferenceRequestRecord, UsageEvent, encode_record

#: usage events kept for a Croesus that does not take them (design section 10)
MAX_USAGE_EVENTS = 100_000
#: the same where they survive a kill
MAX_USAGE_EVENTS_ON_DISK = 1_000_000


class Outbox(Protocol):
    """Where usage events survive the process."""

    def load(self) -> list[tuple[int, UsageEvent]]: ...
    def put(self, event: UsageEvent) -> int | None: ...
    def remove(self, numbers: Iterable[int]) -> None: ...


class MetricsBuffer:
    """Records until they are taken, usage events until Croesus has accepted them. Safe from any thread."""

    def __init__(
        self,
        *,
        max_records: int,
        max_usage_events: int = MAX_USAGE_EVENTS,
        on_half_full: Callable[[], None] | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        """`on_half_full` is called on the appending thread, once from one `take_records` to the next."""
        self._lock = threading.Lock()
        self._records: deque[bytes] = deque(maxlen=max_records)
        self._half_count = (max_records + 1) // 2
        self._records_dropped = 0
        self._is_half_full_told = False
        self._on_half_full = on_half_full
        self._max_usage_events = max_usage_events
        # they leave at the left end only: thousands wait under load, and each place of an ordered dict costs as much
        # memory as the event in it
        self._usage: deque[UsageEvent] = deque()
        #: what Croesus would not take, and what must not stand in front of the others: few, and they leave anywhere.
        #: By identity, since two deliveries of one request make equal events; whoever peeks holds the events, so no id
        #: is given away twice
        self._usage_aside: OrderedDict[int, UsageEvent] = OrderedDict()
        self._usage_dropped = 0
        self._outbox = outbox
        #: number in the outbox, by identity
        self._numbers: dict[int, int] = {}
        for number, event in outbox.load() if outbox else ():
            self._usage.append(event)
            self._numbers[id(event)] = number

    def append(self, record: InferenceRequestRecord) -> None:
        """Keep one record; when full, the oldest is dropped and counted."""
        encoded = encode_record(record)
        with self._lock:
            records = self._records
            if len(records) == records.maxlen:
                self._records_dropped += 1
            records.append(encoded)
            if len(records) < self._half_count or self._is_half_full_told:
                return
            self._is_half_full_told = True
        # outside the lock: the other side may hold one of its own while it takes
        if self._on_half_full is not None:
            self._on_half_full()

    def append_usage(self, event: UsageEvent) -> None:
        """Keep one usage event, in the outbox first where there is one; when full, one is dropped and counted.

        That is the oldest of those set aside, else the oldest of all.
        """
        number = self._outbox.put(event) if self._outbox else None
        dropped = None
        with self._lock:
            self._usage.append(event)
            if number is not None:
                self._numbers[id(event)] = number
            if self.usage_depth > self._max_usage_events:
                oldest = self._usage_aside.popitem(last=False)[1] if self._usage_aside else self._usage.popleft()
                dropped = self._numbers.pop(id(oldest), None)
                self._usage_dropped += 1
        if self._outbox is not None and dropped is not None:
            self._outbox.remove([dropped])

    def take_records(self) -> tuple[list[bytes], int]:
        """Hand over all records, encoded, oldest first, and how many were dropped since the last take."""
        with self._lock:
            records, dropped_count = self._records, self._records_dropped
            self._records = deque(maxlen=records.maxlen)
            self._records_dropped = 0
            self._is_half_full_told = False
        return list(records), dropped_count

    def peek_usage(self, count: int) -> list[UsageEvent]:
        """Look at the oldest usage events that are not set aside; they stay until `drop_usage`."""
        with self._lock:
            return list(islice(self._usage, count))

    def peek_usage_aside(self) -> list[UsageEvent]:
        """Look at the usage events that were set aside, in the order in which they were."""
        with self._lock:
            return list(self._usage_aside.values())

    def set_usage_aside(self, events: Iterable[UsageEvent]) -> None:
        """Let these stand in nobody's way; one that is set aside already, or fell out meanwhile, is passed over.

        Those of `peek_usage` in its order, from its first.
        """
        with self._lock:
            for event in events:
                if self._pop_first(event):
                    self._usage_aside[id(event)] = event

    def drop_usage(self, events: Iterable[UsageEvent]) -> None:
        """Remove exactly these events, set aside or not; one that fell out meanwhile is passed over.

        Those of `peek_usage` in its order, from its first.
        """
        numbers = []
        with self._lock:
            for event in events:
                if not self._pop_first(event):
                    self._usage_aside.pop(id(event), None)
                number = self._numbers.pop(id(event), None)
                if number is not None:
                    numbers.append(number)
        if self._outbox is not None and numbers:
            self._outbox.remove(numbers)

    def _pop_first(self, event: UsageEvent) -> bool:
        if self._usage and self._usage[0] is event:
            self._usage.popleft()
            return True
        return False

    @property
    def record_depth(self) -> int:
        return len(self._records)

    @property
    def usage_depth(self) -> int:
        """All that Croesus has not accepted, set aside or not."""
        return len(self._usage) + len(self._usage_aside)

    @property
    def usage_dropped_total(self) -> int:
        """Usage events lost since the start because Croesus did not take them and the buffer was full."""
        return self._usage_dropped
