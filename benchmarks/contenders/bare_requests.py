"""The bare loop: the shortest honest script that does the job, with one Session as anyone would who calls in a loop."""

import json
import os

import pika
import redis
import requests

store = redis.Redis.from_url(os.environ["BENCH_REDIS_URL"])
session = requests.Session()
channel = pika.BlockingConnection(pika.URLParameters(os.environ["BENCH_AMQP_URL"])).channel()


def on_message(channel, method, properties, body):  # type: ignore[no-untyped-def]
    """Ask the model, keep the answer, acknowledge."""
    request = json.loads(body)
    response = session.post(os.environ["BENCH_MODEL_URL"], json=request["payload"], timeout=300)
    result = {"status": "completed", "status_code": response.status_code, "result": response.json()}
    store.set(f"infer_resp:{request['request_id']}", json.dumps(result), ex=3600)
    channel.basic_ack(method.delivery_tag)


channel.basic_qos(prefetch_count=int(os.environ["BENCH_PREFETCH"]))
channel.basic_consume(os.environ["BENCH_QUEUE"], on_message)
channel.start_consuming()
