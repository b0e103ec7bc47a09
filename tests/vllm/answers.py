"""What producers get, plain and streamed, is what vLLM says to the same payload."""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from devstack.proxy import Direction, TcpProxy
from devstack.tiny_model import TOOL_CALL_TOKEN
from devstack.vllm_server import MODEL_NAME
from tests.vllm.compare import differences, unexpected_in
from tests.vllm.registry import scenario
from tests.vllm.rig import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    Deployment,
    Rig,
    chat,
    check,
    check_equal,
    streamed,
)

#: a tool that the model can call in few tokens; `strict`: else vLLM lets any JSON pass for its arguments
_WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
#: enough to have <tool_call> said at once
_CALL_A_TOOL = {str(TOOL_CALL_TOKEN): 100}
_TOOL_TOKENS = 240
_MANY, _PREFETCH = 200, 32
_STREAMS = 8
#: the first chunk at once, later ones gathered for at most 50 ms; a shared machine may add to that
_GATHER_MS = 50


@scenario("a plain chat completion is what vLLM says, byte for byte but for its ids and times")
def plain_chat(rig: Rig) -> str:
    payload = chat()
    expected = rig.direct(payload)
    with rig.deployment() as deployment:
        request_id, answer = deployment.answer(payload)
        found = differences(expected, answer)
        check(not found.absent and not found.other, f"the answers differ: {found}")
        check_equal(list(answer), list(expected), "the order of the fields")
        return f"{_shown(answer)}, {_check_timings(deployment, request_id, answer)}"


@scenario("a streamed chat completion, put together, is the plain one")
def streamed_chat(rig: Rig) -> str:
    return _compare_streamed(rig, "chat", chat(max_tokens=24))


@scenario("log probabilities, plain and streamed")
def logprobs(rig: Rig) -> str:
    payload = chat(max_tokens=12, logprobs=True, top_logprobs=2)
    return _compare_streamed(rig, "logprobs", payload)


@scenario("two choices, plain and streamed; without vLLM's timings the stream tells them")
def two_choices(rig: Rig) -> str:
    # greedy choices would be the same text twice
    return _compare_streamed(rig, "two-choices", chat(max_tokens=12, n=2, temperature=1, seed=5))


@scenario("a tool call that is asked for by name, plain and streamed")
def tool_by_name(rig: Rig) -> str:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    payload = chat(max_tokens=_TOOL_TOKENS, tools=[_WEATHER_TOOL], tool_choice=choice)
    return _compare_streamed(rig, "tool-by-name", payload)


@scenario("a tool call that is required, plain and streamed")
def tool_required(rig: Rig) -> str:
    payload = chat(max_tokens=_TOOL_TOKENS, tools=[_WEATHER_TOOL], tool_choice="required")
    return _compare_streamed(rig, "tool-required", payload)


@scenario("a tool call of the model's own will, plain and streamed")
def tool_auto(rig: Rig) -> str:
    payload = chat(max_tokens=_TOOL_TOKENS, tools=[_WEATHER_TOOL], tool_choice="auto", logit_bias=_CALL_A_TOOL)
    payload |= {"stop": ["</tool_call>"], "include_stop_str_in_output": True}
    return _compare_streamed(rig, "tool-auto", payload)


@scenario("a tool call that max_tokens cuts off, plain and streamed")
def tool_cut_off(rig: Rig) -> str:
    payload = chat(max_tokens=60, tools=[_WEATHER_TOOL], tool_choice="auto", logit_bias=_CALL_A_TOOL)
    return _compare_streamed(rig, "tool-cut-off", payload)


@scenario("a text completion with log probabilities, plain and streamed (MODEL_INFER_PATH=/v1/completions)")
def text_completion(rig: Rig) -> str:
    payload = {"model": MODEL_NAME, "prompt": "Once", "temperature": 0, "max_tokens": 12, "logprobs": 1}
    return _compare_streamed(rig, "text-completion", payload, path=COMPLETIONS_PATH)


@scenario("a prompt longer than the context is vLLM's 400, plain and streamed")
def context_overflow(rig: Rig) -> str:
    return _check_refused(rig, chat("x" * (rig.vllm.max_model_tokens + 1)), 400)


