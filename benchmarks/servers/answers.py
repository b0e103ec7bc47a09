"""What the instant model says: a completion of a wanted size, whole or as a stream. Pure."""

from __future__ import annotations

import json

MODEL = "acme/tiny-1"
#: of the ordinary answer, about 0.3 kB
SMALL_ANSWER_BYTES = 300
#: tokens of a streamed answer
STREAM_TOKENS = 64
_USAGE = {"prompt_tokens": 70, "total_tokens": 77, "completion_tokens": 7}
#: what a worker scrapes, as vLLM names it
METRICS_PAGE = f"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="{MODEL}"}} 0.25
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="{MODEL}"}} 700.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="{MODEL}"}} 70.0
""".encode()


def completion(size_bytes: int) -> bytes:
    """Return a chat completion of about that size, never below what its fields take."""
    message = {"role": "assistant", "content": ""}
    document = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1_780_000_000,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": _USAGE,
    }
    sentence = "Nothing is free, but some things are cheap. "
    missing = max(0, size_bytes - len(json.dumps(document)))
    message["content"] = (sentence * (missing // len(sentence) + 1))[:missing]
    return json.dumps(document).encode()


def stream(tokens: int = STREAM_TOKENS) -> list[bytes]:
    """Return the server-sent events of a streamed answer with its usage."""
    head = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1_780_000_000,
        "model": MODEL,
    }
    deltas = [{"role": "assistant", "content": ""}, *({"content": " word"} for _ in range(tokens))]
    documents = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    documents[-1]["choices"][0]["finish_reason"] = "stop"  # type: ignore[index]
    documents.append({**head, "choices": [], "usage": _USAGE})
    return [b"data: %b\n\n" % json.dumps(document).encode() for document in documents] + [b"data: [DONE]\n\n"]
