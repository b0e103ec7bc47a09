"""The end of a run: wait until all is done, and gather what the checker may know."""

from __future__ import annotations

import time
from typing import Any

from devstack.ledger import Call

from .checker import find_request_id
from .fleet import Fleet
from .journal import Evidence, Expected, Injected, ModelCall, StreamEntry
from .load import Load
from .store_log import StoreLog

DRAIN_TIMEOUT_S = 180.0
_LOST_AFTER_S = 5.0
#: seconds for the last bills
_BILLS_TIMEOUT_S = 60.0
#: seconds for the flush of the last records
_RECORDS_S = 2.0
_BATCH = 1000


def drain(fleet: Fleet, load: Load) -> tuple[int, int]:
    """Wait until the queue is empty and all is answered; return (ready, unacked) as the broker counts them then."""
    give_up_at, empty_since = time.monotonic() + DRAIN_TIMEOUT_S, None
    while True:
        info = fleet.rabbitmq.queue_info(fleet.stack.queue)
        counts = info.get("ready", 0), info.get("unacked", 0)
        now = time.monotonic()
        empty_since = (empty_since or now) if counts == (0, 0) else None
        if empty_since is not None and not load.unanswered(before=time.time()):
            return counts
        # what is in no queue any more and has no answer will never have one
        if now > give_up_at or (empty_since is not None and now > empty_since + _LOST_AFTER_S):
            return counts
        time.sleep(0.5)


def wait_bills(fleet: Fleet, load: Load, store_log: StoreLog) -> None:
    """Wait until Croesus has as many bills as there are answers, and the last records had the time to arrive."""
    count = sum(sent.expected is Expected.COMPLETED and store_log.is_answered(sent.request_id) for sent in load.sent)
    give_up_at = time.monotonic() + _BILLS_TIMEOUT_S
    while len(fleet.stack.croesus.events) < count and time.monotonic() < give_up_at:
        time.sleep(0.5)
    time.sleep(_RECORDS_S)


def collect(
    fleet: Fleet, load: Load, store_log: StoreLog, *, faults: list[Injected], ready: int, unacked: int
) -> Evidence:
    """Gather it; what is left in the queues is taken out of them."""
    sent = load.sent
    return Evidence(
        sent=sent,
        writes=store_log.writes,
        results=_load_results(fleet, [each.request_id for each in sent]),
        streams=_load_streams(fleet, [each.request_id for each in sent if each.is_streamed]),
        queued=[find_request_id(body) for body in fleet.take_queued()] if ready else [],
        ready_count=ready,
        unacked_count=unacked,
        dead_letters=[*load.dead_letters, *fleet.take_dead_letters()],
        dead_letter_queue_type=fleet.queue_type,
        called=list(fleet.sightings.called),
        model_calls=[_model_call(call) for call in fleet.model.ledger.calls if call.request_id],
        usage_events=fleet.stack.croesus.events,
        repeated_event_count=fleet.stack.croesus.duplicate_count,
        records=fleet.stack.metric_server.records,
        faults=faults,
        rejected=list(fleet.sightings.rejected),
        session_ends=list(fleet.sightings.session_ends),
    )


def _load_results(fleet: Fleet, request_ids: list[str]) -> dict[str, tuple[bytes, int]]:
    results: dict[str, tuple[bytes, int]] = {}
    with fleet.redis_server.client() as client:
        for offset in range(0, len(request_ids), _BATCH):
            part = request_ids[offset : offset + _BATCH]
            pipe = client.pipeline(transaction=False)
            for request_id in part:
                pipe.get(f"infer_resp:{request_id}")
                pipe.pttl(f"infer_resp:{request_id}")
            answers = pipe.execute()
            for index, request_id in enumerate(part):
                if answers[2 * index] is not None:
                    results[request_id] = answers[2 * index], answers[2 * index + 1]
    return results


def _load_streams(fleet: Fleet, request_ids: list[str]) -> dict[str, list[StreamEntry]]:
    streams: dict[str, list[StreamEntry]] = {}
    with fleet.redis_server.client() as client:
        for request_id in request_ids:
            entries: Any = client.xrange(f"infer_stream:{request_id}")
            streams[request_id] = [
                StreamEntry(fields[b"type"].decode(), fields[b"attempt"].decode(), fields[b"data"])
                for _, fields in entries
            ]
    return streams


def _model_call(call: Call) -> ModelCall:
    return ModelCall(
        attempt=call.request_id or "",
        begun_at=call.begun_at,
        completed=call.answered_at is not None and call.fault == "none",
        fault=call.fault,
        hung_up_at=call.hung_up_at,
        answer_sha256=call.answer_sha256,
    )