@scenario("an unknown model is vLLM's 404, plain and streamed")
def unknown_model(rig: Rig) -> str:
    return _check_refused(rig, chat() | {"model": "nope"}, 404)


@scenario("chunks are in Redis at once: the first as it comes, the later ones within 50 ms")
def chunks_at_once(rig: Rig) -> str:
    firsts, laters = [], []
    watch = _ChunkWatch()
    with TcpProxy(rig.vllm.port) as proxy:
        proxy.observe(Direction.TO_CLIENT, watch)
        with rig.deployment(model_url=f"http://127.0.0.1:{proxy.port}") as deployment:
            for _ in range(_STREAMS):
                watch.passed_at_ms.clear()
                request_id, _ = deployment.answer(streamed(chat(max_tokens=150)))
                passed_at_ms = iter(watch.passed_at_ms)
                chunks = [entry for entry in deployment.stream(request_id) if entry.kind == "chunk"]
                # how long the oldest chunk of each entry has waited
                waits_ms = [entry.at_ms - min([next(passed_at_ms) for _ in entry.data]) for entry in chunks]
                firsts.append(waits_ms[0])
                laters.extend(waits_ms[1:])
    # a process of a busy machine may wait for a core, but not each time
    check(min(firsts) < _GATHER_MS, f"the first chunk took {firsts} ms")
    check(statistics.median(laters) < 2 * _GATHER_MS, f"later chunks took up to {max(laters):.0f} ms")
    return (
        f"first chunk in Redis {statistics.median(firsts):.0f} ms (median of {min(firsts):.0f} to {max(firsts):.0f}) "
        f"after it passed, later ones after "
        f"{statistics.median(laters):.0f} (median) and {max(laters):.0f} ms (longest), {len(laters)} entries"
    )


@scenario("200 requests at a prefetch of 32: each has its own answer, and is billed once with vLLM's usage")
def many_requests(rig: Rig) -> str:
    payloads = [chat(f"Request {number}: count to {number}.", max_tokens=4 + number % 9) for number in range(_MANY)]
    for payload in payloads[::5]:
        payload |= streamed(payload)
    with ThreadPoolExecutor(8) as pool:
        # without a stream, so that one body is left to compare
        plain = [{k: v for k, v in payload.items() if not k.startswith("stream")} for payload in payloads]
        expected = list(pool.map(rig.direct, plain))
    with rig.deployment(RABBITMQ_PREFETCH=_PREFETCH, CROESUS_BATCH_SIZE=50) as deployment:
        begun_at = time.monotonic()
        request_ids = [deployment.ask(payload) for payload in payloads]
        for request_id, answer in zip(request_ids, expected, strict=True):
            found = differences(answer, deployment.wait_answer(request_id))
            unexpected = unexpected_in("chat", found)
            check(not unexpected, f"an answer differs: {unexpected}")
        took_s = time.monotonic() - begun_at
        tokens = deployment.check_billed(request_ids)
        check_equal(tokens, sum(answer["usage"]["total_tokens"] for answer in expected), "tokens billed")
        return f"{_MANY} answers right ({_MANY // 5} of them streamed), {tokens} tokens billed, {_MANY / took_s:.0f}/s"


class _ChunkWatch:
    """Notes when each chunk of an answer passes. Called on the proxy's link thread."""

    _MARK = b"data: {"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tail = b""
        self.passed_at_ms: list[float] = []

    def __call__(self, data: bytes) -> None:
        with self._lock:
            seen = self._tail + data
            self.passed_at_ms += [time.time() * 1000] * seen.count(self._MARK)
            self._tail = seen[-(len(self._MARK) - 1) :]


