"""The bare loop on urllib3, the layer below requests."""

import json
import os

import pika
import redis
import urllib3

store = redis.Redis.from_url(os.environ["BENCH_REDIS_URL"])
pool = urllib3.PoolManager()
channel = pika.BlockingConnection(pika.URLParameters(os.environ["BENCH_AMQP_URL"])).channel()


def on_message(channel, method, properties, body):  # type: ignore[no-untyped-def]
    """Ask the model, keep the answer, acknowledge."""
    request = json.loads(body)
    response = pool.request("POST", os.environ["BENCH_MODEL_URL"], json=request["payload"], timeout=300)
    result = {"status": "completed", "status_code": response.status, "result": response.json()}
    store.set(f"infer_resp:{request['request_id']}", json.dumps(result), ex=3600)
    channel.basic_ack(method.delivery_tag)


channel.basic_qos(prefetch_count=int(os.environ["BENCH_PREFETCH"]))
channel.basic_consume(os.environ["BENCH_QUEUE"], on_message)
channel.start_consuming()
