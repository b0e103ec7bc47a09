"""Small recording stand-ins for what a `MessageProcessor` is handed, and makers of deliveries.

Each does what its protocol says and writes what was done to it into one journal, so that an order can be asserted.
The store is the real `ResultStore` on fakeredis.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any

import fakeredis
import pika

from inference_worker.delivery import Delivery, Session, Settlement
from inference_worker.disposition import Answered, Outcome
from inference_worker.documents import InferenceRequestRecord, UsageEvent
from inference_worker.errors import StoreDown
from inference_worker.holds import HoldName, Holds
from inference_worker.kept_answers import KeptAnswers
from inference_worker.message_processor import MessageProcessor, ProcessorSettings
from inference_worker.messages import Completed, InferenceRequest, SaveOutcome
from inference_worker.model_answer import Timings, Usage
from inference_worker.model_client import ModelReply, Sign
from inference_worker.result_store import ResultStore
from inference_worker.stream_reader import ChunkSink
from inference_worker.stream_store import StreamStore
from tests.timeouts import LONG_TIMEOUT_S

ANSWER_BODY = b'{"id": "c-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}'
ANSWER = Answered(200, ANSWER_BODY, Usage(3, 4), Timings(0.5, 0.25))
WELL = ModelReply(ANSWER, Sign.WELL)


def request_body(**changes: Any) -> bytes:
    """A valid request that was received just now, but for the named fields; `...` leaves one out."""
    fields: dict[str, Any] = {
        "request_id": "r-1",
        "received_at": time(),
        "timeout_s": 60.0,
        "payload": {"model": "m", "messages": []},
    }
    fields.update(changes)
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


def make_delivery(
    body: bytes | None = None,
    *,
    session: Session | None = None,
    tag: int = 1,
    redelivered: bool = False,
    headers: Mapping[Any, Any] | None = None,
    properties: pika.BasicProperties | None = None,
) -> Delivery:
    """A delivery as the listener makes it."""
    properties = properties or pika.BasicProperties(headers=dict(headers) if headers is not None else None)
    return Delivery(
        session=session or Session(1),
        tag=tag,
        redelivered=redelivered,
        body=request_body() if body is None else body,
        properties=properties,
        headers=properties.headers or {},
        arrived_at=monotonic(),
    )


def reply(outcome: Outcome, sign: Sign = Sign.WELL) -> ModelReply:
    return ModelReply(outcome, sign, "detail")


class FakeModel:
    """Gives the replies that it was given, in order; the last one again and again. Safe from any thread."""

    def __init__(self, journal: list[str]) -> None:
        self._journal = journal
        self.replies: deque[ModelReply | Exception] = deque([WELL])
        self.requests: list[InferenceRequest] = []
        self.traces: list[Mapping[str, str]] = []
        self.times_left_s: list[float | None] = []
        #: called in the middle of a call
        self.meanwhile: Callable[[], None] = lambda: None
        #: what a streamed request is sent on the way
        self.chunks: list[bytes] = []

    def infer(
        self,
        request: InferenceRequest,
        *,
        trace: Mapping[str, str],
        sink: ChunkSink | None = None,
        time_left_s: float | None = None,
    ) -> ModelReply:
        self._journal.append("infer")
        self.times_left_s.append(time_left_s)
        for chunk in self.chunks if sink else ():
            sink.append(chunk)
        self.requests.append(request)
        self.traces.append(trace)
        self.meanwhile()
        answer = self.replies.popleft() if len(self.replies) > 1 else self.replies[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class JournalStore:
    """The real store on fakeredis, with what it did in the journal."""

    def __init__(self, journal: list[str], server: fakeredis.FakeServer) -> None:
        self._journal = journal
        self.client = fakeredis.FakeRedis(server=server)
        self._store = ResultStore(self.client, ttl_s=60, replica_id="replica-1")

    def save(self, request_id: str, value: bytes, *, may_replace: Callable[[], bool]) -> SaveOutcome:
        outcome = self._store.save(request_id, value, may_replace=may_replace)
        self._journal.append(f"save: {type(outcome).__name__}")
        return outcome

    def load_completed(self, request_id: str) -> Completed | None:
        self._journal.append("look")
        return self._store.load_completed(request_id)

    def find_cancelled(self, request_ids: Iterable[str]) -> set[str]:
        return self._store.find_cancelled(request_ids)

    def count_start(self, request_id: str) -> int:
        return self._store.count_start(request_id)

    def uncount_start(self, request_id: str) -> None:
        self._store.uncount_start(request_id)


class FakePublisher:
    """Confirms copies, or raises what it was given, one for each try."""

    def __init__(self, journal: list[str]) -> None:
        self._journal = journal
        self.errors: deque[Exception] = deque()
        #: (delivery, retry_count) of each confirmed retry copy
        self.retries: list[tuple[Delivery, int]] = []
        #: (delivery, reason) of each confirmed dead letter
        self.dead_letters: list[tuple[Delivery, str]] = []
        self.tries_count = 0
        #: called at each try
        self.meanwhile: Callable[[], None] = lambda: None

    def publish_retry(self, delivery: Delivery, *, retry_count: int) -> None:
        self._try()
        self.retries.append((delivery, retry_count))
        self._journal.append(f"retry {retry_count}")

    def publish_dead_letter(self, delivery: Delivery, *, reason: str) -> None:
        self._try()
        self.dead_letters.append((delivery, reason))
        self._journal.append(f"dead letter: {reason}")

    def _try(self) -> None:
        self.tries_count += 1
        self.meanwhile()
        if self.errors:
            raise self.errors.popleft()


class RecordingHealth:
    """Hears reports; raises the hold of a store that is down, as the health checker does."""

    def __init__(self, journal: list[str], holds: Holds) -> None:
        self._journal, self._holds = journal, holds
        self.reports: list[ModelReply] = []
        self.is_healthy = True
        self.store_down = threading.Event()
        #: what else happens then
        self.on_store_down: Callable[[], None] = lambda: None

    def report(self, reply: ModelReply) -> None:
        self.reports.append(reply)
        self._journal.append(f"report: {reply.sign}")

    def report_store_down(self, err: StoreDown) -> None:
        self._holds.raise_hold(HoldName.RESULT_STORE_DOWN, str(err))
        self._journal.append("report: store down")
        self.store_down.set()
        self.on_store_down()

    def report_saved(self) -> None:
        self._journal.append("report: saved")

    def confirm_model(self) -> bool:
        self._journal.append("probe")
        return self.is_healthy


class RecordingBuffer:
    """Keeps what it was given."""

    def __init__(self, journal: list[str]) -> None:
        self._journal = journal
        self.records: list[InferenceRequestRecord] = []
        self.usage: list[UsageEvent] = []

    def append(self, record: InferenceRequestRecord) -> None:
        self.records.append(record)
        self._journal.append("record")

    def append_usage(self, event: UsageEvent) -> None:
        self.usage.append(event)
        self._journal.append("usage")


class InstantEvent(threading.Event):
    """An event whose waits are written down and take no time."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_s: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits_s.append(timeout)
        return self.is_set()


