"""Calls that are cut off, and a vLLM that goes away in the middle of them."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from typing import Any

from devstack.processes import wait_until
from devstack.producer import cancel
from tests.vllm.registry import BOUNDED_OPTIONS, scenario
from tests.vllm.rig import LONG_TIMEOUT_S, Deployment, Rig, chat, check, check_equal, streamed, worker_of

#: more than 20 s of work for vLLM, if nobody ends it
_LONG_TOKENS = 30_000
#: some seconds of work: what runs when vLLM goes away, and is to be done after it has come back
_SOME_TOKENS = 1_200
_SHORT_TOKENS = 8
#: seconds for vLLM to have ended a generation whose client is gone, far less than the generation would take
_FREE_TIMEOUT_S = 10.0
_CANCEL_INTERVAL_S = 1.0
#: seconds from the key in Redis to the result: the interval, and what a round takes
_CANCEL_LIMIT_S = _CANCEL_INTERVAL_S + 0.5
#: on a busy machine a process may wait longer than that for a core
_CANCEL_TRIES = 5


@scenario("a worker that is told twice to stop cuts its calls off, and vLLM stops computing them")
def hard_stop(rig: Rig) -> str:
    with rig.deployment(RABBITMQ_PREFETCH=2) as deployment:
        request_ids = [deployment.ask(each) for each in (_long(), streamed(_long()))]
        rig.vllm.wait_running_count(2, timeout_s=LONG_TIMEOUT_S)
        worker = worker_of(deployment)
        worker.signal(signal.SIGTERM)
        wait_until(lambda: not worker.ready(), timeout_s=LONG_TIMEOUT_S, what="the worker drains")
        check_equal(rig.vllm.running_count(), 2, "calls that run on after the first signal")
        worker.signal(signal.SIGTERM)
        freed_s = rig.vllm.wait_running_count(0, timeout_s=_FREE_TIMEOUT_S)
        check_equal(worker.wait(), 0, "the worker's exit code")
        check_equal(deployment.queue_depth(), 2, "requests back in the queue")
        check_equal([deployment.result(request_id) for request_id in request_ids], [None, None], "results")
        deployment.channel().queue_purge(deployment.queue)
    return f"vllm:num_requests_running 2 to 0 in {freed_s:.2f} s, both requests back in the queue, exit code 0"


@scenario("a request that is cancelled frees its slot and vLLM within the interval, plain and streamed")
def cancelled(rig: Rig) -> str:
    seen = []
    with rig.deployment(CANCEL_POLL_INTERVAL_S=_CANCEL_INTERVAL_S) as deployment:
        for payload in (_long(), streamed(_long())):
            tries = [_cancel_running(rig, deployment, payload)]
            while tries[-1][0] > _CANCEL_LIMIT_S and len(tries) < _CANCEL_TRIES:
                tries.append(_cancel_running(rig, deployment, payload))
            result_s, freed_s = tries[-1]
            check(result_s <= _CANCEL_LIMIT_S, f"seconds to the result and to vLLM's being free: {tries}")
            seen.append(f"499 after {result_s:.2f} s, vLLM free after {freed_s:.2f} s (try {len(tries)})")
        check_equal([event["data"]["completion_tokens"] for event in deployment.croesus.events], [], "usage events")
    return "; ".join(seen)


def _cancel_running(rig: Rig, deployment: Deployment, payload: dict[str, Any]) -> tuple[float, float]:
    """Cancel a running request; return the seconds to its result, and to vLLM's having ended the generation."""
    request_id = deployment.ask(payload)
    rig.vllm.wait_running_count(1, timeout_s=LONG_TIMEOUT_S)
    with deployment.redis_server.client() as results:
        begun_at = time.monotonic()
        cancel(results, request_id)
    result = deployment.wait_result(request_id)
    result_s = time.monotonic() - begun_at
    rig.vllm.wait_running_count(0, timeout_s=_FREE_TIMEOUT_S)
    freed_s = time.monotonic() - begun_at
    outcome = [result[name] for name in ("status", "status_code", "error_type")]
    check_equal(outcome, ["failed", 499, "cancelled"], "the result")
    check_equal(deployment.record(request_id)["disposition"], "ack", "the disposition")
    if "stream" in payload:
        check_equal(deployment.stream(request_id)[-1].kind, "failed", "the end of the stream")
    return result_s, freed_s


