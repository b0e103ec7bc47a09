"""A vLLM whose queue is bounded and full, and one that tells no times."""

from __future__ import annotations

import time
from collections import Counter

from tests.vllm.registry import BOUNDED_OPTIONS, scenario
from tests.vllm.rig import Rig, chat, check, check_equal, streamed

_COUNT = 16
#: a second of work each, so that the queue is full while all of them arrive
_TOKENS = 300


@scenario(
    "without --enable-per-request-metrics only a stream tells times; unknown ones are null", options=BOUNDED_OPTIONS
)
def no_metrics(rig: Rig) -> str:
    with rig.deployment() as deployment:
        request_id, _ = deployment.answer(chat(max_tokens=32))
        plain = deployment.record(request_id)
        check_equal([plain["ttft_s"], plain["tbt_s"]], [None, None], "the times of a plain answer")
        seen = []
        for _ in range(3):
            request_id, _ = deployment.answer(streamed(chat(max_tokens=32)))
            record = deployment.record(request_id)
            ttft_s, tbt_s, latency_s = (record[name] for name in ("ttft_s", "tbt_s", "model_latency_s"))
            check(0 < ttft_s < latency_s and 0 < tbt_s < latency_s, f"TTFT {ttft_s}, TBT {tbt_s}, of {latency_s} s")
            seen.append(f"{ttft_s * 1000:.0f} and {tbt_s * 1000:.2f} ms of {latency_s * 1000:.0f}")
        return f"plain null; streamed TTFT and TBT {', '.join(seen)}"


@scenario("overload is vLLM's 503, and the producer's answer", options=BOUNDED_OPTIONS)
def overload(rig: Rig) -> str:
    with rig.deployment(RABBITMQ_PREFETCH=_COUNT) as deployment:
        request_ids = [deployment.ask(chat(f"Story {n}.", max_tokens=_TOKENS)) for n in range(_COUNT)]
        results = [deployment.wait_result(request_id) for request_id in request_ids]
        outcomes = Counter(f"{result['status']} {result['status_code']}" for result in results)
        check_equal(set(outcomes), {"completed 200", "failed 503"}, "the results")
        completed = [at for at, result in zip(request_ids, results, strict=True) if result["status"] == "completed"]
        deployment.check_billed(completed)
        message = next(result["error"] for result in results if result["status"] == "failed")
        shown = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        return f"{shown} ({message[:60]}); the completed ones are billed"


@scenario("with MODEL_RETRY_STATUS_CODES=503 overload only takes longer", options=BOUNDED_OPTIONS)
def overload_retried(rig: Rig) -> str:
    with rig.deployment(
        RABBITMQ_PREFETCH=_COUNT, MODEL_RETRY_STATUS_CODES="503", RABBITMQ_MAX_RETRIES=100
    ) as deployment:
        begun_at = time.monotonic()
        payloads = [chat(f"Story {n}.", max_tokens=_TOKENS) for n in range(_COUNT)]
        request_ids = [deployment.ask(streamed(each) if n % 2 else each) for n, each in enumerate(payloads)]
        for request_id in request_ids:
            deployment.wait_answer(request_id)
        took_s = time.monotonic() - begun_at
        deployment.check_billed(request_ids)
        retries = [deployment.record(request_id)["retry_count"] for request_id in request_ids]
        check(sum(retries) > 0, "vLLM was never busy")
        return f"{_COUNT} completed and billed in {took_s:.1f} s, {sum(retries)} retries, at most {max(retries)} of one"
