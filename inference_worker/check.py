"""`--check`: what the environment has come to, and whether each neighbour answers. Declares nothing, posts nothing.

Main thread; no service runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from inference_worker import amqp_connection
from inference_worker.app import open_stores
from inference_worker.config import Config, effective_values
from inference_worker.deadlines import Bounded, Deadlines
from inference_worker.errors import WorkerError
from inference_worker.http_client import HttpClient

_TIMEOUT_S = 5.0
_RESPONSE_BYTES = 8 * 2**20


def check(config: Config, say: Callable[[str], None]) -> bool:
    """Print the effective configuration, try every neighbour with a line each; True when all answer."""
    for variable, value in effective_values(config):
        say(f"{variable.name}={value}")
    say("")
    neighbours: tuple[tuple[str, Callable[[HttpClient], str]], ...] = (
        ("RabbitMQ", lambda http: _try_broker(config)),
        ("Redis", lambda http: _try_store(config)),
        ("model", lambda http: _try_model(config, http)),
        ("MetricServer", lambda http: _try_sink(config.metrics.server_url, http)),
        ("Croesus", lambda http: _try_sink(config.billing.croesus_url, http)),
    )
    is_good = True
    with _bounded_http() as http:
        for name, try_it in neighbours:
            try:
                say(f"ok    {name}: {try_it(http)}")
            except WorkerError as err:
                is_good = False
                say(f"FAIL  {name}: {err}")
    return is_good


@contextmanager
def _bounded_http() -> Iterator[HttpClient]:
    """Make a client whose calls are ended in time, as the supervisor would."""
    deadlines, stop = Deadlines(), threading.Event()

    def watch() -> None:
        while not stop.wait(0.1):
            deadlines.cut_overdue(monotonic())

    threading.Thread(target=watch, name="deadlines", daemon=True).start()
    try:
        yield HttpClient(deadlines, Bounded.SIDE_CALL, max_response_bytes=_RESPONSE_BYTES)
    finally:
        stop.set()


def _try_broker(config: Config) -> str:
    connection = amqp_connection.open_connection(config.broker, name="inference_worker --check")
    amqp_connection.close_connection(connection)
    hosts = ",".join(config.broker.hosts)
    return f"logged in at {hosts}, port {config.broker.port}, vhost {config.broker.vhost}"


def _try_store(config: Config) -> str:
    store, _ = open_stores(config)
    store.ping()
    store.close()
    return "answers PING"


def _try_model(config: Config, http: HttpClient) -> str:
    url = config.model.base_url + config.health.path
    status = http.exchange("GET", url, timeout_s=config.health.timeout_s).status_code
    if status != 200:
        raise WorkerError(f"GET {url} answered {status}, which is unhealthy")
    return f"GET {url} answered 200"


def _try_sink(url: str, http: HttpClient) -> str:
    # any answer will do: a sink need not know GET
    status = http.exchange("GET", url, timeout_s=_TIMEOUT_S).status_code
    return f"{url} answers (GET: {status})"
