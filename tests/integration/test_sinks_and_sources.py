"""MetricServer, Croesus and the sources of numbers may fail in any way: requests are not slowed, money is not lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from devstack.behaviour import Answer, Behaviour, deliver
from devstack.http_server import Exchange, HttpServer

from .support import Deployment, Producer, completed_text, records, said, until, wait_record, wait_results

pytestmark = pytest.mark.integration

PROMPT = "What does this cost?"
DCGM_PAGE = """\
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0", UUID="GPU-a", device="nvidia0"} 87
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a"} 1024
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-a"} 2048
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a"} 301.5
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a"} 9223372036854775794
"""


class Page:
    """A source of numbers: one page, and a behaviour."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.behaviour = Behaviour()
        self.server = HttpServer(self._answer)
        self.url = f"{self.server.url}/metrics"

    def _answer(self, exchange: Exchange) -> None:
        deliver(exchange, Answer(200, self.text.encode(), {"Content-Type": "text/plain"}), self.behaviour)


@pytest.fixture
def dcgm() -> Iterator[Page]:
    page = Page(DCGM_PAGE)
    with page.server:
        yield page


def wait_document(deployment: Deployment, *, after: int = 0, **wanted: Any) -> dict[str, Any]:
    """Wait for a document, not one of the first `after`, for which each named predicate holds."""
    found: list[dict[str, Any]] = []

    def look() -> bool:
        found[:] = [
            document
            for document in deployment.metric_server.documents[after:]
            if all(predicate(document[name]) for name, predicate in wanted.items())
        ]
        return bool(found)

    deployment.metric_server.wait_until(look, what=f"a document with {', '.join(wanted)}", timeout_s=20.0)
    return found[0]


def test_r71_sinks_that_fail_do_not_slow_requests_and_usage_is_delivered_once_they_are_back(
    deployment: Deployment,
) -> None:
    worker = deployment.start_worker(RABBITMQ_PREFETCH=4)
    deployment.metric_server.behave(status=503)
    deployment.croesus.refuse()
    begun_at = time.monotonic()
    sent = Producer(deployment, 200, 1000.0, PROMPT).start().join(timeout_s=60.0)
    results = wait_results(deployment, sent, timeout_s=60.0)
    taken_s = time.monotonic() - begun_at
    assert all(completed_text(results[item.request_id]) == said(item.prompt) for item in sent)
    assert taken_s < 20.0
    wait_record(worker, "metrics_flush_failed")
    wait_record(worker, "usage_flush_failed")
    assert deployment.croesus.events == []
    deployment.metric_server.behave()
    deployment.croesus.start()
    until(lambda: len(deployment.croesus.events) == 200, "every event")
    assert {event["id"] for event in deployment.croesus.events} == {item.request_id for item in sent}
    wait_record(worker, "usage_flush_recovered")
    wait_record(worker, "metrics_flush_recovered")
    assert len(records(worker, "metrics_flush_failed")) < 5  # said when it begins, then seldom
    deployment.stop_empty(worker)


@pytest.mark.parametrize("hanging", ["metric_server", "croesus"])
def test_a_sink_that_hangs_delays_neither_the_other_sink_nor_requests(deployment: Deployment, hanging: str) -> None:
    deployment.start_worker(METRICS_HTTP_TIMEOUT_S=2)
    sink = getattr(deployment, hanging)
    sink.behave(delay_s=600.0)
    deployment.serve_next()
    sink.wait_until(lambda: sink.post_count >= 1, what="a post that hangs")
    begun_at = time.monotonic()
    request_ids = [deployment.publish(deployment.request(f"{PROMPT} {number}")) for number in range(20)]
    for request_id in request_ids:
        deployment.wait_result(request_id)
    assert time.monotonic() - begun_at < 2.0
    if hanging == "metric_server":
        until(lambda: all(map(deployment.croesus.event_for, request_ids)), "every event at Croesus")
    else:
        documents = deployment.metric_server
        until(lambda: all(map(documents.records_for, request_ids)), "every record at MetricServer")


