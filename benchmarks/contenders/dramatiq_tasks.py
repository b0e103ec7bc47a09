"""The dramatiq application, for `dramatiq benchmarks.contenders.dramatiq_tasks`; acknowledged when the task is done."""

from __future__ import annotations

import os
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from benchmarks.contenders.task_call import carry_out

dramatiq.set_broker(RabbitmqBroker(url=os.environ["BENCH_AMQP_URL"]))


@dramatiq.actor(queue_name=os.environ["BENCH_QUEUE"])
def infer(request: dict[str, Any]) -> None:
    """One request."""
    carry_out(request)
