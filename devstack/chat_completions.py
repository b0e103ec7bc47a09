"""OpenAI's chat completions as vLLM answers them: what is asked, the text, the tokens, the bodies. Pure.

The "model" says its prompt back. A token is a word or a punctuation mark together with the space before it, so that the
tokens of a text put together are the text, and a stream has one chunk for each.
"""

from __future__ import annotations

import itertools
import json
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from devstack.behaviour import Answer

_TOKEN = re.compile(r"\s*(?:\w+|[^\w\s])")
#: tokens that the chat template adds to each message
_TOKENS_PER_MESSAGE = 1
_DEFAULT_MAX_TOKENS = 1024
_JSON = {"Content-Type": "application/json"}


class ModelError(Exception):
    """The request is answered with an error. Raised while it is read; `to_answer` is what vLLM would send."""

    def __init__(self, status: int, message: str, *, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param

    def to_answer(self) -> Answer:
        """Convert to vLLM's error body."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return Answer(self.status, encode_json({"error": error}), _JSON)


def bad_request(message: str, *, param: str | None = None) -> ModelError:
    """Return vLLM's 400."""
    return ModelError(400, message, kind="BadRequestError", param=param)


@dataclass(frozen=True)
class ChatRequest:
    """A valid request, as far as this model cares."""

    model: str
    text: str  #: all message contents, joined by newlines
    prompt_tokens: int
    max_tokens: int
    choice_count: int
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class Completion:
    """What the model says to a request."""

    request: ChatRequest
    tokens: tuple[tuple[str, ...], ...]  #: of each choice
    finish_reason: str
    cached_tokens: int | None

    @property
    def completion_tokens(self) -> int:
        """Over all choices."""
        return sum(map(len, self.tokens))

    def usage(self) -> dict[str, Any]:
        """Return vLLM's usage object."""
        prompt, completed = self.request.prompt_tokens, self.completion_tokens
        details = None if self.cached_tokens is None else {"cached_tokens": self.cached_tokens}
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completed,
            "completion_tokens": completed,
            "prompt_tokens_details": details,
            "completion_tokens_details": None,
        }


@dataclass
class Timing:
    """When things happened to one request, by the monotonic clock."""

    queued_at: float
    started_at: float
    first_token_at: float
    token_count: int = 0

    def to_metrics(self) -> dict[str, Any]:
        """Convert to the object that vLLM adds with --enable-per-request-metrics, as of now."""
        generation_s = time.monotonic() - self.first_token_at
        gaps = max(1, self.token_count - 1)
        return {
            "time_to_first_token_ms": (self.first_token_at - self.started_at) * 1000,
            "generation_time_ms": generation_s * 1000,
            "queue_time_ms": (self.started_at - self.queued_at) * 1000,
            "mean_itl_ms": generation_s * 1000 / gaps,
            "tokens_per_second": self.token_count / max(generation_s, 1e-6),
        }


def split_tokens(text: str) -> list[str]:
    """Split a text into its tokens."""
    return _TOKEN.findall(text)


def count_tokens(text: str) -> int:
    """Count a text's tokens."""
    return len(split_tokens(text))


def encode_json(value: Any) -> bytes:
    """Encode as vLLM does: no spaces, no escapes for what UTF-8 can say."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")


def load_request(body: bytes, *, known_models: frozenset[str], context_tokens: int) -> ChatRequest:
    """Read and check a request.

    Raises:  ModelError
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as err:
        raise bad_request(f"Invalid JSON in the request body: {err}") from err
    if not isinstance(document, dict):
        raise bad_request("The request body must be a JSON object.")
    model = document.get("model", "")
    if not isinstance(model, str):
        raise bad_request("Input should be a valid string (parameter=model)", param="model")
    if known_models and model not in known_models:
        aliases = ", ".join(sorted(known_models))
        message = f"The model `{model}` does not exist. Valid aliases: {aliases}."
        raise ModelError(404, message, kind="NotFoundError", param="model")
    contents = load_contents(document.get("messages"))
    prompt_tokens = sum(count_tokens(content) + _TOKENS_PER_MESSAGE for content in contents)
    if prompt_tokens > context_tokens:
        raise bad_request(
            f"This model's maximum context length is {context_tokens} tokens. However, your prompt contains at least "
            f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce "
            f"the length of the input prompt. (parameter=input_tokens, value={prompt_tokens})",
            param="input_tokens",
        )
    stream_options = document.get("stream_options") or {}
    if stream_options and not document.get("stream"):
        raise bad_request("Stream options can only be defined when `stream=True`.", param="stream_options")
    return ChatRequest(
        model=model,
        text="\n".join(contents),
        prompt_tokens=prompt_tokens,
        max_tokens=load_count(document, "max_completion_tokens", "max_tokens", default=_DEFAULT_MAX_TOKENS),
        choice_count=load_count(document, "n", default=1),
        stream=bool(document.get("stream", False)),
        include_usage=bool(stream_options.get("include_usage", False)),
    )