def test_an_event_that_croesus_refuses_holds_no_other_back(deployment: Deployment) -> None:
    deployment.start_worker()
    bad = deployment.request(PROMPT)
    deployment.croesus.behave(match=bad["request_id"], status=400)
    deployment.publish(bad)
    good_ids = [deployment.publish(deployment.request(f"{PROMPT} {number}")) for number in range(5)]
    until(lambda: all(map(deployment.croesus.event_for, good_ids)), "the other events")
    assert deployment.croesus.event_for(bad["request_id"]) is None


def test_r74_an_event_that_was_taken_without_a_word_is_sent_again_under_its_id(
    deployment: Deployment,
) -> None:
    worker = deployment.start_worker()
    request = deployment.request(PROMPT)
    # stored, and then the answer is lost: the worker cannot know
    deployment.croesus.behave(match=request["request_id"], times=1, fault="reset")
    deployment.publish(request)
    until(lambda: deployment.croesus.duplicate_count == 1, "the event came again")
    (event,) = deployment.croesus.events
    assert event["id"] == request["request_id"]
    assert event["source"] == f"/iris/inference_worker/deployments/{deployment.deployment_id}"
    deployment.stop_empty(worker)


def test_an_event_bills_what_the_answer_says_and_names_who_pays(deployment: Deployment) -> None:
    deployment.start_worker()
    deployment.model.behave(match=PROMPT, completion_tokens=7, cached_tokens=2)
    request_id = deployment.publish(deployment.request(PROMPT))
    usage = deployment.wait_result(request_id)["result"]["usage"]
    until(lambda: deployment.croesus.event_for(request_id), "the event")
    event = deployment.croesus.event_for(request_id)
    assert event is not None
    assert (event["specversion"], event["type"]) == ("1.0", "iris.inference.token_usage.v1")
    assert event["subject"] == "user-1"
    assert event["data"] == {
        "request_id": request_id,
        "deployment_id": deployment.deployment_id,
        "replica_id": "replica-1",
        "user_id": "user-1",
        "org_id": "org-1",
        "model": deployment.model_name,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": 7,
        "total_tokens": usage["prompt_tokens"] + 7,
        "cached_tokens": 2,
    }


def test_r73_what_cannot_be_counted_is_delivered_and_not_billed(deployment: Deployment) -> None:
    worker = deployment.start_worker()
    usages = ["null", "{}", '{"prompt_tokens":5}', '"5"', '{"prompt_tokens":-1,"completion_tokens":2}']
    usages += ['{"prompt_tokens":1.5,"completion_tokens":2}', '{"prompt_tokens":1e999,"completion_tokens":2}']
    sent = {}
    for number, usage in enumerate(usages):
        body = f'{{"choices":[],"usage":{usage}}}'
        prompt = f"{PROMPT} {number}."
        deployment.model.behave(match=prompt, body=body)
        sent[deployment.publish(deployment.request(prompt))] = body
    for request_id, body in sent.items():
        assert deployment.wait_result(request_id)["status"] == "completed"
        assert (deployment.result_bytes(request_id) or b"").endswith(f'"result":{body}}}'.encode())
    until(lambda: all(map(deployment.metric_server.records_for, sent)), "every record")
    for request_id in sent:
        (record,) = deployment.metric_server.records_for(request_id)
        assert record["total_tokens"] is None
    assert worker.stop() == 0
    assert deployment.croesus.events == []


def test_a_document_has_the_numbers_of_every_source(deployment: Deployment, dcgm: Page) -> None:
    deployment.start_worker(DCGM_METRICS_URL=dcgm.url)
    request_id = deployment.publish(deployment.request(PROMPT))
    until(lambda: deployment.metric_server.records_for(request_id), "its record")
    document = wait_document(deployment, model_metrics=bool, gpus=bool, queue=bool, health=lambda it: it["healthy"])
    assert document["schema"] == "inference_worker.metrics/1"
    assert document["model_metrics"]["kv_cache_usage"] is not None
    (gpu,) = document["gpus"]
    assert (gpu["gpu"], gpu["uuid"], gpu["utilization"]) == ("0", "GPU-a", 0.87)
    assert (gpu["memory_used_bytes"], gpu["memory_free_bytes"]) == (1024 * 2**20, 2048 * 2**20)
    assert gpu["temperature_c"] is None  # "no value", as the exporter prints it
    assert document["queue"] == {"depth": 0, "consumers": 1, "dead_letter_depth": 0}
    (record,) = deployment.metric_server.records_for(request_id)
    assert (record["status"], record["status_code"], record["disposition"]) == ("completed", 200, "ack")


