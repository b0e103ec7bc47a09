"""The exception tree: one root, one family for each neighbour.

Pure: any thread, no I/O. Adapters translate a library's exceptions into these (`raise Ours(...) from err`), so that
nothing above an adapter knows a library. They are classified by type, never by their text.
"""

from __future__ import annotations

from dataclasses import dataclass


class WorkerError(Exception):
    """The root of every exception that this package raises on purpose."""


# -- configuration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """One variable that cannot be used."""

    variable: str
    #: the refused text; None when there is none or when it is a secret
    value: str | None
    #: what the variable has to be, as a clause: "must be an integer from 1 to 65535"
    rule: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f" is {self.value!r}, but"
        return f"{self.variable}{shown} {self.rule}"


class ConfigError(WorkerError):
    """Raised by `config.load_config`; the process reports all faults at once and ends with 78."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("; ".join(str(fault) for fault in faults))
        self.faults = faults


# -- the message ------------------------------------------------------------------------------------------------------


class MalformedRequest(WorkerError):
    """Raised by `messages.decode_request`: a 400 that names the field, and a dead letter."""

    def __init__(self, error: str, *, field: str | None, request_id: str | None) -> None:
        super().__init__(error)
        #: the field at fault; None when the body as a whole is no JSON object
        self.field = field
        #: where the failed result goes; None when no usable one could be read
        self.request_id = request_id


# -- HTTP -------------------------------------------------------------------------------------------------------------


class HttpError(WorkerError):
    """Raised by `http_client`: there is no whole answer."""


class HttpUnreachable(HttpError):
    """The peer could not be reached or hung up before a byte of the answer: refused, reset, DNS, connect timeout."""


class HttpTimeout(HttpError):
    """The bound on the whole exchange ran out."""


class HttpIncomplete(HttpError):
    """The answer began and is not whole: cut off, wrong length, bad chunk, not decompressible."""


class HttpTooLarge(HttpError):
    """The answer, decompressed, is longer than the cap."""


class HttpCutOff(HttpError):
    """We ended the exchange ourselves (hard stop)."""


class HttpCancelled(HttpError):
    """We ended this one exchange ourselves, because nobody waits for its answer any more."""


# -- the result store -------------------------------------------------------------------------------------------------


class StoreDown(WorkerError):
    """Raised by `result_store`: Redis cannot be read or written, for whatever reason."""


class StoreLoginRefused(StoreDown):
    """Redis refuses our password: a person must act. The library's class for it is a connection error."""


# -- the broker -------------------------------------------------------------------------------------------------------


class BrokerError(WorkerError):
    """The broker cannot be reached, refuses us, or the link was lost."""


class BrokerUnusable(BrokerError):
    """Unknown host, refused login, missing vhost: waiting alone does not help, a person must act."""


class CopyNotConfirmed(BrokerError):
    """Raised by `message_publisher`: unroutable, refused, or not confirmed in time. A later try may succeed."""


class CopyRefusedForGood(BrokerError):
    """Raised by `message_publisher`: the broker will never take this copy (406, larger than its limit)."""


# -- the outbox -------------------------------------------------------------------------------------------------------


class OutboxUnusable(WorkerError):
    """Raised by `usage_outbox` at the start: the file cannot be opened or read, or another worker has it."""
