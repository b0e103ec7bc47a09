"""The asyncio way: aio-pika, aiohttp and redis.asyncio in one event loop."""

import asyncio
import json
import os

import aio_pika
import aiohttp
import redis.asyncio


async def main() -> None:
    """Consume until ended; aio-pika runs each message as a task of its own, as many as are prefetched."""
    store = redis.asyncio.Redis.from_url(os.environ["BENCH_REDIS_URL"])
    model_url = os.environ["BENCH_MODEL_URL"]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        await aio_pika.connect(os.environ["BENCH_AMQP_URL"]) as connection,
    ):

        async def on_message(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            request = json.loads(message.body)
            async with session.post(model_url, json=request["payload"]) as response:
                result = {"status": "completed", "status_code": response.status, "result": await response.json()}
            await store.set(f"infer_resp:{request['request_id']}", json.dumps(result), ex=3600)
            await message.ack()

        channel = await connection.channel()
        await channel.set_qos(prefetch_count=int(os.environ["BENCH_PREFETCH"]))
        queue = await channel.get_queue(os.environ["BENCH_QUEUE"], ensure=False)
        await queue.consume(on_message)
        await asyncio.Event().wait()


asyncio.run(main())
