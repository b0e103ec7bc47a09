"""MetricServer keeps what it is given under the right token; Croesus bills an event once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from devstack.sinks import Croesus, MetricServer

ONE = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"


@pytest.fixture
def metric_server() -> Iterator[MetricServer]:
    with MetricServer(token="secret") as server:
        yield server


@pytest.fixture
def croesus() -> Iterator[Croesus]:
    with Croesus() as server:
        yield server


def event(event_id: str, *, source: str = "/deployments/1", tokens: int = 5, **fields: Any) -> dict[str, Any]:
    data = {"total_tokens": tokens}
    return {"specversion": "1.0", "id": event_id, "source": source, "type": "usage", "data": data, **fields}


def post_events(http: requests.Session, croesus: Croesus, document: Any, *, content_type: str = ONE) -> int:
    headers = {"Content-Type": content_type}
    return http.post(croesus.url + "/events", data=json.dumps(document), headers=headers, timeout=10).status_code


def test_a_document_with_the_token_is_kept(http: requests.Session, metric_server: MetricServer) -> None:
    document = {"requests": [{"request_id": "r"}]}
    answer = http.post(metric_server.url + "/metrics", json=document, headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 202
    assert metric_server.documents == [document]
    assert metric_server.records_for("r") == [{"request_id": "r"}]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}])
def test_a_document_without_the_token_is_a_401_and_not_kept(
    http: requests.Session, metric_server: MetricServer, headers: dict[str, str]
) -> None:
    assert http.post(metric_server.url + "/metrics", json={"requests": []}, headers=headers).status_code == 401
    assert metric_server.documents == []
    assert metric_server.refusals == [401]


@pytest.mark.parametrize("body", [b"{", b'{"requests": [], "x": NaN}', b"\xff", b"[]", b"{}"])
def test_what_is_no_metrics_document_is_a_400(http: requests.Session, metric_server: MetricServer, body: bytes) -> None:
    headers = {"Authorization": "Bearer secret"}
    assert http.post(metric_server.url + "/metrics", data=body, headers=headers).status_code == 400


def test_croesus_bills_an_event_once(http: requests.Session, croesus: Croesus) -> None:
    for each in (event("a"), event("b"), event("a"), event("a", source="/deployments/2")):
        assert post_events(http, croesus, each) == 202
    assert [each["id"] for each in croesus.events] == ["a", "b", "a"]
    assert croesus.duplicate_count == 1
    assert croesus.tokens_billed == 15


def test_croesus_takes_a_batch_and_drops_the_duplicates_in_it(http: requests.Session, croesus: Croesus) -> None:
    assert post_events(http, croesus, [event("a"), event("a"), event("b")], content_type=BATCH) == 202
    assert (len(croesus.events), croesus.duplicate_count) == (2, 1)


@pytest.mark.parametrize(
    ("document", "content_type", "status"),
    [
        (event("a"), "application/json", 415),
        ([event("a")], ONE, 400),
        (event("a"), BATCH, 400),
        (event(""), ONE, 400),
        (event("a", specversion="0.3"), ONE, 400),
        (event("a", data={}), ONE, 400),
    ],
)
def test_croesus_refuses_what_is_no_usage_event(
    http: requests.Session, croesus: Croesus, document: Any, content_type: str, status: int
) -> None:
    assert post_events(http, croesus, document, content_type=content_type) == status
    assert croesus.events == []


def test_one_bad_event_refuses_its_whole_batch(http: requests.Session, croesus: Croesus) -> None:
    assert post_events(http, croesus, [event("a"), event("")], content_type=BATCH) == 400
    assert croesus.events == []


def test_a_sink_told_to_answer_an_error_keeps_nothing(http: requests.Session, croesus: Croesus) -> None:
    croesus.behave(status=503)
    assert post_events(http, croesus, event("a")) == 503
    croesus.behave()
    assert post_events(http, croesus, event("a")) == 202
    assert (len(croesus.events), croesus.duplicate_count) == (1, 0)


def test_a_sink_that_loses_its_answer_has_kept_the_event(http: requests.Session, croesus: Croesus) -> None:
    croesus.behave(match='"a"', times=1, fault="drop")
    with pytest.raises(requests.ConnectionError):
        post_events(http, croesus, event("a"))
    assert post_events(http, croesus, event("a")) == 202
    assert croesus.duplicate_count == 1


def test_a_refusing_sink_comes_back_on_its_port(http: requests.Session, croesus: Croesus) -> None:
    croesus.refuse()
    with pytest.raises(requests.ConnectionError):
        post_events(http, croesus, event("a"))
    croesus.start()
    assert post_events(http, croesus, event("a")) == 202