@dataclass
class Bench:
    """A processor and all that it works with."""

    max_retries: int = 1
    max_redeliveries: int = 10
    respects_deadline: bool = False
    looks_for_cancels: bool = True
    journal: list[str] = field(default_factory=list)
    settlements: list[Settlement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.redis = fakeredis.FakeServer()
        self.holds = Holds()
        self.model = FakeModel(self.journal)
        self.store = JournalStore(self.journal, self.redis)
        self.streams = StreamStore(fakeredis.FakeStrictRedis(server=self.redis), ttl_s=60)
        self.publisher = FakePublisher(self.journal)
        self.health = RecordingHealth(self.journal, self.holds)
        self.buffer = RecordingBuffer(self.journal)
        self.kept = KeptAnswers(max_count=4)
        self.settled = threading.Event()
        self.processor = MessageProcessor(
            ProcessorSettings(
                max_retries=self.max_retries,
                max_redeliveries=self.max_redeliveries,
                respects_deadline=self.respects_deadline,
                looks_for_cancels=self.looks_for_cancels,
                deployment_id="deployment-1",
                replica_id="replica-1",
                user_id="user-1",
                org_id="org-1",
                model_id="org/model",
            ),
            model=self.model,
            store=self.store,
            streams=self.streams,
            publisher=self.publisher,
            health=self.health,
            buffer=self.buffer,
            holds=self.holds,
            kept=self.kept,
            hand_in=self._hand_in,
        )

    def _hand_in(self, settlement: Settlement) -> None:
        self.journal.append("hand in")
        self.settlements.append(settlement)
        self.settled.set()

    def process(self, delivery: Delivery | None = None) -> Settlement:
        """Work one delivery off on this thread; one that waits for what never comes is cut off."""
        watchdog = threading.Timer(LONG_TIMEOUT_S, self.processor.cut_off.set)
        watchdog.daemon = True
        watchdog.start()
        self.processor.process(delivery or make_delivery())
        watchdog.cancel()
        return self.settlements[-1]

    @contextmanager
    def processing(self, delivery: Delivery) -> Iterator[threading.Thread]:
        """Work one delivery off on another thread, which has to end with the block."""
        slot = threading.Thread(target=self.processor.process, args=(delivery,), name="slot-0")
        slot.start()
        try:
            yield slot
        finally:
            self.processor.cut_off.set()
            slot.join()

    def stored(self, request_id: str = "r-1") -> Any:
        """The result under a key as JSON; None when there is none."""
        value = self.store.client.get(f"infer_resp:{request_id}")
        return None if value is None else json.loads(value)

    def put(self, value: bytes, request_id: str = "r-1") -> None:
        self.store.client.set(f"infer_resp:{request_id}", value)

    def cancel(self, request_id: str = "r-1") -> None:
        self.store.client.set(f"infer_cancel:{request_id}", b"1", ex=60)

    def redis_goes_down(self) -> None:
        self.redis.connected = False

    def redis_comes_back(self) -> None:
        self.redis.connected = True
        self.holds.lift(HoldName.RESULT_STORE_DOWN)

    def close(self) -> None:
        self.redis.connected = True
        self.store.client.close()
