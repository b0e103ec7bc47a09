"""The requests, and how each contender's broker client wraps them. Pure."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

import pika

from benchmarks.servers.answers import MODEL

#: bytes of the ordinary prompt
PROMPT_BYTES = 280
#: seconds; nothing expires during a run
_TIMEOUT_S = 86_400.0
#: delivery mode: kept over a restart of the broker
_PERSISTENT = 2


def make_request(*, prompt_bytes: int = PROMPT_BYTES, stream: bool = False) -> dict[str, Any]:
    """Return a request with a prompt of that size."""
    sentence = "Tell me what a message costs on its way, and why. "
    prompt = (sentence * (prompt_bytes // len(sentence) + 1))[:prompt_bytes]
    payload: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": prompt}]}
    if stream:
        payload["stream"] = True
    return {
        "request_id": str(uuid.uuid4()),
        "received_at": time.time(),
        "timeout_s": _TIMEOUT_S,
        "payload": payload,
    }


def wrap_plain(request: dict[str, Any], queue: str) -> tuple[bytes, pika.BasicProperties]:
    """The request as it is, for our worker and the loops."""
    return json.dumps(request).encode(), pika.BasicProperties(
        delivery_mode=_PERSISTENT, content_type="application/json"
    )


def wrap_dramatiq(request: dict[str, Any], queue: str) -> tuple[bytes, pika.BasicProperties]:
    """The message that `infer.send(request)` would enqueue."""
    message = {
        "queue_name": queue,
        "actor_name": "infer",
        "args": [request],
        "kwargs": {},
        "options": {},
        "message_id": str(uuid.uuid4()),
        "message_timestamp": int(time.time() * 1000),
    }
    return json.dumps(message, separators=(",", ":")).encode(), pika.BasicProperties(delivery_mode=_PERSISTENT)


def wrap_celery(request: dict[str, Any], queue: str) -> tuple[bytes, pika.BasicProperties]:
    """The message that `infer.delay(request)` would send (Celery's message protocol 2)."""
    task_id = str(uuid.uuid4())
    embedded = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    headers = {
        "lang": "py",
        "task": "infer",
        "id": task_id,
        "root_id": task_id,
        "parent_id": None,
        "group": None,
        "retries": 0,
        "ignore_result": True,
    }
    properties = pika.BasicProperties(
        delivery_mode=_PERSISTENT,
        content_type="application/json",
        content_encoding="utf-8",
        correlation_id=task_id,
        headers=headers,
    )
    return json.dumps([[request], {}, embedded]).encode(), properties