@scenario("SIGTERM to vLLM: its aborted answers are no results; all is done once it is back")
def model_terminated(rig: Rig) -> str:
    with rig.deployment(RABBITMQ_PREFETCH=4) as deployment:
        running = [
            deployment.ask(each) for each in (_some(), streamed(_some()), _some(n=2, **_SAMPLED), streamed(_some()))
        ]
        waiting = [deployment.ask(chat(f"Wait {number}.", max_tokens=_SHORT_TOKENS)) for number in range(8)]
        rig.vllm.wait_running_count(5, timeout_s=LONG_TIMEOUT_S)
        rig.vllm.terminate()
        exit_code = rig.vllm.wait_ended()
        check_equal([deployment.result(request_id) for request_id in running + waiting], [None] * 12, "results")
        _wait_held(deployment)
        # one that is starved may hang instead, and is killed in the end
        aborted = "finish_reason abort" in worker_of(deployment).log()
        check(aborted or exit_code == -signal.SIGKILL, "vLLM broke nothing off")
        shown = "answers aborted" if aborted else "hung"
        return (
            f"{shown}, exit code {exit_code}; no result while it was gone; {_finish(rig, deployment, running, waiting)}"
        )


@scenario("vLLM's engine process is killed: who was being served fails or retries, nobody else pays")
def engine_killed(rig: Rig) -> str:
    with (
        rig.deployment(RABBITMQ_PREFETCH=2) as plain,
        rig.deployment(RABBITMQ_PREFETCH=2, MODEL_RETRY_STATUS_CODES="500") as retrying,
    ):
        running, waiting = {}, {}
        for deployment in (plain, retrying):
            running[deployment] = [deployment.ask(each) for each in (_some(), streamed(_some()))]
            waiting[deployment] = [deployment.ask(chat(f"Wait {n}.", max_tokens=_SHORT_TOKENS)) for n in range(8)]
        rig.vllm.wait_running_count(4, timeout_s=LONG_TIMEOUT_S)
        rig.vllm.kill_engine()
        exit_code = rig.vllm.wait_ended()
        for deployment in (plain, retrying):
            _wait_held(deployment)
        # what follows needs these; another start would cost a minute
        rig.vllm.options = BOUNDED_OPTIONS
        rig.vllm.start()
        failed = [plain.wait_result(request_id) for request_id in running[plain]]
        outcomes = Counter(f"{result['status']} {result['status_code']}" for result in failed)
        answered = [
            request_id
            for request_id, result in zip(running[plain], failed, strict=True)
            if result["status"] == "completed"
        ]
        check(
            all(result["status"] == "completed" or result["error_type"] == "model_error" for result in failed),
            f"those that ran: {failed}",
        )
        for request_id in answered + running[retrying]:
            deployment = plain if request_id in answered else retrying
            check_equal(
                deployment.wait_answer(request_id)["usage"]["completion_tokens"], _SOME_TOKENS, "tokens of the answer"
            )
        for deployment, request_ids in (
            (plain, answered + waiting[plain]),
            (retrying, running[retrying] + waiting[retrying]),
        ):
            for request_id in request_ids:
                deployment.wait_answer(request_id)
            deployment.check_billed(request_ids)
        for deployment in (plain, retrying):
            retries = [deployment.record(request_id)["retry_count"] for request_id in waiting[deployment]]
            check_equal(retries, [0] * 8, "retries of those that waited")
        shown = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        messages = sorted({str(result["error"])[:40] for result in failed if result["status"] == "failed"})
        return (
            f"vLLM exits with {exit_code}; of the 2 running: {shown} {json.dumps(messages)}; with "
            f"MODEL_RETRY_STATUS_CODES=500 2 completed; all 16 waiting completed without a retry"
        )


#: greedy choices would be the same text twice
_SAMPLED = {"temperature": 1, "seed": 5}


def _long() -> dict[str, Any]:
    return chat(max_tokens=_LONG_TOKENS, ignore_eos=True)


def _some(**more: Any) -> dict[str, Any]:
    return chat(max_tokens=_SOME_TOKENS, ignore_eos=True, **more)


def _wait_held(deployment: Deployment) -> None:
    worker = worker_of(deployment)
    wait_until(lambda: not worker.ready(), timeout_s=LONG_TIMEOUT_S, what="the worker holds")


def _finish(rig: Rig, deployment: Deployment, running: list[str], waiting: list[str]) -> str:
    """Start vLLM again and see everything completed, whole, with one retry for what ran and none for what waited."""
    rig.vllm.start()
    for request_id in running:
        answer = deployment.wait_answer(request_id)
        check_equal({choice["finish_reason"] for choice in answer["choices"]}, {"length"}, "the finish reasons")
        check_equal(answer["usage"]["completion_tokens"], _SOME_TOKENS * len(answer["choices"]), "tokens of the answer")
        check_equal(deployment.record(request_id)["retry_count"], 1, "retries of what ran")
    for request_id in waiting:
        deployment.wait_answer(request_id)
        check_equal(deployment.record(request_id)["retry_count"], 0, "retries of what waited")
    for request_id in (running[1], running[3]):
        kinds = [entry.kind for entry in deployment.stream(request_id)]
        check_equal(kinds.count("restart"), 1, f"restarts in the stream {Counter(kinds)}")
        check_equal(kinds[-1], "done", "the end of the stream")
    tokens = deployment.check_billed(running + waiting)
    return f"4 that ran completed with 1 retry each, 8 that waited with none; {tokens} tokens billed, each request once"