def load_contents(messages: Any) -> list[str]:
    """Return the text of each message.

    Raises:  ModelError
    """
    if not isinstance(messages, list) or not messages:
        raise bad_request("Input should be a valid list of at least one message (parameter=messages)", param="messages")
    contents = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_request("Each message needs a role (parameter=messages)", param="messages")
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
        if not isinstance(content, str):
            raise bad_request(
                "The content of a message is a text or a list of parts (parameter=messages)", param="messages"
            )
        contents.append(content)
    return contents


def load_count(document: dict[str, Any], *names: str, default: int) -> int:
    """Return the first of the named fields that is given, a positive integer.

    Raises:  ModelError
    """
    for name in names:
        value = document.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise bad_request(f"{name} must be at least 1, got {value}. (parameter={name}, value={value})", param=name)
        return value
    return default


def text_of(body: bytes) -> str:
    """Return the text of a request for the ledger, also of an invalid one; empty when there is none to be read."""
    try:
        return "\n".join(load_contents(json.loads(body)["messages"]))
    except (ValueError, RecursionError, LookupError, TypeError, ModelError):
        return ""


def complete(
    request: ChatRequest,
    *,
    content: str | None = None,
    completion_tokens: int | None = None,
    finish_reason: str | None = None,
    cached_tokens: int | None = None,
) -> Completion:
    """Let the model speak; the arguments override its ways."""
    said = split_tokens(content if content is not None else f"You said: {request.text}") or ["…"]
    if completion_tokens is not None:
        said = list(itertools.islice(itertools.cycle(said), completion_tokens))
    cut = said[: request.max_tokens]
    reason = finish_reason or ("length" if len(cut) < len(said) else "stop")
    return Completion(request, (tuple(cut),) * request.choice_count, reason, cached_tokens)


def encode_completion(completion: Completion, timing: Timing, *, fingerprint: str) -> bytes:
    """Encode the body of an answer that is not streamed."""
    choices = [
        {
            "index": index,
            "message": {
                "role": "assistant",
                "content": "".join(tokens),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": None,
            "token_ids": None,
            "routed_experts": None,
        }
        for index, tokens in enumerate(completion.tokens)
    ]
    return encode_json(
        {
            **_envelope(completion, "chat.completion"),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": fingerprint,
            "usage": completion.usage(),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": {**timing.to_metrics(), "speculative_decoding": None},
        }
    )


def stream_completion(completion: Completion, timing: Timing, *, fingerprint: str) -> Iterator[bytes]:
    """Yield the server-sent events of a streamed answer; the caller paces those that carry a token."""
    envelope = _envelope(completion, "chat.completion.chunk")

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + encode_json({**envelope, "choices": choices, **more}) + b"\n\n"

    for index in range(len(completion.tokens)):
        delta = {"role": "assistant", "content": ""}
        opening = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        yield event([opening], prompt_token_ids=None, prompt_text=None)
    for position in range(max(map(len, completion.tokens), default=0)):
        for index, tokens in enumerate(completion.tokens):
            choice: dict[str, Any] = {"index": index, "delta": {"content": tokens[position]}, "logprobs": None}
            if position == len(tokens) - 1:
                choice |= {"finish_reason": completion.finish_reason, "stop_reason": None}
            else:
                choice["finish_reason"] = None
            yield event([{**choice, "token_ids": None}])
    if completion.request.include_usage:
        usage = {name: value for name, value in completion.usage().items() if value is not None}
        yield event([], usage=usage, system_fingerprint=fingerprint, metrics=timing.to_metrics())
    yield b"data: [DONE]\n\n"


def _envelope(completion: Completion, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex[:16]}",
        "object": kind,
        "created": int(time.time()),
        "model": completion.request.model,
    }
