"""Results in Redis: on fakeredis what is stored, on a socket of our own what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic
from urllib.parse import quote

import fakeredis
import pytest
import redis
from fakes_resp import OK, RespServer

from inference_worker import redis_client
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

TTL_S = 600
COMPLETED = encode_result(Completed(200, b'{"n":1}'))
OTHER_COMPLETED = encode_result(Completed(200, b'{"n":2}'))
FAILED = encode_result(Failed(500, "no", ErrorType.MODEL_UNAVAILABLE))
OTHER_FAILED = encode_result(Failed(408, "late", ErrorType.EXPIRED))
KEY = "infer_resp:r-1"


def _alive() -> bool:
    return True


def _ended() -> bool:
    return False


@pytest.fixture
def server() -> fakeredis.FakeServer:
    return fakeredis.FakeServer()


@pytest.fixture
def client(server: fakeredis.FakeServer) -> redis.Redis:
    return fakeredis.FakeRedis(server=server)


@pytest.fixture
def store(client: redis.Redis) -> ResultStore:
    return ResultStore(client, ttl_s=TTL_S, replica_id="replica-1")


# -- cancelling -------------------------------------------------------------------------------------------------------


def test_any_value_under_its_key_cancels_a_request_and_no_other(store: ResultStore, client: redis.Redis) -> None:
    client.set("infer_cancel:r-1", b"")
    client.set("infer_cancel:r-3", b"because")
    client.set("infer_cancel:r-9", b"1")
    assert store.find_cancelled(["r-1", "r-2", "r-3"]) == {"r-1", "r-3"}


def test_a_value_of_another_type_cancels_nothing_and_breaks_nothing(store: ResultStore, client: redis.Redis) -> None:
    client.rpush("infer_cancel:r-1", b"1")
    assert store.find_cancelled(["r-1"]) == set()


def test_a_redis_that_is_down_is_down_for_this_look_too(store: ResultStore, server: fakeredis.FakeServer) -> None:
    server.connected = False
    with pytest.raises(StoreDown):
        store.find_cancelled(["r-1"])


def test_without_the_right_to_read_cancels_nothing_is_cancelled_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = RespServer()
    server.answers["MGET"] = b"-NOPERM no permissions to access a key\r\n"
    client = open_client(f"redis://127.0.0.1:{server.port}", password="", timeout_s=5.0)
    store = ResultStore(client, ttl_s=TTL_S, replica_id="replica-1")
    try:
        assert store.find_cancelled(["r-1"]) == store.find_cancelled(["r-1"]) == set()
    finally:
        store.close()
        server.stop()
    assert [getattr(entry, "event", "") for entry in caplog.records] == ["cancels_unreadable"]


# -- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [COMPLETED, FAILED])
@pytest.mark.parametrize("may_replace", [_alive, _ended])
def test_empty_key_is_filled_by_any_attempt(
    store: ResultStore, client: redis.Redis, value: bytes, may_replace: Callable[[], bool]
) -> None:
    assert store.save("r-1", value, may_replace=may_replace) == Saved()
    assert client.get(KEY) == value


@pytest.mark.parametrize("value", [OTHER_COMPLETED, FAILED])
@pytest.mark.parametrize("may_replace", [_alive, _ended])
def test_r13_completed_result_is_never_overwritten(
    store: ResultStore, client: redis.Redis, value: bytes, may_replace: Callable[[], bool]
) -> None:
    client.set(KEY, COMPLETED)
    assert store.save("r-1", value, may_replace=may_replace) == AlreadyCompleted(Completed(200, b'{"n":1}'))
    assert client.get(KEY) == COMPLETED


def test_completed_result_of_another_version_is_not_overwritten_either(store: ResultStore, client: redis.Redis) -> None:
    theirs = b'{"status": "completed", "status_code": 200, "result": {"n": 1}}'
    client.set(KEY, theirs)
    assert store.save("r-1", OTHER_COMPLETED, may_replace=_alive) == AlreadyCompleted(Completed(200, b'{"n": 1}'))
    assert client.get(KEY) == theirs


@pytest.mark.parametrize("stored", [FAILED, b"junk", b"", b'{"status":"pending"}'])
@pytest.mark.parametrize("value", [COMPLETED, OTHER_FAILED])
def test_what_is_no_completed_result_is_replaced(
    store: ResultStore, client: redis.Redis, stored: bytes, value: bytes
) -> None:
    client.set(KEY, stored)
    assert store.save("r-1", value, may_replace=_alive) == Saved()
    assert client.get(KEY) == value


def test_attempt_whose_session_has_ended_replaces_nothing(store: ResultStore, client: redis.Redis) -> None:
    client.set(KEY, FAILED)
    assert store.save("r-1", COMPLETED, may_replace=_ended) == NotOurs()
    assert client.get(KEY) == FAILED


def test_completed_result_that_arrives_between_look_and_write_wins(store: ResultStore, client: redis.Redis) -> None:
    client.set(KEY, FAILED)

    def somebody_is_faster() -> bool:
        client.set(KEY, COMPLETED)
        return True

    saved = store.save("r-1", OTHER_COMPLETED, may_replace=somebody_is_faster)
    assert saved == AlreadyCompleted(Completed(200, b'{"n":1}'))
    assert client.get(KEY) == COMPLETED


def test_session_that_ends_between_two_looks_replaces_nothing(store: ResultStore, client: redis.Redis) -> None:
    client.set(KEY, FAILED)
    looks = iter([True, False])

    def may_replace() -> bool:
        client.set(KEY, OTHER_FAILED)
        return next(looks)

    assert store.save("r-1", COMPLETED, may_replace=may_replace) == NotOurs()
    assert client.get(KEY) == OTHER_FAILED


def test_result_that_expires_between_look_and_write_is_written_anew(store: ResultStore, client: redis.Redis) -> None:
    client.set(KEY, FAILED)

    def it_expires() -> bool:
        client.delete(KEY)
        return True

    assert store.save("r-1", COMPLETED, may_replace=it_expires) == Saved()
    assert client.get(KEY) == COMPLETED


def test_result_that_changes_again_and_again_is_given_up(store: ResultStore, client: redis.Redis) -> None:
    client.set(KEY, FAILED)
    looks: list[int] = []

    def it_changes() -> bool:
        looks.append(1)
        client.set(KEY, FAILED + b" " * len(looks))
        return True

    with pytest.raises(StoreDown):
        store.save("r-1", COMPLETED, may_replace=it_changes)
    assert len(looks) < 20


def test_store_that_goes_down_between_look_and_write_is_down(
    store: ResultStore, client: redis.Redis, server: fakeredis.FakeServer
) -> None:
    client.set(KEY, FAILED)

    def it_goes_down() -> bool:
        server.connected = False
        return True

    with pytest.raises(StoreDown):
        store.save("r-1", COMPLETED, may_replace=it_goes_down)
    server.connected = True
    assert client.get(KEY) == FAILED


@pytest.mark.parametrize("stored", [None, FAILED])
def test_r37_every_result_has_a_ttl(store: ResultStore, client: redis.Redis, stored: bytes | None) -> None:
    if stored is not None:
        client.set(KEY, stored)
    store.save("r-1", COMPLETED, may_replace=_alive)
    assert TTL_S - 5 <= client.ttl(KEY) <= TTL_S


@pytest.mark.parametrize("request_id", ["ü", "请求", "a:b", "x" * 255, ".probe:replica-2"])
def test_key_is_the_prefix_and_the_request_id(store: ResultStore, client: redis.Redis, request_id: str) -> None:
    store.save(request_id, COMPLETED, may_replace=_alive)
    assert client.keys() == [f"infer_resp:{request_id}".encode()]


# -- looking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "expected"), [(None, None), (FAILED, None), (b"junk", None), (COMPLETED, Completed(200, b'{"n":1}'))]
)
def test_only_a_completed_result_is_found(
    store: ResultStore, client: redis.Redis, stored: bytes | None, expected: Completed | None
) -> None:
    if stored is not None:
        client.set(KEY, stored)
    assert store.load_completed("r-1") == expected


# -- trouble ----------------------------------------------------------------------------------------------------------

_CALLS: dict[str, Callable[[ResultStore], object]] = {
    "save": lambda store: store.save("r-1", COMPLETED, may_replace=_alive),
    "load_completed": lambda store: store.load_completed("r-1"),
    "probe": lambda store: store.probe(),
    "ping": lambda store: store.ping(),
}
EVERY_CALL = pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)


def _raising_client(error: BaseException) -> redis.Redis:
    """Make a client whose every command ends in one exception, on whatever connection."""

    def fail(*_: object) -> None:
        raise error

    client = fakeredis.FakeRedis()
    client.connection_pool.get_connection = fail
    return client


@EVERY_CALL
@pytest.mark.parametrize(
    "error",
    [
        redis.TimeoutError("t"),
        redis.ConnectionError("c"),
        redis.exceptions.ReadOnlyError("READONLY"),
        redis.exceptions.OutOfMemoryError("OOM"),
        redis.BusyLoadingError("LOADING"),
        redis.exceptions.MaxConnectionsError("Too many connections"),
        redis.exceptions.NoPermissionError("NOPERM"),
        redis.exceptions.ClusterDownError("CLUSTERDOWN"),
        redis.exceptions.TryAgainError("TRYAGAIN"),
        redis.ResponseError("MISCONF"),
        redis.InvalidResponse("?"),
        redis.RedisError("r"),
        OSError("o"),
        TimeoutError("builtin"),
        ConnectionResetError("reset"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_r34_every_error_of_the_library_is_the_store_being_down(
    call: Callable[[ResultStore], object], error: Exception
) -> None:
    with pytest.raises(StoreDown) as caught:
        call(ResultStore(_raising_client(error), ttl_s=1, replica_id="r"))
    assert type(caught.value) is StoreDown
    assert caught.value.__cause__ is error


@EVERY_CALL
def test_r36_refused_login_is_told_apart(call: Callable[[ResultStore], object]) -> None:
    client = _raising_client(redis.AuthenticationError("WRONGPASS S3cret"))
    with pytest.raises(StoreLoginRefused) as caught:
        call(ResultStore(client, ttl_s=1, replica_id="r"))
    assert "S3cret" not in str(caught.value)


@EVERY_CALL
def test_store_that_is_back_is_used_again(
    store: ResultStore, server: fakeredis.FakeServer, call: Callable[[ResultStore], object]
) -> None:
    server.connected = False
    with pytest.raises(StoreDown):
        call(store)
    server.connected = True
    call(store)


def test_bug_of_ours_is_not_taken_for_an_outage(store: ResultStore) -> None:
    def bug() -> bool:
        raise ZeroDivisionError

    store.save("r-1", FAILED, may_replace=_alive)
    with pytest.raises(ZeroDivisionError):
        store.save("r-1", COMPLETED, may_replace=bug)


# -- on the wire ------------------------------------------------------------------------------------------------------


@pytest.fixture
def resp() -> Iterator[RespServer]:
    resp = RespServer()
    yield resp
    resp.stop()


@pytest.fixture
def open_store(resp: RespServer) -> Iterator[Callable[..., ResultStore]]:
    stores: list[ResultStore] = []

    def open_(*, userinfo: str = "", password: str = "", timeout_s: float = 5.0) -> ResultStore:
        url = f"redis://{userinfo}127.0.0.1:{resp.port}"
        client = open_client(url, password=password, timeout_s=timeout_s)
        stores.append(ResultStore(client, ttl_s=TTL_S, replica_id="replica-1"))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def test_probe_is_a_write_beside_the_results_and_leaves_nothing(
    resp: RespServer, open_store: Callable[..., ResultStore]
) -> None:
    open_store().probe()
    (words,) = resp.sent("SET")
    assert words[1] == b"infer_resp:.probe:replica-1"
    assert b"PX" in words


def test_result_goes_out_in_one_command_that_cannot_overwrite(
    resp: RespServer, open_store: Callable[..., ResultStore]
) -> None:
    open_store().save("r-1", COMPLETED, may_replace=_alive)
    (words,) = resp.sent("SET")
    assert words[1:3] == [KEY.encode(), COMPLETED]
    assert sorted(words[3:]) == [b"600", b"EX", b"NX"]


@pytest.mark.parametrize(
    "refusal", [b"-READONLY x", b"-OOM x", b"-MISCONF x", b"-LOADING x", b"-NOPERM x", b"-NOREPLICAS x", b"-ERR x"]
)
def test_r32_r33_refused_write_is_the_store_being_down_though_it_answers_ping(
    resp: RespServer, open_store: Callable[..., ResultStore], refusal: bytes
) -> None:
    resp.answers["SET"] = refusal + b"\r\n"
    store = open_store()
    store.ping()
    with pytest.raises(StoreDown):
        store.probe()
    with pytest.raises(StoreDown):
        store.save("r-1", COMPLETED, may_replace=_alive)


def test_r32_connections_are_dropped_after_an_error(resp: RespServer, open_store: Callable[..., ResultStore]) -> None:
    resp.answers["SET"] = [OK, OK, b"-READONLY x\r\n", OK]
    store = open_store()
    store.probe()
    store.probe()
    with pytest.raises(StoreDown):
        store.probe()
    store.probe()
    assert [number for number, words in resp.commands if words[0] == b"SET"] == [0, 0, 0, 1]


def test_dropped_connection_is_tried_once_more_and_no_oftener(
    resp: RespServer, open_store: Callable[..., ResultStore]
) -> None:
    resp.answers["SET"] = [b"", OK]
    open_store().probe()
    assert len(resp.sent("SET")) == 2
    resp.answers["SET"] = b""
    with pytest.raises(StoreDown):
        open_store().probe()
    assert len(resp.sent("SET")) == 4


def test_save_whose_answer_was_lost_finds_its_own_result(
    resp: RespServer, open_store: Callable[..., ResultStore]
) -> None:
    resp.answers |= {"SET": [b"", b"_\r\n"], "GET": b"$%d\r\n%b\r\n" % (len(COMPLETED), COMPLETED)}
    saved = open_store().save("r-1", COMPLETED, may_replace=_alive)
    assert saved == AlreadyCompleted(Completed(200, b'{"n":1}'))


@pytest.mark.parametrize("silent", ["HELLO", "SET"])
def test_r31_silent_peer_is_given_up_in_time(
    resp: RespServer, open_store: Callable[..., ResultStore], silent: str
) -> None:
    resp.answers[silent] = None
    store = open_store(timeout_s=0.5)
    began_at = monotonic()
    with pytest.raises(StoreDown):
        store.probe()
    assert monotonic() - began_at < 0.5 + 0.2


def test_refused_connection_is_the_store_being_down(closed_port: int) -> None:
    client = open_client(f"redis://127.0.0.1:{closed_port}", password="", timeout_s=5.0)
    with pytest.raises(StoreDown):
        ResultStore(client, ttl_s=1, replica_id="r").probe()


def test_unknown_host_is_the_store_being_down() -> None:
    client = open_client("redis://no-such-host.invalid", password="", timeout_s=5.0)
    with pytest.raises(StoreDown):
        ResultStore(client, ttl_s=1, replica_id="r").probe()


RESERVED = "p@ss:/#?%2F+&=[]"


@pytest.mark.parametrize(
    ("userinfo", "password", "login"),
    [
        ("", "", None),
        ("", RESERVED, [b"default", RESERVED.encode()]),
        (f":{quote(RESERVED, safe='')}@", "", [b"default", RESERVED.encode()]),
        (f"user:{quote(RESERVED, safe='')}@", "", [b"user", RESERVED.encode()]),
        (":in-url@", "beside-it", [b"default", b"in-url"]),
        ("user@", "beside-it", [b"user", b"beside-it"]),
    ],
)
def test_r35_r36_login_is_what_was_written_decoded_once(
    resp: RespServer,
    open_store: Callable[..., ResultStore],
    userinfo: str,
    password: str,
    login: list[bytes] | None,
) -> None:
    open_store(userinfo=userinfo, password=password).probe()
    words = [word for name in ("HELLO", "AUTH") for command in resp.sent(name) for word in command]
    if login is None:
        assert b"AUTH" not in words
    else:
        at = words.index(b"AUTH")
        assert words[at + 1 : at + 3] == login


@pytest.mark.parametrize("refusal", [b"-WRONGPASS invalid", b"-NOAUTH Authentication required."])
def test_r36_refused_login_over_the_wire(
    resp: RespServer, open_store: Callable[..., ResultStore], refusal: bytes
) -> None:
    resp.answers |= {"HELLO": refusal + b"\r\n", "AUTH": refusal + b"\r\n", "SET": refusal + b"\r\n"}
    with pytest.raises(StoreLoginRefused):
        open_store(password="S3cret").probe()


def test_r36_missing_password_is_a_refused_login(resp: RespServer, open_store: Callable[..., ResultStore]) -> None:
    resp.answers["SET"] = b"-NOAUTH Authentication required.\r\n"
    with pytest.raises(StoreLoginRefused):
        open_store().save("r-1", COMPLETED, may_replace=_alive)


def test_r80_no_error_tells_the_password(resp: RespServer, open_store: Callable[..., ResultStore]) -> None:
    resp.answers["SET"] = b"-READONLY x\r\n"
    store = open_store(userinfo=":S3cret@")
    with pytest.raises(StoreDown) as caught:
        store.probe()
    assert "S3cret" not in str(caught.value)


def test_a_refusal_that_quotes_its_command_does_not_bring_the_answer_into_the_error(
    resp: RespServer, open_store: Callable[..., ResultStore]
) -> None:
    resp.answers["SET"] = b"-ERR unknown command 'SET', with args beginning with: 'infer_resp:r-1' 'the ANSWER'\r\n"
    with pytest.raises(StoreDown) as caught:
        open_store().save("r-1", COMPLETED, may_replace=_alive)
    assert "unknown command" in str(caught.value)
    assert "ANSWER" not in str(caught.value)


def test_a_refusal_names_its_kind(resp: RespServer, open_store: Callable[..., ResultStore]) -> None:
    resp.answers["SET"] = b"-READONLY You can't write against a read only replica.\r\n"
    with pytest.raises(StoreDown, match="ReadOnlyError"):
        open_store().save("r-1", COMPLETED, may_replace=_alive)


def test_a_refused_pipeline_does_not_bring_its_commands_into_the_error() -> None:
    quoted = "Command # 1 (SET infer_resp:r-1 the ANSWER...) of pipeline caused error: OOM command not allowed"
    error = redis_client._describe(redis.ResponseError(quoted))
    assert error == "refused (ResponseError: OOM command not allowed)"


@pytest.mark.parametrize("kind", ["list", "stream"])
def test_a_value_of_another_type_under_our_key_is_no_result_and_is_replaced(kind: str) -> None:
    client = fakeredis.FakeRedis()
    store = ResultStore(client, ttl_s=TTL_S, replica_id="replica-1")
    client.rpush(KEY, b"x") if kind == "list" else client.xadd(KEY, {"x": "y"})
    assert store.load_completed("r-1") is None
    assert isinstance(store.save("r-1", COMPLETED, may_replace=_alive), Saved)
    assert client.get(KEY) == COMPLETED
