"""Usage events as CloudEvents 1.0 over HTTP, structured or batched: bytes out, nothing sent.

Pure: any thread, no I/O. The only file that knows cloudevents.
Sources: design section 10; CloudEvents 1.0, HTTP binding 3.2 and 3.3; field report R74.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from cloudevents.core.exceptions import BaseCloudEventException
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent

from inference_worker.documents import USAGE_EVENT_TYPE, UsageEvent, to_plain

_BATCH_CONTENT_TYPE = "application/cloudevents-batch+json"

_FORMAT = JSONFormat()


@dataclass(frozen=True, slots=True)
class HttpPayload:
    """What goes into one POST."""

    body: bytes
    content_type: str


def encode_event(event: UsageEvent) -> HttpPayload:
    """Encode one event in structured mode."""
    return HttpPayload(_encode(event), _FORMAT.get_content_type())


def encode_batch(events: Iterable[UsageEvent]) -> HttpPayload:
    """Encode events in batched mode. The SDK has none: a batch is a JSON array of structured events."""
    return HttpPayload(b"[" + b",".join(map(_encode, events)) + b"]", _BATCH_CONTENT_TYPE)


def _encode(event: UsageEvent) -> bytes:
    """Write one event; the same event gives the same bytes in every attempt and process.

    Raises:  ValueError (an empty request_id or user_id: a bug of ours, since both are checked where they come in)
    """
    data = event.data
    attributes = {
        # the SDK would make a random id and take the time of sending: the same work would be billed twice (R74)
        "id": data.request_id,
        "source": f"/iris/inference_worker/deployments/{data.deployment_id}",
        "type": USAGE_EVENT_TYPE,
        "subject": data.user_id,
        "time": datetime.fromtimestamp(event.completed_at, UTC),
        "datacontenttype": "application/json",
    }
    try:
        return _FORMAT.write(CloudEvent(attributes, to_plain(data)))
    except BaseCloudEventException as err:
        raise ValueError(f"no CloudEvent can be made of this usage: {err}") from err