def _compare_streamed(rig: Rig, name: str, payload: dict[str, Any], *, path: str = CHAT_PATH) -> str:
    """Ask plain and streamed through the worker; compare both with what vLLM says plain to the same payload."""
    rig.keep(name, payload, path=path)
    expected = rig.direct(payload, path=path)
    with rig.deployment(MODEL_INFER_PATH=path) as deployment:
        _, plain = deployment.answer(payload)
        found = differences(expected, plain)
        check(not found.absent and not found.other, f"the plain answers differ: {found}")
        request_id, answer = deployment.answer(streamed(payload))
        found = differences(expected, answer)
        rig.absent |= found.absent
        rig.other_differences[name] = found.other
        unexpected = unexpected_in(name, found)
        check(not unexpected, f"the streamed answer differs: {unexpected}")
        entries = _check_entries(deployment, request_id)
        return f"{_shown(answer)}, {entries}, {_check_timings(deployment, request_id, answer)}"


def _check_entries(deployment: Deployment, request_id: str) -> str:
    """Check a completed request's stream in Redis: chunks of one attempt, `done`, and all that the result has."""
    entries = deployment.stream(request_id)
    kinds = [entry.kind for entry in entries]
    check_equal(kinds, ["chunk"] * (len(kinds) - 1) + ["done"], "the entries of the stream")
    check_equal(len({entry.attempt for entry in entries}), 1, "attempts in the stream")
    chunks = [chunk for entry in entries[:-1] for chunk in entry.data]
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    answer = deployment.wait_answer(request_id)
    for choice in answer["choices"]:
        said = choice.get("text") or choice.get("message", {}).get("content") or ""
        check_equal(texts[choice["index"]], said, "the text of the chunks")
    check_equal(chunks[-1]["usage"], answer["usage"], "the usage of the last chunk")
    return f"{len(chunks)} chunks in {len(kinds) - 1} entries"


def _check_timings(deployment: Deployment, request_id: str, answer: dict[str, Any]) -> str:
    """Check the times of a request's record against the answer's `metrics`, where it has them."""
    record = deployment.record(request_id)
    ttft_s, tbt_s = record["ttft_s"], record["tbt_s"]
    metrics = answer.get("metrics")
    if metrics:
        expected_s = (metrics["queue_time_ms"] + metrics["time_to_first_token_ms"]) / 1000
        check(math.isclose(ttft_s, expected_s, abs_tol=1e-6), f"ttft_s is {ttft_s}, by vLLM's metrics {expected_s}")
        expected_s = metrics["mean_itl_ms"] / 1000
        check(math.isclose(tbt_s, expected_s, abs_tol=1e-6), f"tbt_s is {tbt_s}, by vLLM's metrics {expected_s}")
        source = "vLLM's metrics"
    else:
        check(record["streamed"], "no times in the answer, and no stream")
        check(0 < ttft_s < record["model_latency_s"], f"ttft_s is {ttft_s}, the call took {record['model_latency_s']}")
        check(0 < tbt_s < record["model_latency_s"], f"tbt_s is {tbt_s}, the call took {record['model_latency_s']}")
        source = "the stream"
    return f"TTFT {ttft_s * 1000:.1f} ms, TBT {tbt_s * 1000:.2f} ms by {source}"


def _check_refused(rig: Rig, payload: dict[str, Any], status: int) -> str:
    """Check that vLLM's own error is the result, plain and streamed, and is not billed."""
    said, body = rig.vllm.call(CHAT_PATH, payload)
    check_equal(said, status, "vLLM's status")
    message = json.loads(body)["error"]["message"]
    with rig.deployment() as deployment:
        for each in (payload, streamed(payload)):
            request_id = deployment.ask(each)
            result = deployment.wait_result(request_id)
            seen = [result[name] for name in ("status", "status_code", "error_type", "error")]
            check_equal(seen, ["failed", status, "model_error", message], "the result")
            check_equal(deployment.record(request_id)["disposition"], "ack", "the disposition")
        check_equal([entry.kind for entry in deployment.stream(request_id)], ["failed"], "the entries of the stream")
        check_equal(deployment.croesus.events, [], "usage events")
        check_equal(deployment.dead_letters(), [], "dead letters")
    return f"failed {status}: {message[:70]}"


def _shown(answer: dict[str, Any]) -> str:
    reasons = "/".join(choice["finish_reason"] for choice in answer["choices"])
    return f"{answer['usage']['completion_tokens']} tokens, {reasons}"
