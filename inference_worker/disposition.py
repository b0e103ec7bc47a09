"""What became of a request, and what follows from it: design section 5 as one total, pure function.

Pure: any thread, no I/O, no clock, no default. An outcome is what happened; a `Decision` is what is written under
`infer_resp:<request_id>` and what becomes of the delivery. Adding an outcome without a branch is a type error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from inference_worker.messages import Completed, ErrorType, Failed, Result
from inference_worker.model_answer import Timings, Usage

# -- outcomes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Malformed:
    """The body is no valid request."""

    error: str
    #: whether a request_id could be read, and so a result can be written
    has_request_id: bool


@dataclass(frozen=True, slots=True)
class Expired:
    """`now - received_at > timeout_s` before the model was called."""

    age_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Answered:
    """2xx with a JSON object that is no error."""

    status_code: int
    body: bytes
    usage: Usage | None
    timings: Timings


@dataclass(frozen=True, slots=True)
class ModelError:
    """The model said 4xx or 5xx."""

    status_code: int
    error: str
    #: its body, when that is JSON
    model_error: bytes | None


@dataclass(frozen=True, slots=True)
class InvalidAnswer:
    """A complete answer that is none: 3xx, a 2xx without a JSON object or with an error object, a body over the cap."""

    error: str


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No whole answer: refused, reset, DNS, timeout, cut off, aborted, or a status that means "later"."""

    error: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Its producer no longer wants it."""


@dataclass(frozen=True, slots=True)
class DeadlyTooOften:
    """The model was called for it again and again, and each time nobody lived to settle it."""

    start_count: int


@dataclass(frozen=True, slots=True)
class Found:
    """The key holds a `completed` result already: another attempt was there first."""

    status_code: int


@dataclass(frozen=True, slots=True)
class StoreUnavailable:
    """Redis cannot be read or written."""


@dataclass(frozen=True, slots=True)
class CopyRefused:
    """The broker will never take the retry copy (406: larger than its limit)."""

    error: str


@dataclass(frozen=True, slots=True)
class CopyUnconfirmed:
    """Every try to publish a copy ended without a confirm."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Not begun, or cut short, for a reason that is not the request's: a hold, a stop, the end of the grace."""

    reason: str


@dataclass(frozen=True, slots=True)
class Bug:
    """An exception that nobody expected."""

    error: str


Outcome = (
    Malformed
    | Expired
    | Answered
    | ModelError
    | InvalidAnswer
    | Unavailable
    | Cancelled
    | DeadlyTooOften
    | Found
    | StoreUnavailable
    | CopyRefused
    | CopyUnconfirmed
    | Interrupted
    | Bug
)

# -- dispositions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ack:
    """Done: its result is in Redis."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Dead-letter it: nack without requeue, or a confirmed copy where the queue would drop it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """Give it back unchanged."""

    reason: str


@dataclass(frozen=True, slots=True)
class Republish:
    """Publish a copy with this `x-retry-count`, wait for its confirm, then ack the original."""

    reason: str
    retry_count: int


@dataclass(frozen=True, slots=True)
class Hold:
    """None yet: the slot keeps the delivery until Redis can be written, the session ends, or we stop."""

    reason: str


Disposition = Ack | Reject | Requeue | Republish
#: the name of a disposition in records, logs and metrics
NAMES: dict[type[Disposition], str] = {Ack: "ack", Reject: "reject", Requeue: "requeue", Republish: "republish"}


@dataclass(frozen=True, slots=True)
class Decision:
    """What is written, then what becomes of the delivery."""

    #: None: nothing is written
    result: Result | None
    disposition: Disposition | Hold


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What beside the outcome bears on the decision."""

    retry_count: int
    max_retries: int
    redelivered: bool
    #: stop was asked: a model that dies with us costs no retry
    draining: bool


def decide_disposition(outcome: Outcome, given: Circumstances) -> Decision:
    """Decide; total and pure.

    Source: the table in design section 5, row by row
    """
    match outcome:
        case Answered():
            return Decision(Completed(outcome.status_code, outcome.body), Ack("completed"))
        case Malformed():
            failed = Failed(400, outcome.error, ErrorType.MALFORMED_REQUEST) if outcome.has_request_id else None
            return Decision(failed, Reject("malformed_request"))
        case Expired():
            error = f"the request was {outcome.age_s:.1f} s old and had {outcome.timeout_s:g} s to live"
            return Decision(Failed(408, error, ErrorType.EXPIRED), Ack("expired"))
        case ModelError():
            failed = Failed(outcome.status_code, outcome.error, ErrorType.MODEL_ERROR, outcome.model_error)
            return Decision(failed, Ack("model_error"))
        case InvalidAnswer():
            return Decision(Failed(502, outcome.error, ErrorType.INVALID_MODEL_ANSWER), Ack("invalid_model_answer"))
        case Unavailable():
            return _decide_unavailable(outcome, given)
        case Cancelled():
            return Decision(Failed(499, "the producer cancelled the request", ErrorType.CANCELLED), Ack("cancelled"))
        case DeadlyTooOften():
            error = f"a worker died with the request {outcome.start_count} times"
            return Decision(Failed(500, error, ErrorType.TOO_MANY_REDELIVERIES), Reject("too_many_redeliveries"))
        case Found():
            return Decision(None, Ack("already_completed"))
        case StoreUnavailable():
            if given.redelivered and not given.draining:
                return Decision(None, Hold("result_store_down"))
            return Decision(None, Requeue("result_store_down"))
        case CopyRefused():
            return Decision(Failed(500, outcome.error, ErrorType.MODEL_UNAVAILABLE), Reject("copy_refused"))
        case CopyUnconfirmed():
            return Decision(None, Requeue("publish_refused"))
        case Interrupted():
            return Decision(None, Requeue(outcome.reason))
        case Bug():
            return Decision(Failed(500, outcome.error, ErrorType.INTERNAL_ERROR), Reject("internal_error"))
        case _ as unreachable:
            assert_never(unreachable)


def _decide_unavailable(outcome: Unavailable, given: Circumstances) -> Decision:
    if given.draining:
        return Decision(None, Requeue("model_gone_while_draining"))
    if given.retry_count < given.max_retries:
        return Decision(None, Republish("model_unavailable", given.retry_count + 1))
    tries = given.max_retries + 1
    error = f"the model was unavailable in {tries} {'try' if tries == 1 else 'tries'}: {outcome.error}"
    return Decision(Failed(500, error, ErrorType.MODEL_UNAVAILABLE), Reject("retries_used_up"))
