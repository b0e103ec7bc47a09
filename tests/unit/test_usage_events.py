"""Usage events as Croesus sees them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import msgspec
import pytest

from inference_worker.documents import UsageCloudEvent, UsageData, UsageEvent, json_schema
from inference_worker.usage_events import encode_batch, encode_event

SCHEMA = json_schema(UsageCloudEvent)


def _event(request_id: str = "r1", *, completed_at: float = 1780000011.9, **changes: Any) -> UsageEvent:
    data = UsageData(
        request_id=request_id,
        deployment_id="7c0e",
        replica_id="gpu-0",
        user_id="user-1",
        org_id="",
        model="m",
        prompt_tokens=5,
        completion_tokens=7,
        total_tokens=12,
        cached_tokens=None,
    )
    return UsageEvent(completed_at=completed_at, data=msgspec.structs.replace(data, **changes))


def test_an_event_has_the_attributes_of_the_contract() -> None:
    payload = encode_event(_event())
    assert payload.content_type == "application/cloudevents+json"
    assert json.loads(payload.body) == {
        "specversion": "1.0",
        "id": "r1",
        "source": "/iris/inference_worker/deployments/7c0e",
        "type": "iris.inference.token_usage.v1",
        "subject": "user-1",
        "time": "2026-05-28T20:26:51.900000Z",
        "datacontenttype": "application/json",
        "data": {
            "request_id": "r1",
            "deployment_id": "7c0e",
            "replica_id": "gpu-0",
            "user_id": "user-1",
            "org_id": "",
            "model": "m",
            "prompt_tokens": 5,
            "completion_tokens": 7,
            "total_tokens": 12,
            "cached_tokens": None,
        },
    }


def test_r74_the_same_event_gives_the_same_bytes_in_every_attempt() -> None:
    assert encode_event(_event()).body == encode_event(_event()).body


def test_r74_source_and_id_are_the_same_from_another_replica() -> None:
    one, other = (json.loads(encode_event(_event(replica_id=name)).body) for name in ("gpu-0", "gpu-1"))
    assert (one["source"], one["id"]) == (other["source"], other["id"])


@pytest.mark.parametrize("request_id", ["größe-✓-日本", "😀", 'q"uote\\', "a" * 255])
def test_a_request_id_of_any_letters_arrives_as_it_is(request_id: str) -> None:
    written = json.loads(encode_event(_event(request_id)).body.decode("utf-8"))
    assert written["id"] == written["data"]["request_id"] == request_id


@pytest.mark.parametrize("completed_at", [0.0, 1780000000.0, 1780000011.9])
def test_an_event_is_valid_by_its_schema(completed_at: float) -> None:
    body = encode_event(_event(completed_at=completed_at, cached_tokens=3)).body
    jsonschema.validate(json.loads(body), SCHEMA, cls=jsonschema.Draft202012Validator)
    # checks what the schema alone does not: that `time` is RFC 3339, with a zone
    assert msgspec.json.decode(body, type=UsageCloudEvent).time.timestamp() == pytest.approx(completed_at)


def test_a_batch_is_an_array_of_events() -> None:
    payload = encode_batch([_event("r1"), _event("r2")])
    assert payload.content_type == "application/cloudevents-batch+json"
    batch = json.loads(payload.body)
    assert batch == [json.loads(encode_event(_event(name)).body) for name in ("r1", "r2")]


@pytest.mark.parametrize("changes", [{"request_id": ""}, {"user_id": ""}])
def test_no_exception_of_the_sdk_leaves_the_adapter(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="no CloudEvent"):
        encode_event(_event(**changes))
