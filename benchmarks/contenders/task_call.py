"""What a task of dramatiq and of Celery does: the same call, the same result. One Session for each thread."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import redis
import requests

_store = redis.Redis.from_url(os.environ["BENCH_REDIS_URL"])
_local = threading.local()


def carry_out(request: dict[str, Any]) -> None:
    """Ask the model and keep the answer; the framework acknowledges."""
    session = getattr(_local, "session", None)
    if session is None:
        session = _local.session = requests.Session()
    response = session.post(os.environ["BENCH_MODEL_URL"], json=request["payload"], timeout=300)
    result = {"status": "completed", "status_code": response.status_code, "result": response.json()}
    _store.set(f"infer_resp:{request['request_id']}", json.dumps(result), ex=3600)
