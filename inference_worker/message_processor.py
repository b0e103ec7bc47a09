"""The steps of one request, from a delivery to a settlement that is earned.

Runs on slot threads. Knows no library: the model, the store, the publisher, the health checker and the buffer are
handed in. It decides nothing (`disposition` does) and settles nothing (the listener does): it finds an outcome, and
carries a decision out as far as that can be done away from the channel; a step that fails is an outcome again.
Source: design sections 4 and 5.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic, time
from typing import Protocol, assert_never

from inference_worker.delivery import Delivery, Settlement
from inference_worker.disposition import (
    NAMES,
    Ack,
    Answered,
    Bug,
    Cancelled,
    Circumstances,
    CopyRefused,
    CopyUnconfirmed,
    DeadlyTooOften,
    Decision,
    Expired,
    Found,
    Hold,
    Interrupted,
    Malformed,
    Outcome,
    Reject,
    Republish,
    Requeue,
    StoreUnavailable,
    decide_disposition,
)
from inference_worker.documents import InferenceRequestRecord, UsageData, UsageEvent
from inference_worker.errors import CopyNotConfirmed, CopyRefusedForGood, MalformedRequest, StoreDown
from inference_worker.growing_pause import GrowingPause
from inference_worker.holds import HoldName, Holds
from inference_worker.kept_answers import KeptAnswers, Said
from inference_worker.messages import (
    AlreadyCompleted,
    Completed,
    Failed,
    InferenceRequest,
    NotOurs,
    Result,
    Saved,
    SaveOutcome,
    decode_request,
    encode_result,
)
from inference_worker.model_answer import Usage, read_body
from inference_worker.model_client import ModelReply
from inference_worker.running_requests import Run, RunningRequests
from inference_worker.stream_reader import ChunkSink
from inference_worker.stream_request import wants_stream
from inference_worker.whole_chunk import whole_chunk

logger = logging.getLogger(__name__)

#: pauses before the second, third and fourth try to publish a copy (design section 5)
_COPY_PAUSES_S = (1.0, 2.0, 4.0)
_PUBLISH_HOLD_MAX_S = 30.0
#: so often is a result that Redis does not take tried again after Redis could be written
_MAX_REFUSALS = 5
#: how soon a slot that waits for Redis notices that its session ended
_LOOK_AGAIN_S = 0.25
#: outcomes that a second delivery does not take over: it has to run, or to find and bill what is stored, by itself
_NOT_SHARED = (Interrupted, StoreUnavailable, Found)
#: a header outside printable ASCII cannot be sent on; W3C trace context is ASCII
_TRACE_HEADERS = ("traceparent", "tracestate")


class Model(Protocol):
    """Asks the model; never raises for what a model may do."""

    def infer(
        self,
        request: InferenceRequest,
        *,
        trace: Mapping[str, str],
        sink: ChunkSink | None = None,
        time_left_s: float | None = None,
    ) -> ModelReply: ...


class AnswerStream(ChunkSink, Protocol):
    """One attempt's entries for those who follow a streamed answer; raises StoreDown at its end."""

    @property
    def has_chunks(self) -> bool: ...
    def replace(self, chunk: bytes) -> None: ...
    def end(self, kind: str, data: bytes = b"", *, whole: Callable[[], bytes] | None = None) -> None: ...


class Streams(Protocol):
    """Opens streams; writes nothing by that."""

    def open(self, request_id: str, *, attempt: str, is_retry: bool, is_wanted: Callable[[], bool]) -> AnswerStream: ...


class Store(Protocol):
    """Keeps results; raises StoreDown."""

    def save(self, request_id: str, value: bytes, *, may_replace: Callable[[], bool]) -> SaveOutcome: ...
    def load_completed(self, request_id: str) -> Completed | None: ...
    def find_cancelled(self, request_ids: Iterable[str]) -> set[str]: ...
    def count_start(self, request_id: str) -> int: ...
    def uncount_start(self, request_id: str) -> None: ...


class Publisher(Protocol):
    """Publishes confirmed copies; raises CopyNotConfirmed or CopyRefusedForGood."""

    def publish_retry(self, delivery: Delivery, *, retry_count: int) -> None: ...
    def publish_dead_letter(self, delivery: Delivery, *, reason: str) -> None: ...


class Health(Protocol):
    """Hears what calls tell about the model and about Redis."""

    def report(self, reply: ModelReply) -> None: ...
    def report_store_down(self, err: StoreDown) -> None: ...
    def report_saved(self) -> None: ...
    def confirm_model(self) -> bool: ...


