"""A producer, whole: one request into RabbitMQ, its result out of Redis."""

import json
import time
import uuid
from typing import Any

import pika
import redis


def send(
    prompt: str, *, model: str, deployment_id: str, amqp_url: str, timeout_s: float = 60.0, stream: bool = False
) -> str:
    """Have a prompt answered by any replica of a deployment; returns the request_id, under which the answer comes."""
    request_id = str(uuid.uuid4())
    payload = {"model": model, "messages": [{"role": "user", "content": prompt}], "stream": stream}
    request = {"request_id": request_id, "received_at": time.time(), "timeout_s": timeout_s, "payload": payload}
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()  # with `mandatory`: an exception if there is no such queue
        properties = pika.BasicProperties(content_type="application/json", delivery_mode=2)
        body = json.dumps(request).encode()
        channel.basic_publish("", f"infer_req.{deployment_id}", body, properties, mandatory=True)
    return request_id


def wait_result(results: redis.Redis, request_id: str, *, timeout_s: float = 60.0) -> Any:
    """Return the result document, completed or failed."""
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        if result := results.get(f"infer_resp:{request_id}"):
            return json.loads(result)
        time.sleep(0.01)
    raise TimeoutError(f"no result for {request_id} within {timeout_s:g} s")


def cancel(results: redis.Redis, request_id: str) -> None:
    """Say that nobody waits any more, whether the request is still queued or runs: its result becomes a 499."""
    results.set(f"infer_cancel:{request_id}", 1, ex=3600)
