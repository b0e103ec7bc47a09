"""The documents that leave for MetricServer and Croesus, as types: what is unknown is None, never 0.

Pure: any thread, no I/O. The JSON Schemas in `docs/` are generated from here. Seconds, bytes, ratios from 0 to 1.
Source: design section 10.
"""

from __future__ import annotations

from datetime import datetime
from mmap import mmap
from typing import Annotated, Any, Final, Literal

import msgspec

METRICS_SCHEMA: Final = "inference_worker.metrics/1"
USAGE_EVENT_TYPE: Final = "iris.inference.token_usage.v1"

# the bounds are for the JSON Schemas; msgspec checks them when it decodes, never when we build a value
Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]


class InferenceRequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one delivery took and how it ended; made once, at its disposition."""

    request_id: str | None
    #: unix seconds, the proxy's clock
    received_at: float | None
    #: unix seconds, when a slot began
    started_at: float
    finished_at: float
    #: from received_at to started_at, never negative
    queue_wait_s: Amount | None
    #: the model call alone; None when the model was not called
    model_latency_s: Amount | None
    #: from started_at to finished_at
    total_latency_s: Amount
    #: "completed", "failed", or None when nothing was written
    status: str | None
    status_code: int | None
    error_type: str | None
    #: "ack", "reject", "requeue" or "republish"
    disposition: str
    retry_count: Count
    streamed: bool
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    total_tokens: Count | None = None
    cached_tokens: Count | None = None
    #: time to first token
    ttft_s: Amount | None = None
    #: mean time between tokens
    tbt_s: Amount | None = None


class Window(msgspec.Struct, frozen=True, rename={"from_": "from"}):
    """The time that a document covers, unix seconds."""

    from_: float
    to: float


class HealthSnapshot(msgspec.Struct, frozen=True):
    """The last word of the health checker."""

    healthy: bool
    #: unix seconds
    timestamp: float
    detail: str


class ModelMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers scraped from the model server."""

    #: 0 to 1
    kv_cache_usage: Ratio | None = None
    requests_running: Amount | None = None
    requests_waiting: Amount | None = None
    preemptions_total: Amount | None = None
    prompt_tokens_total: Amount | None = None
    generation_tokens_total: Amount | None = None
    #: 0 to 1, over the time since the scrape before (the first: since the model started)
    prefix_cache_hit_rate: Ratio | None = None


class GpuMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one GPU, from DCGM."""

    #: the host's index; "0/7" for MIG instance 7 of GPU 0
    gpu: str | None = None
    uuid: str | None = None
    #: 0 to 1
    utilization: Ratio | None = None
    memory_used_bytes: Count | None = None
    memory_free_bytes: Count | None = None
    power_w: Amount | None = None
    temperature_c: Amount | None = None


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """The deployment's queue and the dead letters, as the broker counts them."""

    #: ready messages; those in work are not among them
    depth: Count | None = None
    consumers: Count | None = None
    dead_letter_depth: Count | None = None


class MetricsDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST METRIC_SERVER_URL/metrics`."""

    schema: Literal["inference_worker.metrics/1"] = METRICS_SCHEMA
    deployment_id: str
    replica_id: str
    user_id: str
    org_id: str
    model: str
    worker_version: str
    window: Window
    requests: list[InferenceRequestRecord]
    #: records that no longer fitted the buffer since the last flush
    requests_dropped: Count
    health: HealthSnapshot
    model_metrics: ModelMetrics | None
    gpus: list[GpuMetrics] | None
    queue: QueueDepth | None


class UsageData(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`data` of a usage event."""

    request_id: str
    deployment_id: str
    replica_id: str
    user_id: str
    org_id: str
    model: str
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    cached_tokens: Count | None


class UsageEvent(msgspec.Struct, frozen=True, gc=False):
    """What one stored result has to be billed for; `usage_events` makes the CloudEvent of it."""

    #: unix seconds, when the request completed
    completed_at: float
    data: UsageData


_USAGE_DECODER = msgspec.json.Decoder(UsageEvent)


def encode_usage(event: UsageEvent) -> bytes:
    """Encode for the outbox."""
    return msgspec.json.encode(event)


def decode_usage(text: bytes) -> UsageEvent | None:
    """Decode what the outbox holds; None for what is no usage event."""
    try:
        return _USAGE_DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


class UsageCloudEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A usage event on its way to Croesus: CloudEvents 1.0, structured JSON. `source` and `id` together identify it."""

    specversion: Literal["1.0"]
    #: the request_id
    id: Annotated[str, msgspec.Meta(min_length=1)]
    #: /iris/inference_worker/deployments/<DEPLOYMENT_ID>
    source: Annotated[str, msgspec.Meta(min_length=1)]
    type: Literal["iris.inference.token_usage.v1"]
    #: the USER_ID
    subject: Annotated[str, msgspec.Meta(min_length=1)]
    #: when the request completed
    time: Annotated[datetime, msgspec.Meta(tz=True)]
    datacontenttype: Literal["application/json"]
    data: UsageData


_ENCODER = msgspec.json.Encoder()
#: a quote within a string is escaped, so this can be the member alone
_NO_REQUESTS = b'"requests":[]'


def encode_record(record: InferenceRequestRecord) -> bytes:
    """Encode to strict JSON. msgspec writes NaN and infinity as null, so no document can hold them."""
    return _ENCODER.encode(record)


def encode_document(document: MetricsDocument, records: list[bytes]) -> mmap:
    """Encode to strict JSON, with these encoded records in the place of its requests, which have to be empty.

    Into a mapping of its own, which goes back to the host with it. What malloc once gave for some megabytes it keeps
    when it is freed, between what has come after it: the resident memory grew by 2 MB with every few flushes.
    """
    head, tail = _ENCODER.encode(document).split(_NO_REQUESTS)
    head += b'"requests":['
    tail = b"]" + tail
    commas = max(0, len(records) - 1)
    text = mmap(-1, len(head) + sum(map(len, records)) + commas + len(tail))
    text.write(head)
    for number, record in enumerate(records):
        if number:
            text.write(b",")
        text.write(record)
    text.write(tail)
    return text


def to_plain(struct: msgspec.Struct) -> dict[str, Any]:
    """Convert to dicts and lists, for the cloudevents SDK."""
    plain: dict[str, Any] = msgspec.to_builtins(struct)
    return plain


def json_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Generate the JSON Schema of one document."""
    schema: dict[str, Any] = msgspec.json.schema(kind)
    for definition in schema["$defs"].values():
        # a default spares our own code an argument; on the wire every field is always there, unknown ones as null
        definition["required"] = list(definition["properties"])
        for field in definition["properties"].values():
            field.pop("default", None)
    return schema
