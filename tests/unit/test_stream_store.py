"""A streamed answer in Redis: what is written when, how often, and by whom no longer."""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any

import fakeredis
import pytest
import redis

from inference_worker.errors import StoreDown
from inference_worker.stream_store import StreamStore
from tests.fakes.following import followed
from tests.timeouts import LONG_TIMEOUT_S

TTL_S = 77


class Stand:
    """A store on fakeredis, and one stream of it."""

    def __init__(self, *, is_retry: bool = False) -> None:
        self.server = fakeredis.FakeServer()
        self.redis = fakeredis.FakeStrictRedis(server=self.server)
        self.is_wanted = True
        self.store = StreamStore(fakeredis.FakeStrictRedis(server=self.server), ttl_s=TTL_S)
        self.stream = self.store.open("r-1", attempt="0a1b2c3d", is_retry=is_retry, is_wanted=lambda: self.is_wanted)

    def entries(self) -> list[tuple[str, bytes]]:
        return [(fields[b"type"].decode(), fields[b"data"]) for _, fields in self.redis.xrange("infer_stream:r-1")]

    def wait_for(self, count: int) -> list[tuple[str, bytes]]:
        ends_at = monotonic() + LONG_TIMEOUT_S
        while len(found := self.entries()) < count:
            assert monotonic() < ends_at, found
            threading.Event().wait(0.005)
        return found


def test_the_first_chunk_is_written_before_append_returns() -> None:
    stand = Stand()
    stand.stream.append(b'{"n":1}')
    assert stand.entries() == [("chunk", b'[{"n":1}]')]


def test_opening_a_stream_writes_nothing() -> None:
    assert Stand(is_retry=True).entries() == []


def test_the_writer_never_looks_dead_while_it_starts() -> None:
    """The supervisor looks from another thread, and ends the process for a dead one."""
    ended, was_alive = threading.Event(), []
    stores = [Stand() for _ in range(50)]

    def look() -> None:
        while not ended.is_set():
            was_alive.append(all(stand.store.is_alive for stand in stores))

    looker = threading.Thread(target=look)
    looker.start()
    for stand in stores:
        stand.stream.append(b"1")
        stand.stream.append(b"2")
    ended.set()
    looker.join()
    assert was_alive
    assert all(was_alive)


def test_later_chunks_are_gathered_and_written_within_the_time_without_another_one() -> None:
    stand = Stand()
    for n in range(1, 5):
        stand.stream.append(b'{"n":%d}' % n)
    assert len(stand.entries()) == 1
    assert stand.wait_for(2)[1:] == [("chunk", b'[{"n":2},{"n":3},{"n":4}]')]


def test_a_fast_model_costs_at_most_20_writes_a_second() -> None:
    stand = Stand()
    ends_at = monotonic() + 0.5
    sent = 0
    while monotonic() < ends_at:
        stand.stream.append(b"{}")
        sent += 1
    stand.stream.end("done")
    entries = stand.entries()
    assert len(entries) <= 1 + 0.5 * 20 + 2
    assert sum(data.count(b"{}") for kind, data in entries if kind == "chunk") == sent


def test_the_end_writes_what_was_gathered_first() -> None:
    stand = Stand()
    stand.stream.append(b"1")
    stand.stream.append(b"2")
    stand.stream.end("done")
    assert stand.entries() == [("chunk", b"[1]"), ("chunk", b"[2]"), ("done", b"")]


def test_a_further_attempt_begins_with_restart() -> None:
    stand = Stand(is_retry=True)
    stand.stream.append(b"1")
    assert [kind for kind, _ in stand.entries()] == ["restart", "chunk"]


def test_every_entry_names_its_attempt_and_the_key_has_a_ttl() -> None:
    stand = Stand(is_retry=True)
    stand.stream.append(b"1")
    stand.stream.end("failed", b'{"status":"failed"}')
    assert {fields[b"attempt"] for _, fields in stand.redis.xrange("infer_stream:r-1")} == {b"0a1b2c3d"}
    assert 0 < stand.redis.ttl("infer_stream:r-1") <= TTL_S
    assert stand.entries()[-1] == ("failed", b'{"status":"failed"}')


def test_an_attempt_whose_session_has_ended_stops_writing() -> None:
    stand = Stand()
    stand.stream.append(b"1")
    stand.is_wanted = False
    stand.stream.append(b"2")
    stand.stream.end("done")
    assert stand.entries() == [("chunk", b"[1]")]


def test_chunks_that_redis_does_not_take_go_with_the_next_write_in_order() -> None:
    stand = Stand()
    stand.server.connected = False
    stand.stream.append(b"1")
    stand.stream.append(b"2")
    stand.server.connected = True
    stand.stream.end("done")
    assert stand.entries() == [("restart", b""), ("chunk", b"[1,2]"), ("done", b"")]


def test_chunks_that_redis_did_not_take_are_written_without_a_further_one() -> None:
    stand = Stand()
    stand.server.connected = False
    stand.stream.append(b"1")
    stand.server.connected = True
    assert stand.wait_for(2) == [("restart", b""), ("chunk", b"[1]")]