class Buffer(Protocol):
    """Takes records and usage events."""

    def append(self, record: InferenceRequestRecord) -> None: ...
    def append_usage(self, event: UsageEvent) -> None: ...


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """What the steps have to know of the configuration."""

    max_retries: int
    #: 0: no limit
    max_redeliveries: int
    #: a call ends at the request's own deadline
    respects_deadline: bool
    #: Redis is asked before each call whether anybody still wants the answer
    looks_for_cancels: bool
    deployment_id: str
    replica_id: str
    user_id: str
    org_id: str
    model_id: str


@dataclass(slots=True)
class _Attempt:
    """What one slot knows of the delivery it works on."""

    delivery: Delivery
    #: unix seconds
    started_at: float
    #: monotonic
    began_at: float
    request: InferenceRequest | None = None
    request_id: str | None = None
    model_latency_s: float | None = None
    #: what the model said, until it is saved
    said: Said | None = None
    #: when the request asks for a stream
    stream: AnswerStream | None = None
    #: the answer is the one that went through it: no stored, kept or shared one, and none that came unstreamed
    is_streamed: bool = False
    #: ours: a second delivery of the request waits for it
    run: Run | None = None
    #: what the work came to, before anything was decided
    outcome: Outcome | None = None
    #: a start was counted that has to be taken back when we live to settle it
    is_start_counted: bool = False
    #: an outcome whose result could not be saved: nothing is done twice for it once Redis is back
    unsaved: Outcome | None = None
    written: Result | None = None
    copy_confirmed: bool = False
    copy_refused: bool = False
    #: how often Redis could be written again, and yet did not take this result
    refusals: int = 0
    usage: Usage | None = None


