"""Who takes part: how each is started, what its queue is declared with, how its messages are wrapped. Values only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pika

from benchmarks import messages

_BIN = Path(sys.executable).parent
_FOLDER = "benchmarks.contenders"

Wrap = Callable[[dict[str, Any], str], tuple[bytes, pika.BasicProperties]]
#: queue name to its arguments, for a queue and those that come with it
Declare = Callable[[str], dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Contender:
    """One way of doing the job."""

    name: str  #: short, as in the tables
    argv: Callable[[int], list[str]]  #: the command line for a prefetch
    wrap: Wrap
    declare: Declare
    is_worker: bool = False
    #: over the worker's defaults
    worker_env: Mapping[str, str] = field(default_factory=dict)


def _plain_queues(queue: str) -> dict[str, dict[str, Any]]:
    return {queue: {}}


def _worker_queues(queue: str) -> dict[str, dict[str, Any]]:
    return {queue: {"x-dead-letter-exchange": "infer.dlx", "x-dead-letter-routing-key": "dead"}}


def _dramatiq_queues(queue: str) -> dict[str, dict[str, Any]]:
    return {queue: {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{queue}.XQ"}}


def _script(module: str) -> Callable[[int], list[str]]:
    return lambda prefetch: [sys.executable, "-m", f"{_FOLDER}.{module}"]


def _dramatiq(prefetch: int) -> list[str]:
    return [str(_BIN / "dramatiq"), f"{_FOLDER}.dramatiq_tasks", "--processes", "1", "--threads", str(prefetch)]


def _celery(prefetch: int) -> list[str]:
    # its default pool for one task at a time (the `solo` pool stalls now and then, up to 50 ms a message); 64 processes
    # would be no fair choice, and threads share what our slots share
    pool = ["--pool", "prefork" if prefetch == 1 else "threads", "--concurrency", str(prefetch)]
    return [str(_BIN / "celery"), "-A", f"{_FOLDER}.celery_tasks", "worker", *pool]


def _worker(name: str, **env: str) -> Contender:
    argv = _script("not-used")
    return Contender(name, argv, messages.wrap_plain, _worker_queues, is_worker=True, worker_env=env)


BARE = Contender("bare loop", _script("bare_requests"), messages.wrap_plain, _plain_queues)
BARE_URLLIB3 = Contender("bare loop, urllib3", _script("bare_urllib3"), messages.wrap_plain, _plain_queues)
WORKER = _worker("inference_worker")
#: all the billing falls into what is measured
WORKER_FLUSHING = _worker("inference_worker, flush every 1 s", METRICS_FLUSH_INTERVAL_S="1")
WORKER_AHEAD = _worker("inference_worker, lookahead 8", RABBITMQ_LOOKAHEAD="8")
DRAMATIQ = Contender("dramatiq", _dramatiq, messages.wrap_dramatiq, _dramatiq_queues)
CELERY = Contender("Celery", _celery, messages.wrap_celery, _plain_queues)
AIO = Contender("aio-pika + aiohttp", _script("aio_loop"), messages.wrap_plain, _plain_queues)