class LosingReplies(fakeredis.FakeStrictRedis):
    """Carries commands out, and loses the answer to those of a pipeline while it is told to."""

    loses = False

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Any:
        pipe = super().pipeline(transaction, shard_hint)
        execute = pipe.execute

        def execute_and_lose() -> Any:
            answers = execute()
            if self.loses:
                raise redis.ConnectionError("lost")
            return answers

        pipe.execute = execute_and_lose
        return pipe


def test_a_write_whose_reply_was_lost_is_begun_anew_so_that_no_piece_is_there_twice() -> None:
    server = fakeredis.FakeServer()
    client = LosingReplies(server=server)
    stream = StreamStore(client, ttl_s=TTL_S).open("r-1", attempt="0a1b2c3d", is_retry=False, is_wanted=lambda: True)
    stream.append(b"1")
    client.loses = True
    with pytest.raises(StoreDown):
        stream.end("done")
    client.loses = False
    stream.append(b"2")
    stream.end("done")
    entries = [(fields[b"type"], fields[b"data"]) for _, fields in client.xrange("infer_stream:r-1")]
    forget = max(at for at, (kind, _) in enumerate(entries) if kind == b"restart")
    pieces = b",".join(data[1:-1] for kind, data in entries[forget:] if kind == b"chunk")
    assert pieces == b"1,2"
    assert entries[-1] == (b"done", b"")


def beside(stand: Stand) -> Any:
    """A second attempt at the same request, in a session that knows that it is one."""
    return stand.store.open("r-1", attempt="ffffffff", is_retry=True, is_wanted=lambda: True)


def test_an_attempt_that_was_alone_says_nothing_twice() -> None:
    stand = Stand(is_retry=True)
    stand.stream.append(b"1")
    stand.stream.append(b"2")
    stand.stream.end("done", whole=lambda: b"1,2")
    assert [kind for kind, _ in stand.entries()].count("restart") == 1
    assert followed(stand.redis) == (b"1,2", "done", b"0a1b2c3d")


@pytest.mark.parametrize("writes_last", ["ours", "the other"])
def test_of_two_attempts_at_once_the_one_that_ends_says_its_answer_whole(writes_last: str) -> None:
    stand = Stand()
    other = beside(stand)
    stand.stream.append(b"1")
    other.append(b"7")
    if writes_last == "ours":
        stand.stream.append(b"2")
        stand.stream.flush()
    stand.stream.end("done", whole=lambda: b"1,2")
    assert followed(stand.redis) == (b"1,2", "done", b"0a1b2c3d")


def test_another_attempt_without_a_restart_of_its_own_is_noticed_too() -> None:
    """Two copies of a request, of which none is marked as a repeat."""
    stand = Stand()
    twin = stand.store.open("r-1", attempt="ffffffff", is_retry=False, is_wanted=lambda: True)
    twin.append(b"7")
    stand.stream.append(b"1")
    stand.stream.end("done", whole=lambda: b"1")
    assert followed(stand.redis) == (b"1", "done", b"0a1b2c3d")


class Interfered(fakeredis.FakeStrictRedis):
    """Lets somebody else act between the look at a stream's length and what follows it."""

    interfere: Any = None

    def pipeline(self, *args: Any, **options: Any) -> Any:
        pipe = super().pipeline(*args, **options)
        look = pipe.xlen

        def look_and_be_interfered_with(key: str) -> Any:
            length = look(key)
            if self.interfere is not None and pipe.watching:
                interfere, self.interfere = self.interfere, None
                interfere()
            return length

        pipe.xlen = look_and_be_interfered_with
        return pipe


def test_an_attempt_that_begins_between_our_look_and_our_end_does_not_end_with_our_done() -> None:
    server = fakeredis.FakeServer()
    client = Interfered(server=server)
    store = StreamStore(client, ttl_s=TTL_S)
    ours = store.open("r-1", attempt="0a1b2c3d", is_retry=False, is_wanted=lambda: True)
    other = StreamStore(fakeredis.FakeStrictRedis(server=server), ttl_s=TTL_S).open(
        "r-1", attempt="ffffffff", is_retry=True, is_wanted=lambda: True
    )
    ours.append(b"1")
    client.interfere = lambda: other.append(b"7")
    ours.end("done", whole=lambda: b"1")
    assert client.interfere is None
    assert followed(client) == (b"1", "done", b"0a1b2c3d")


def test_a_stored_answer_of_another_attempt_takes_the_place_of_ours() -> None:
    stand = Stand()
    stand.stream.append(b"1")
    stand.stream.replace(b"7")
    stand.stream.end("done")
    assert stand.entries() == [("chunk", b"[1]"), ("restart", b""), ("chunk", b"[7]"), ("done", b"")]


def test_an_end_that_cannot_be_written_is_told() -> None:
    stand = Stand()
    stand.server.connected = False
    with pytest.raises(StoreDown):
        stand.stream.end("done")