class MessageProcessor:
    """Works deliveries off. Safe from any thread: what belongs to one delivery lives in an `_Attempt`."""

    def __init__(
        self,
        settings: ProcessorSettings,
        *,
        model: Model,
        store: Store,
        streams: Streams,
        publisher: Publisher,
        health: Health,
        buffer: Buffer,
        holds: Holds,
        kept: KeptAnswers,
        hand_in: Callable[[Settlement], None],
    ) -> None:
        self._settings = settings
        self._model = model
        self._store = store
        self._streams = streams
        self._publisher = publisher
        self._health = health
        self._buffer = buffer
        self._holds = holds
        self._kept = kept
        self._hand_in = hand_in
        self._running = RunningRequests()
        #: set when the grace is over: whatever waits in a slot gives its delivery back
        self.cut_off = threading.Event()
        self._publish_pause = GrowingPause(1.0, max_s=_PUBLISH_HOLD_MAX_S)

    def process(self, delivery: Delivery) -> None:
        """Work one delivery off and hand its settlement in. Never raises: a bug is an outcome, too."""
        attempt = _Attempt(delivery, started_at=time(), began_at=monotonic())
        try:
            settlement = self._conclude(attempt, self._find_outcome(attempt))
        except Exception:
            extra = {"event": "internal_error", "request_id": attempt.request_id}
            logger.exception("a bug of ours: the request is dead-lettered", extra=extra)
            settlement = self._conclude_bug(attempt)
        self._hand_in(settlement)
        if attempt.run is not None:
            self._running.end(attempt.run, attempt.outcome)

    # -- what happened ------------------------------------------------------------------------------------------------

    def _find_outcome(self, attempt: _Attempt) -> Outcome:
        """Do the work of one delivery up to the model's answer."""
        try:
            request = decode_request(attempt.delivery.body)
        except MalformedRequest as err:
            attempt.request_id = err.request_id
            return Malformed(str(err), has_request_id=err.request_id is not None)
        attempt.request, attempt.request_id = request, request.request_id
        if attempt.stream is None and wants_stream(request.payload):
            attempt.stream = self._open_stream(attempt.delivery, request)
        try:
            attempt.outcome = (
                self._join(attempt, request)
                or self._find_answer(attempt, request)
                or self._find_obstacle(attempt, request)
                or self._infer(attempt, request)
            )
        except StoreDown as err:
            return self._store_down(err)
        return attempt.outcome

    def _join(self, attempt: _Attempt, request: InferenceRequest) -> Outcome | None:
        """Wait while the same request runs in another slot, and take its outcome; None when it is ours to run."""
        while attempt.run is None:
            retry_count = attempt.delivery.retry_count
            run, is_ours = self._running.begin(request.request_id, retry_count=retry_count)
            if is_ours:
                attempt.run = run
                return None
            while not self._running.wait_end(run, _LOOK_AGAIN_S):
                if attempt.delivery.session.ended:
                    return Interrupted("session_ended")
                if self._holds.is_raised(HoldName.DRAINING) or self.cut_off.is_set():
                    return Interrupted("joined_request_still_runs")
            is_final = run.outcome is not None and not isinstance(run.outcome, _NOT_SHARED)
            if is_final and run.retry_count == retry_count:
                attempt.said = run.outcome if isinstance(run.outcome, Said) else None
                return run.outcome
        return None

    def _find_answer(self, attempt: _Attempt, request: InferenceRequest) -> Outcome | None:
        """Look for an answer that was made before: stored by any worker, or kept by this one.

        Raises:  StoreDown
        """
        if attempt.delivery.is_repeat:
            completed = self._store.load_completed(request.request_id)
            if completed is not None:
                return self._found(attempt, completed)
        attempt.said = self._kept.take(request.request_id)
        return attempt.said

    def _find_obstacle(self, attempt: _Attempt, request: InferenceRequest) -> Outcome | None:
        """Look for a reason not to ask the model.

        Raises:  StoreDown
        """
        delivery = attempt.delivery
        age_s = _age_s(request)
        if age_s > request.timeout_s or request.timeout_s <= 0:
            return Expired(age_s, request.timeout_s)
        if self._settings.looks_for_cancels and self._store.find_cancelled((request.request_id,)):
            return Cancelled()
        # a retry is not spent on a model that does not answer its probe: the copy of one worker's failed call reaches
        # another one that has not noticed yet
        if delivery.retry_count > 0 and not self._health.confirm_model():
            return Interrupted("held")
        if delivery.redelivered and self._settings.max_redeliveries and not attempt.is_start_counted:
            start_count = self._store.count_start(request.request_id)
            attempt.is_start_counted = True
            if start_count > self._settings.max_redeliveries:
                return DeadlyTooOften(start_count)
        # once more right before the call: a copy that came straight back would burn its retries
        return Interrupted("held") if self._holds.suspended.is_set() else None

    def _open_stream(self, delivery: Delivery, request: InferenceRequest) -> AnswerStream:
        return self._streams.open(
            request.request_id,
            attempt=secrets.token_hex(4),
            is_retry=delivery.is_repeat,
            is_wanted=lambda: not delivery.session.ended,
        )

    def _infer(self, attempt: _Attempt, request: InferenceRequest) -> Outcome:
        began_at = monotonic()
        time_left_s = None
        if self._settings.respects_deadline:
            time_left_s = request.timeout_s - _age_s(request)
        reply = self._model.infer(request, trace=_trace(attempt.delivery), sink=attempt.stream, time_left_s=time_left_s)
        attempt.model_latency_s = monotonic() - began_at
        # before anything is published: the hold must be up when the copy can come back
        self._health.report(reply)
        if isinstance(reply.outcome, Said):
            attempt.said = reply.outcome
            attempt.is_streamed = attempt.stream is not None and attempt.stream.has_chunks
        return reply.outcome

    def _found(self, attempt: _Attempt, completed: Completed) -> Outcome:
        """Bill a result that was there already: its worker may have died between the SET and the event.

        Croesus drops what it has. An attempt whose session has ended leaves that to the redelivery.
        """
        attempt.usage = read_body(completed.body).usage
        attempt.said = None
        if not attempt.delivery.session.ended:
            self._bill(attempt)
        attempt.is_streamed = False
        return self._end_stream(attempt, completed) or Found(completed.status_code)

    def _store_down(self, err: StoreDown) -> StoreUnavailable:
        self._health.report_store_down(err)
        return StoreUnavailable()

    # -- what follows -------------------------------------------------------------------------------------------------

    def _conclude(self, attempt: _Attempt, outcome: Outcome) -> Settlement:
        """Decide and carry out until a step no longer changes the outcome."""
        while True:
            delivery = attempt.delivery
            decision = decide_disposition(
                outcome,
                Circumstances(
                    retry_count=delivery.retry_count,
                    max_retries=self._settings.max_retries,
                    redelivered=delivery.redelivered,
                    draining=self._holds.is_raised(HoldName.DRAINING),
                ),
            )
            changed = self._carry_out(attempt, outcome, decision)
            if changed is None and not isinstance(decision.disposition, Hold):
                return self._settlement(attempt, outcome, decision)
            if changed is None:
                attempt.refusals += 1
            if attempt.refusals > _MAX_REFUSALS:
                # one key, or one size, that Redis refuses must not keep a slot, and the consuming, for ever
                outcome = Bug("Redis can be written, but does not take this result")
            else:
                outcome = changed or attempt.unsaved or self._find_outcome(attempt)

    def _conclude_bug(self, attempt: _Attempt) -> Settlement:
        """500 and a dead letter, and the slot takes the next."""
        try:
            return self._conclude(attempt, Bug("internal error of the worker"))
        except Exception:
            logger.exception("a bug in the handling of a bug", extra={"event": "internal_error"})
            return Settlement(attempt.delivery, Reject("internal_error"))

    def _carry_out(self, attempt: _Attempt, outcome: Outcome, decision: Decision) -> Outcome | None:
        """Write, publish or wait as decided; None when that is done, or what happened instead."""
        if decision.result is not None:
            changed = self._save(attempt, decision.result)
            attempt.unsaved = outcome if isinstance(changed, StoreUnavailable) else None
            if changed is not None:
                return changed
        match decision.disposition:
            case Republish(_, retry_count):
                return self._publish(
                    attempt, lambda: self._publisher.publish_retry(attempt.delivery, retry_count=retry_count)
                )
            case Reject(reason):
                if not attempt.delivery.session.rejects_by_copy:
                    return None
                changed = self._publish(
                    attempt, lambda: self._publisher.publish_dead_letter(attempt.delivery, reason=reason)
                )
                if isinstance(changed, CopyRefused):
                    # nothing better can follow; the failed result is stored
                    attempt.copy_refused = True
                    extra = {"event": "dead_letter_refused", "request_id": attempt.request_id}
                    logger.error("no copy for the dead letters, the message is nacked: %s", changed.error, extra=extra)
                    return None
                return changed
            case Hold():
                return self._wait_for_store(attempt)
            case Requeue():
                self._keep_answer(attempt)
                return None
            case Ack():
                return None
            case _ as unreachable:
                assert_never(unreachable)

    def _save(self, attempt: _Attempt, result: Result) -> Outcome | None:
        if attempt.request_id is None:
            return None
        session = attempt.delivery.session
        try:
            saved = self._store.save(attempt.request_id, encode_result(result), may_replace=lambda: not session.ended)
        except StoreDown as err:
            return self._store_down(err)
        self._health.report_saved()
        match saved:
            case Saved():
                attempt.written = result
                if isinstance(attempt.said, Answered) and isinstance(result, Completed):
                    attempt.usage = attempt.said.usage
                    self._bill(attempt)
                return self._end_stream(attempt, result)
            case AlreadyCompleted(completed):
                return self._found(attempt, completed)
            case NotOurs():
                return Interrupted("session_ended")
            case _ as unreachable:
                assert_never(unreachable)

    def _end_stream(self, attempt: _Attempt, result: Result) -> Outcome | None:
        """Tell those who follow the stream that its result is stored; after the SET, so that they can read it."""
        if attempt.stream is None:
            return None
        try:
            if isinstance(result, Completed):
                if not attempt.is_streamed:
                    # whatever is in the stream, it need not be this answer, nor the whole of it
                    attempt.stream.replace(whole_chunk(result.body))
                attempt.stream.end("done", whole=lambda: whole_chunk(result.body))
            else:
                attempt.stream.end("failed", encode_result(result))
        except StoreDown as err:
            return self._store_down(err)
        return None

    def _keep_answer(self, attempt: _Attempt) -> None:
        if attempt.said is not None and attempt.written is None and attempt.request_id is not None:
            self._kept.put(attempt.request_id, attempt.said)

    def _uncount_start(self, attempt: _Attempt) -> None:
        """Take the count of a redelivery back, since we lived to settle it: one by a clean stop is no death."""
        if not attempt.is_start_counted or attempt.request_id is None:
            return
        try:
            self._store.uncount_start(attempt.request_id)
        except StoreDown as err:
            # counts one too many at the worst, and expires with its key
            self._health.report_store_down(err)

    def _wait_for_store(self, attempt: _Attempt) -> Outcome | None:
        """Keep a redelivered message in its slot until Redis can be written; None when it can.

        Given back, it would come straight to the next worker and back again, all outage long (R18, R19).
        """
        while self._holds.is_raised(HoldName.RESULT_STORE_DOWN):
            if attempt.delivery.session.ended:
                return Interrupted("session_ended")
            if self._holds.is_raised(HoldName.DRAINING):
                return StoreUnavailable()
            if self.cut_off.wait(_LOOK_AGAIN_S):
                return Interrupted("cut_off")
        return None

    def _publish(self, attempt: _Attempt, publish: Callable[[], None]) -> Outcome | None:
        """Publish a copy, four times at the most, and hold meanwhile: a full queue takes none while we consume."""
        outcome: Outcome = CopyUnconfirmed()
        detail = None
        for pause_s in (*_COPY_PAUSES_S, None):
            if attempt.delivery.session.ended:
                # the broker delivers the original again: a copy would be a second one
                outcome = Interrupted("session_ended")
                break
            try:
                publish()
            except CopyRefusedForGood as err:
                return CopyRefused(str(err))
            except CopyNotConfirmed as err:
                detail = str(err)
                self._holds.raise_hold(HoldName.PUBLISH_REFUSED, detail, for_s=_PUBLISH_HOLD_MAX_S)
            else:
                self._publish_pause.reset()
                self._holds.lift(HoldName.PUBLISH_REFUSED)
                attempt.copy_confirmed = True
                return None
            if pause_s is None or self._holds.is_raised(HoldName.DRAINING) or self.cut_off.wait(pause_s):
                break
        if detail is not None:
            self._holds.raise_hold(HoldName.PUBLISH_REFUSED, detail, for_s=self._publish_pause.next_s())
        return outcome

    # -- what is told -------------------------------------------------------------------------------------------------

    def _bill(self, attempt: _Attempt) -> None:
        """Add the usage event of a stored result; without counts there is none. Before the ack, after the SET."""
        usage, settings = attempt.usage, self._settings
        if usage is None or attempt.request_id is None:
            return
        data = UsageData(
            request_id=attempt.request_id,
            deployment_id=settings.deployment_id,
            replica_id=settings.replica_id,
            user_id=settings.user_id,
            org_id=settings.org_id,
            model=settings.model_id,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            cached_tokens=usage.cached_tokens,
        )
        self._buffer.append_usage(UsageEvent(time(), data))

    def _settlement(self, attempt: _Attempt, outcome: Outcome, decision: Decision) -> Settlement:
        disposition = decision.disposition
        assert not isinstance(disposition, Hold)
        self._uncount_start(attempt)
        status, status_code = _status(attempt, outcome)
        self._record(attempt, NAMES[type(disposition)], status, status_code)
        fields: dict[str, object] = {"request_id": attempt.request_id}
        if status_code is not None:
            fields["status_code"] = status_code
        if attempt.model_latency_s is not None:
            fields["model_latency_s"] = round(attempt.model_latency_s, 4)
        return Settlement(attempt.delivery, disposition, attempt.copy_confirmed, attempt.copy_refused, fields)

    def _record(self, attempt: _Attempt, disposition: str, status: str | None, status_code: int | None) -> None:
        request, written, usage = attempt.request, attempt.written, attempt.usage
        answer = attempt.said if isinstance(written, Completed) and isinstance(attempt.said, Answered) else None
        total_latency_s = monotonic() - attempt.began_at
        self._buffer.append(
            InferenceRequestRecord(
                request_id=attempt.request_id,
                received_at=request.received_at if request else None,
                started_at=attempt.started_at,
                finished_at=attempt.started_at + total_latency_s,
                queue_wait_s=max(0.0, attempt.started_at - request.received_at) if request else None,
                model_latency_s=attempt.model_latency_s,
                total_latency_s=total_latency_s,
                status=status,
                status_code=status_code,
                error_type=written.error_type.value if isinstance(written, Failed) else None,
                disposition=disposition,
                retry_count=attempt.delivery.retry_count,
                streamed=attempt.stream is not None,
                prompt_tokens=usage.prompt_tokens if usage else None,
                completion_tokens=usage.completion_tokens if usage else None,
                total_tokens=usage.total_tokens if usage else None,
                cached_tokens=usage.cached_tokens if usage else None,
                ttft_s=answer.timings.ttft_s if answer else None,
                tbt_s=answer.timings.tbt_s if answer else None,
            )
        )


def _status(attempt: _Attempt, outcome: Outcome) -> tuple[str | None, int | None]:
    match attempt.written:
        case Completed(status_code):
            return "completed", status_code
        case Failed(status_code):
            return "failed", status_code
        case _:
            return ("completed", outcome.status_code) if isinstance(outcome, Found) else (None, None)


def _age_s(request: InferenceRequest) -> float:
    """How old a request is; one from a clock that is ahead of ours is new (field report R54)."""
    return max(0.0, time() - request.received_at)


def _trace(delivery: Delivery) -> dict[str, str]:
    """Take the trace context of the message along, so that a trace goes from the proxy into the model."""
    trace = {}
    for name in _TRACE_HEADERS:
        value = delivery.headers.get(name)
        if isinstance(value, str) and value.isascii() and value.isprintable():
            trace[name] = value
    return trace
