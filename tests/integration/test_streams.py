"""Streamed requests on a real RabbitMQ and Redis: what a follower sees, and what a poller of the key sees."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis

from devstack.follow import Followed, follow
from devstack.processes import wait_until

from .support import LONG_TIMEOUT_S, TTL_S, Deployment, completed_text, said

pytestmark = pytest.mark.integration


def streamed(deployment: Deployment, prompt: str, **fields: Any) -> dict[str, Any]:
    request = deployment.request(prompt, **fields)
    request["payload"]["stream"] = True
    return request


def follow_all(deployment: Deployment, request_id: str, *, last_id: str = "0") -> list[Followed]:
    with redis.Redis.from_url(deployment.redis_server.url) as results:
        return list(follow(results, request_id, last_id=last_id, give_up_after_s=LONG_TIMEOUT_S))


def text_of(entries: list[Followed]) -> str:
    chunks = [chunk for entry in entries if entry.kind == "chunk" for chunk in entry.data]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_a_follower_reads_the_same_text_as_the_result_holds_and_it_is_billed(deployment: Deployment) -> None:
    worker = deployment.start_worker()
    request_id = deployment.publish(streamed(deployment, "tell me of rivers"))
    entries = follow_all(deployment, request_id)
    assert entries[-1].kind == "done"
    result = deployment.wait_result(request_id)
    assert text_of(entries) == completed_text(result) == said("tell me of rivers")
    assert result["result"]["object"] == "chat.completion"
    assert 0 < deployment.redis_server.client().ttl(f"infer_stream:{request_id}") <= TTL_S
    deployment.serve_next()
    deployment.stop_empty(worker)
    usage = result["result"]["usage"]
    event = deployment.croesus.event_for(request_id)
    assert event is not None
    assert event["data"]["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    (record,) = deployment.metric_server.records_for(request_id)
    assert record["streamed"] is True
    assert record["ttft_s"] is not None


def test_a_streamed_answer_is_the_one_that_it_would_have_been_unstreamed(deployment: Deployment) -> None:
    deployment.start_worker()
    plain = deployment.wait_result(deployment.publish(deployment.request("tell me of lakes")))["result"]
    joined = deployment.wait_result(deployment.publish(streamed(deployment, "tell me of lakes")))["result"]
    for body in (plain, joined):
        # the second of two equal prompts is found in the prefix cache
        usage = body["usage"]
        body["usage"] = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        for name in ("id", "created", "metrics"):
            body.pop(name, None)
    message = plain["choices"][0]["message"]
    # null in the plain answer, and in no chunk
    plain["choices"][0]["message"] = {name: message[name] for name in joined["choices"][0]["message"]}
    assert {name: plain[name] for name in joined if name != "choices"} == {
        name: joined[name] for name in joined if name != "choices"
    }
    assert plain["choices"][0]["message"] == joined["choices"][0]["message"]
    assert plain["choices"][0]["finish_reason"] == joined["choices"][0]["finish_reason"]


def test_the_first_chunk_is_there_while_the_model_still_speaks(deployment: Deployment) -> None:
    deployment.start_worker()
    assert deployment.model is not None
    deployment.model.behave(match="slowly", token_delay_s=0.4)
    request_id = deployment.publish(streamed(deployment, "say it slowly please"))
    client = deployment.redis_server.client()
    wait_until(lambda: client.xlen(f"infer_stream:{request_id}"), timeout_s=LONG_TIMEOUT_S, what="a first chunk")
    assert deployment.result(request_id) is None
    began_at = time.monotonic()
    deployment.wait_result(request_id)
    assert time.monotonic() - began_at > 0.4


def test_a_cut_stream_is_retried_and_begins_again_with_restart(deployment: Deployment) -> None:
    worker = deployment.start_worker()
    assert deployment.model is not None
    deployment.model.behave(match="twice", times=1, fault="cut_off", after_events=3)
    request_id = deployment.publish(streamed(deployment, "say it twice"))
    entries = follow_all(deployment, request_id)
    kinds = [entry.kind for entry in entries]
    restart = kinds.index("restart")
    assert kinds[0] == "chunk"
    assert kinds[-1] == "done"
    assert text_of(entries[restart:]) == said("say it twice")
    assert deployment.calls("say it twice") == 2
    deployment.stop_empty(worker)


def test_a_refused_stream_ends_with_the_failed_result(deployment: Deployment) -> None:
    deployment.start_worker()
    assert deployment.model is not None
    deployment.model.behave(match="refuse me", status=400, body='{"error":{"message":"no"}}')
    request_id = deployment.publish(streamed(deployment, "refuse me"))
    (last,) = follow_all(deployment, request_id)
    assert last.kind == "failed"
    assert last.data["status_code"] == 400
    assert deployment.wait_result(request_id) == last.data


def test_a_follower_goes_on_behind_the_last_entry_that_it_has_seen(deployment: Deployment) -> None:
    deployment.start_worker()
    assert deployment.model is not None
    deployment.model.behave(match="again", token_delay_s=0.1)
    request_id = deployment.publish(streamed(deployment, "and once again"))
    every = follow_all(deployment, request_id)
    rest = follow_all(deployment, request_id, last_id=every[1].last_id)
    assert rest == every[2:]
