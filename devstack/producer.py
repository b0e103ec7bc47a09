"""A producer, whole: one request into RabbitMQ, its result out of Redis."""

import json
import time
import uuid
from typing import Any

import pika
import redis


def ask(prompt: str, *, model: str, deployment_id: str, amqp_url: str, redis_url: str, timeout_s: float = 60.0) -> Any:
    """Have a prompt answered by any replica of a deployment; returns the result document, completed or failed."""
    request_id = str(uuid.uuid4())
    payload = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    request = {"request_id": request_id, "received_at": time.time(), "timeout_s": timeout_s, "payload": payload}

    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()  # with `mandatory`: an exception if there is no such queue
        properties = pika.BasicProperties(content_type="application/json", delivery_mode=2)
        body = json.dumps(request).encode()
        channel.basic_publish("", f"infer_req.{deployment_id}", body, properties, mandatory=True)

    with redis.Redis.from_url(redis_url) as results:
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            if result := results.get(f"infer_resp:{request_id}"):
                return json.loads(result)
            time.sleep(0.01)
    raise TimeoutError(f"no result for {request_id} within {timeout_s:g} s")