def test_the_depth_counts_what_waits_and_what_is_dead(deployment: Deployment) -> None:
    deployment.start_worker()
    deployment.publish(b"no JSON")
    deployment.model.behave(match=PROMPT, delay_s=60.0)
    deployment.publish(deployment.request(PROMPT))
    deployment.model.ledger.wait_for_calls(PROMPT)
    for number in range(3):
        deployment.publish(deployment.request(f"I wait {number}"))
    wanted = {"depth": 3, "consumers": 1, "dead_letter_depth": 1}
    wait_document(deployment, queue=lambda queue: queue == wanted)


def test_a_source_that_hangs_is_null_and_delays_no_document_and_no_request(deployment: Deployment, dcgm: Page) -> None:
    dcgm.behaviour = Behaviour(delay_s=600.0)
    deployment.model.behave_metrics(delay_s=600.0)
    deployment.start_worker(DCGM_METRICS_URL=dcgm.url, METRICS_HTTP_TIMEOUT_S=1)
    begun_at = time.monotonic()
    for number in range(20):
        deployment.wait_result(deployment.publish(deployment.request(f"{PROMPT} {number}")))
    assert time.monotonic() - begun_at < 2.0
    document = wait_document(deployment, gpus=lambda it: it is None, model_metrics=lambda it: it is None, queue=bool)
    assert document["queue"]["consumers"] == 1
    seen = len(deployment.metric_server.documents)
    dcgm.behaviour = Behaviour()
    deployment.model.behave_metrics()
    wait_document(deployment, after=seen, gpus=bool, model_metrics=bool)


def test_r68_a_page_that_breaks_the_parser_is_null_and_ends_no_thread(deployment: Deployment, dcgm: Page) -> None:
    dcgm.text = "<html>502 Bad Gateway</html>"
    deployment.model.behave_metrics(status=500, body="no")
    worker = deployment.start_worker(DCGM_METRICS_URL=dcgm.url)
    wait_document(deployment, gpus=lambda it: it is None, model_metrics=lambda it: it is None)
    seen = len(deployment.metric_server.documents)
    dcgm.text = DCGM_PAGE
    deployment.model.behave_metrics()
    wait_document(deployment, after=seen, gpus=bool, model_metrics=bool)
    deployment.serve_next()
    assert worker.stop() == 0


def test_the_health_snapshot_says_when_the_model_is_not_there(deployment: Deployment) -> None:
    deployment.start_worker()
    wait_document(deployment, health=lambda it: it["healthy"])
    deployment.model.behave_health(status=503)
    document = wait_document(deployment, health=lambda it: not it["healthy"])
    assert "503" in document["health"]["detail"]
    assert abs(document["health"]["timestamp"] - time.time()) < 60.0


def test_r39_no_proxy_variable_leads_any_call_elsewhere(deployment: Deployment, dcgm: Page) -> None:
    nowhere = "http://127.0.0.1:9"
    deployment.start_worker(
        DCGM_METRICS_URL=dcgm.url, HTTP_PROXY=nowhere, http_proxy=nowhere, ALL_PROXY=nowhere, all_proxy=nowhere
    )
    request_id = deployment.publish(deployment.request(PROMPT))
    assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)
    until(lambda: deployment.croesus.event_for(request_id), "the event")
    wait_document(deployment, gpus=bool, model_metrics=bool)
    assert json.dumps(deployment.metric_server.refusals) == "[]"
