"""`ResultStore` on fakeredis always and on a real Redis when there is one: what is written, kept, replaced, expires."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import fakeredis
import pytest
import redis

from inference_worker.errors import StoreDown, StoreLoginRefused
from inference_worker.messages import (
    AlreadyCompleted,
    Completed,
    ErrorType,
    Failed,
    NotOurs,
    Saved,
    encode_result,
)
from inference_worker.redis_client import open_client
from inference_worker.result_store import ResultStore

KEY = "infer_resp:r-1"
BODY = b'{"choices": [{"n": 1}]}'
COMPLETED = encode_result(Completed(200, BODY))
FAILED = encode_result(Failed(500, "it broke", ErrorType.MODEL_ERROR))
OTHER_FAILED = encode_result(Failed(408, "too late", ErrorType.EXPIRED))
TTL_S = 60


@dataclass
class Redis:
    """A Redis, fake or real, and the way to make it go."""

    #: sees all, to look and to prepare
    client: Any
    #: what the store works with
    store_client: Any
    go_down: Callable[[], None]
    come_back: Callable[[], None]

    @property
    def store(self) -> ResultStore:
        return ResultStore(self.store_client, ttl_s=TTL_S, replica_id="replica-1")


def fake_redis() -> Iterator[Redis]:
    server = fakeredis.FakeServer()

    def connect(is_connected: bool) -> None:
        server.connected = is_connected

    client = fakeredis.FakeRedis(server=server)
    store_client = fakeredis.FakeRedis(server=server)
    yield Redis(client, store_client, lambda: connect(False), lambda: connect(True))
    client.close()
    store_client.close()


def real_redis(server: Any) -> Iterator[Redis]:
    client = server.client()
    client.flushall()
    store_client = open_client(server.url, password="", timeout_s=2.0)
    yield Redis(client, store_client, server.kill, server.start)
    if not server.running:
        server.start()
    client.close()
    store_client.close()


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.integration)])
def server(request: pytest.FixtureRequest) -> Iterator[Redis]:
    if request.param == "fake":
        yield from fake_redis()
    else:
        yield from real_redis(request.getfixturevalue("redis_server"))


def replace_allowed() -> bool:
    return True


def session_ended() -> bool:
    return False


# -- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [COMPLETED, FAILED])
@pytest.mark.parametrize("may_replace", [replace_allowed, session_ended])
def test_an_empty_key_takes_any_result_and_expires(
    server: Redis, value: bytes, may_replace: Callable[[], bool]
) -> None:
    assert server.store.save("r-1", value, may_replace=may_replace) == Saved()
    assert server.client.get(KEY) == value
    assert 0 < server.client.ttl(KEY) <= TTL_S


@pytest.mark.parametrize("value", [COMPLETED, FAILED])
@pytest.mark.parametrize("may_replace", [replace_allowed, session_ended])
def test_a_completed_result_is_never_overwritten(server: Redis, value: bytes, may_replace: Callable[[], bool]) -> None:
    first = encode_result(Completed(201, b'{"first": true}'))
    server.client.set(KEY, first, ex=7)
    outcome = server.store.save("r-1", value, may_replace=may_replace)
    assert outcome == AlreadyCompleted(Completed(201, b'{"first": true}'))
    assert server.client.get(KEY) == first
    assert 0 < server.client.ttl(KEY) <= 7


@pytest.mark.parametrize("value", [COMPLETED, OTHER_FAILED])
def test_a_failed_result_is_replaced_and_the_time_to_live_begins_again(server: Redis, value: bytes) -> None:
    server.client.set(KEY, FAILED, ex=7)
    assert server.store.save("r-1", value, may_replace=replace_allowed) == Saved()
    assert server.client.get(KEY) == value
    assert 7 < server.client.ttl(KEY) <= TTL_S


@pytest.mark.parametrize("value", [COMPLETED, OTHER_FAILED])
def test_an_attempt_whose_session_has_ended_replaces_nothing(server: Redis, value: bytes) -> None:
    server.client.set(KEY, FAILED, ex=7)
    assert server.store.save("r-1", value, may_replace=session_ended) == NotOurs()
    assert server.client.get(KEY) == FAILED


@pytest.mark.parametrize("junk", [b"", b"null", b'{"status":"completed', b"\xff", b'{"status": "done"}'])
def test_what_is_no_completed_result_is_replaced_like_a_failed_one(server: Redis, junk: bytes) -> None:
    server.client.set(KEY, junk)
    assert server.store.save("r-1", COMPLETED, may_replace=replace_allowed) == Saved()
    assert 0 < server.client.ttl(KEY) <= TTL_S


def test_a_completed_result_that_arrives_while_we_look_is_not_overwritten(server: Redis) -> None:
    """The look and the write are one step: WATCH."""
    server.client.set(KEY, FAILED)

    def complete_meanwhile() -> bool:
        server.client.set(KEY, COMPLETED)
        return True

    outcome = server.store.save("r-1", OTHER_FAILED, may_replace=complete_meanwhile)
    assert outcome == AlreadyCompleted(Completed(200, BODY))
    assert server.client.get(KEY) == COMPLETED


def test_a_key_that_changes_at_every_look_is_given_up_as_an_unusable_store(server: Redis) -> None:
    server.client.set(KEY, FAILED)

    def change() -> bool:
        server.client.append(KEY, " ")
        return True

    with pytest.raises(StoreDown):
        server.store.save("r-1", COMPLETED, may_replace=change)


def test_of_many_attempts_at_once_one_completed_result_stays(server: Redis) -> None:
    store, count = server.store, 8
    server.client.set(KEY, FAILED)
    barrier = threading.Barrier(count)
    outcomes: list[Any] = []

    def save(number: int) -> None:
        barrier.wait()
        body = b'{"attempt": %d}' % number
        outcomes.append((body, store.save("r-1", encode_result(Completed(200, body)), may_replace=replace_allowed)))

    threads = [threading.Thread(target=save, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    saved = [body for body, outcome in outcomes if outcome == Saved()]
    assert len(saved) == 1
    assert store.load_completed("r-1") == Completed(200, saved[0])
    found = [outcome for _, outcome in outcomes if outcome != Saved()]
    assert found == [AlreadyCompleted(Completed(200, saved[0]))] * (count - 1)


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (None, None),
        (FAILED, None),
        (b"junk", None),
        (COMPLETED, Completed(200, BODY)),
        # a lone surrogate is legal JSON, and msgspec refuses it
        (encode_result(Completed(202, b'{"a": "\\ud83d"}')), Completed(202, b'{"a": "\\ud83d"}')),
    ],
)
def test_only_a_completed_result_is_found(server: Redis, stored: bytes | None, found: Completed | None) -> None:
    if stored is not None:
        server.client.set(KEY, stored)
    assert server.store.load_completed("r-1") == found


def test_any_letters_make_a_key(server: Redis) -> None:
    assert server.store.save("ü/{a}:*", COMPLETED, may_replace=replace_allowed) == Saved()
    assert server.client.get("infer_resp:ü/{a}:*") == COMPLETED


# -- the probe, and a Redis that is away ------------------------------------------------------------------------------


def test_the_probe_writes_and_leaves_nothing_behind(server: Redis) -> None:
    server.store.probe()
    ends = threading.Event()
    for _ in range(100):
        if not server.client.keys("*"):
            break
        ends.wait(0.02)
    assert server.client.keys("*") == []


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.probe(),
        lambda store: store.ping(),
        lambda store: store.load_completed("r-1"),
        lambda store: store.save("r-1", COMPLETED, may_replace=replace_allowed),
    ],
)
def test_a_redis_that_is_away_is_store_down_and_used_again_when_it_is_back(
    server: Redis, call: Callable[[ResultStore], Any]
) -> None:
    store = server.store
    store.probe()
    server.go_down()
    with pytest.raises(StoreDown) as caught:
        call(store)
    assert not isinstance(caught.value, StoreLoginRefused)
    server.come_back()
    call(store)


@pytest.mark.parametrize(
    "error",
    [
        redis.TimeoutError("t"),
        redis.ConnectionError("c"),
        redis.exceptions.ReadOnlyError("READONLY You can't write against a read only replica."),
        redis.exceptions.OutOfMemoryError("OOM command not allowed"),
        redis.exceptions.BusyLoadingError("LOADING"),
        redis.exceptions.MaxConnectionsError("Too many connections"),
        redis.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
        OSError("o"),
    ],
)
def test_r34_every_error_of_the_library_means_that_redis_cannot_be_used(error: Exception) -> None:
    class Broken(fakeredis.FakeRedis):
        def execute_command(self, *args: Any, **options: Any) -> Any:
            raise error

    with Broken() as client:
        store = ResultStore(client, ttl_s=TTL_S, replica_id="r")
        for call in (store.probe, store.ping, lambda: store.load_completed("r-1")):
            with pytest.raises(StoreDown) as caught:
                call()
            assert caught.value.__cause__ is error


@pytest.mark.integration
def test_a_refused_login_is_told_from_an_outage_and_names_no_secret(redis_server: Any) -> None:
    admin = redis_server.client()
    admin.config_set("requirepass", "the-right-one")
    try:
        for password in ("", "the-wrong-one"):
            client = open_client(redis_server.url, password=password, timeout_s=2.0)
            with pytest.raises(StoreLoginRefused) as caught:
                ResultStore(client, ttl_s=TTL_S, replica_id="r").probe()
            assert "one" not in str(caught.value).replace("the one in REDIS_URL", "")
            client.close()
    finally:
        admin.config_set("requirepass", "")
        admin.close()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("setting", "value", "harmless"),
    [("maxmemory", "1", "0"), ("min-replicas-to-write", "1", "0")],
)
def test_a_redis_that_answers_ping_and_takes_no_write_fails_the_probe(
    redis_server: Any, setting: str, value: str, harmless: str
) -> None:
    admin = redis_server.client()
    client = open_client(redis_server.url, password="", timeout_s=2.0)
    store = ResultStore(client, ttl_s=TTL_S, replica_id="r")
    admin.config_set(setting, value)
    try:
        store.ping()
        with pytest.raises(StoreDown):
            store.probe()
    finally:
        admin.config_set(setting, harmless)
    store.probe()
    client.close()
    admin.close()


@pytest.mark.integration
def test_r31_a_redis_that_accepts_and_never_answers_is_given_up_in_time(redis_server: Any) -> None:
    client = open_client(redis_server.url, password="", timeout_s=0.6)
    store = ResultStore(client, ttl_s=TTL_S, replica_id="r")
    store.probe()
    redis_server.freeze()
    try:
        gave_up = threading.Event()

        def probe() -> None:
            with pytest.raises(StoreDown):
                store.probe()
            gave_up.set()

        prober = threading.Thread(target=probe)
        prober.start()
        # the bound is 0.6 s; the rest is for a slow machine
        assert gave_up.wait(3.0)
        prober.join()
    finally:
        redis_server.thaw()
    client.close()
