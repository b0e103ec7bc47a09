"""The documents that leave, their schemas and the page that describes them."""

from __future__ import annotations

import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from inference_worker.documents import (
    GpuMetrics,
    HealthSnapshot,
    InferenceRequestRecord,
    MetricsDocument,
    ModelMetrics,
    QueueDepth,
    UsageCloudEvent,
    Window,
    encode_document,
    encode_record,
    json_schema,
)

ROOT = Path(__file__).resolve().parents[2]


def _record(**changes: Any) -> InferenceRequestRecord:
    fields: dict[str, Any] = {
        "request_id": None,
        "received_at": None,
        "started_at": 1.0,
        "finished_at": 2.0,
        "queue_wait_s": None,
        "model_latency_s": None,
        "total_latency_s": 1.0,
        "status": None,
        "status_code": None,
        "error_type": None,
        "disposition": "reject",
        "retry_count": 0,
        "streamed": False,
    }
    return InferenceRequestRecord(**fields | changes)


def _document(**changes: Any) -> MetricsDocument:
    fields: dict[str, Any] = {
        "deployment_id": "d",
        "replica_id": "r",
        "user_id": "u",
        "org_id": "",
        "model": "m",
        "worker_version": "1",
        "window": Window(1.0, 2.0),
        "requests": [_record()],
        "requests_dropped": 0,
        "health": HealthSnapshot(True, 1.5, "HTTP 200"),
        "model_metrics": ModelMetrics(),
        "gpus": [GpuMetrics()],
        "queue": QueueDepth(),
    }
    return MetricsDocument(**fields | changes)


def _encode(document: MetricsDocument) -> bytes:
    """Encode it as the reporter does."""
    records = [encode_record(record) for record in document.requests]
    return bytes(encode_document(msgspec.structs.replace(document, requests=[]), records))


def _validate(document: Any, kind: type[msgspec.Struct]) -> None:
    jsonschema.validate(document, json_schema(kind), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("name", ["metrics-document.schema.json", "usage-event.schema.json"])
def test_schemas_in_docs_are_those_of_the_types(name: str) -> None:
    """When this fails: `python -m tools.write_schemas`."""
    rendered = runpy.run_path(str(ROOT / "tools" / "write_schemas.py"))["render_schemas"]()
    text = (ROOT / "docs" / "schemas" / name).read_text(encoding="utf-8")
    assert text == rendered[name]
    jsonschema.Draft202012Validator.check_schema(json.loads(text))


@pytest.mark.parametrize(
    "document",
    [
        _document(),
        _document(requests=[], model_metrics=None, gpus=None, queue=None),
        _document(requests=[_record(prompt_tokens=3, completion_tokens=4, total_tokens=7, ttft_s=0.25)]),
    ],
)
def test_a_document_is_valid_by_its_schema(document: MetricsDocument) -> None:
    _validate(json.loads(_encode(document)), MetricsDocument)


@pytest.mark.parametrize("count", [0, 1, 2, 1001])
def test_a_document_of_any_length_is_what_one_call_would_have_made(count: int) -> None:
    records = [_record(request_id=f"r-{number}") for number in range(count)]
    document = _document(requests=records, model='m "requests":[],')
    assert _encode(document) == msgspec.json.encode(document)


def test_unknown_is_null_and_never_left_out() -> None:
    written = json.loads(_encode(_document()))
    assert written["schema"] == "inference_worker.metrics/1"
    assert written["window"] == {"from": 1.0, "to": 2.0}
    assert written["gpus"] == [dict.fromkeys(GpuMetrics.__struct_fields__)]
    assert written["model_metrics"] == dict.fromkeys(ModelMetrics.__struct_fields__)
    assert written["requests"][0].keys() == set(InferenceRequestRecord.__struct_fields__)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_r70_a_document_has_no_nan_or_infinity(number: float) -> None:
    written = _encode(_document(requests=[_record(ttft_s=number)]))
    assert json.loads(written, parse_constant=pytest.fail)["requests"][0]["ttft_s"] is None


@pytest.mark.parametrize(
    "broken",
    [
        {"requests_dropped": -1},
        {"gpus": [json.loads(msgspec.json.encode(GpuMetrics(utilization=87.0)))]},
        {"window": {"from": 1.0}},
        {"schema": "inference_worker.metrics/2"},
    ],
)
def test_the_schema_refuses_what_the_contract_forbids(broken: dict[str, Any]) -> None:
    document = json.loads(_encode(_document())) | broken
    with pytest.raises(jsonschema.ValidationError):
        _validate(document, MetricsDocument)


def test_a_field_that_is_left_out_is_refused_by_the_schema() -> None:
    document = json.loads(_encode(_document()))
    del document["requests"][0]["prompt_tokens"]
    with pytest.raises(jsonschema.ValidationError):
        _validate(document, MetricsDocument)


@pytest.mark.parametrize(("at", "kind"), [(0, MetricsDocument), (1, UsageCloudEvent)])
def test_the_examples_of_the_contracts_page_are_valid(at: int, kind: type[msgspec.Struct]) -> None:
    page = (ROOT / "docs" / "contracts.md").read_text(encoding="utf-8")
    examples = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 2
    example = json.loads(examples[at])
    _validate(example, kind)
    # read and written again it is the same: the example shows every field, and none that is not there
    assert json.loads(msgspec.json.encode(msgspec.json.decode(examples[at], type=kind))) == example


def test_the_contracts_page_names_every_field() -> None:
    page = (ROOT / "docs" / "contracts.md").read_text(encoding="utf-8")
    prose = re.sub(r"```json\n.*?```", "", page, flags=re.DOTALL)
    for kind in (MetricsDocument, InferenceRequestRecord, ModelMetrics, GpuMetrics, QueueDepth, UsageCloudEvent):
        for field in kind.__struct_fields__:
            assert re.search(rf"`{field}[`.]", prose), f"{kind.__name__}.{field}"
