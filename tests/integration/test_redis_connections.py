"""The connections of a Redis client on a real Redis: one for each thread, opened anew when they are of no use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inference_worker.errors import StoreDown
from inference_worker.messages import Completed, ErrorType, Failed, encode_result
from inference_worker.redis_client import open_client
from inference_worker.result_store import ResultStore
from inference_worker.stream_store import StreamStore

pytestmark = pytest.mark.integration

TTL_S = 60
VALUE = encode_result(Completed(200, b"{}"))


@pytest.fixture
def admin(redis_server: Any) -> Iterator[Any]:
    client = redis_server.client()
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def clients(redis_server: Any) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(open_client(redis_server.url, password="", timeout_s=2.0, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def threads() -> Iterator[Callable[[], ThreadPoolExecutor]]:
    """Makes threads that live on, each for what is handed to it."""
    made: list[ThreadPoolExecutor] = []

    def make() -> ThreadPoolExecutor:
        made.append(ThreadPoolExecutor(max_workers=1))
        return made[-1]

    yield make
    for pool in made:
        pool.shutdown()


def ids(admin: Any) -> set[str]:
    """All connections but the one that asks."""
    return {entry["id"] for entry in admin.client_list()} - {str(admin.client_id())}


def test_a_thread_has_one_connection_whatever_it_does(admin: Any, clients: Any, threads: Any) -> None:
    before = ids(admin)
    store = ResultStore(clients(), ttl_s=TTL_S, replica_id="r")

    def work(request_id: str) -> None:
        store.find_cancelled([request_id])
        store.count_start(request_id)
        # what is replaced is watched, and the transaction runs on the same connection
        store.save(request_id, encode_result(Failed(500, "it broke", ErrorType.MODEL_ERROR)), may_replace=lambda: True)
        store.save(request_id, VALUE, may_replace=lambda: True)
        store.load_completed(request_id)
        store.uncount_start(request_id)

    workers = [threads() for _ in range(3)]
    for turn in range(4):
        for each in [worker.submit(work, f"r-{turn}-{number}") for number, worker in enumerate(workers)]:
            each.result()
    assert len(ids(admin) - before) == 3


def test_a_connection_that_was_closed_while_idle_fails_no_write_that_must_not_be_sent_twice(
    admin: Any, clients: Any
) -> None:
    before = ids(admin)
    store = StreamStore(clients(retry_count=0), ttl_s=TTL_S)
    store.write("infer_stream:r-1", [{"type": "chunk"}])
    (ours,) = ids(admin) - before
    admin.client_kill_filter(_id=ours)
    store.write("infer_stream:r-1", [{"type": "chunk"}])
    assert admin.xlen("infer_stream:r-1") == 2


def test_r32_after_one_refusal_each_thread_connects_anew(admin: Any, clients: Any, threads: Any) -> None:
    before = ids(admin)
    store = ResultStore(clients(), ttl_s=TTL_S, replica_id="r")
    one, other = threads(), threads()
    for number, thread in enumerate((one, other)):
        thread.submit(store.save, f"r-{number}", VALUE, may_replace=lambda: True).result()
    demoted = ids(admin) - before
    admin.config_set("min-replicas-to-write", "1")
    try:
        with pytest.raises(StoreDown):
            one.submit(store.probe).result()
    finally:
        admin.config_set("min-replicas-to-write", "0")
    for number, thread in enumerate((one, other)):
        thread.submit(store.save, f"r-2{number}", VALUE, may_replace=lambda: True).result()
    assert len(demoted) == 2
    assert not ids(admin) & demoted
