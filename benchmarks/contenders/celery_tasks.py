"""The Celery application, for `celery -A benchmarks.contenders.celery_tasks worker`: late acks, no result backend."""

from __future__ import annotations

import os
from typing import Any

import celery

from benchmarks.contenders.task_call import carry_out

app = celery.Celery("bench", broker=os.environ["BENCH_AMQP_URL"])
app.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    task_default_queue=os.environ["BENCH_QUEUE"],
    # the fetched messages are as many as the threads, as with our worker
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)


@app.task(name="infer")  # type: ignore[untyped-decorator]
def infer(request: dict[str, Any]) -> None:
    """One request."""
    carry_out(request)
