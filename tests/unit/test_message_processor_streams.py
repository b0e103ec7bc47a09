"""A streamed request through all its steps: what those who follow it are told, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inference_worker.delivery import Session
from inference_worker.disposition import Ack, ModelError, Republish, Requeue, Unavailable
from inference_worker.messages import Completed, encode_result
from inference_worker.model_client import Sign
from inference_worker.whole_chunk import whole_chunk
from tests.fakes.steps import ANSWER, ANSWER_BODY, Bench, make_delivery, reply, request_body

# made when this file is read, which may be minutes before a test runs
STREAMED = request_body(payload={"stream": True}, timeout_s=86_400.0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    bench.model.chunks = [b'{"n":1}']
    yield bench
    bench.close()


def kinds(bench: Bench) -> list[str]:
    return [fields[b"type"].decode() for _, fields in bench.store.client.xrange("infer_stream:r-1")]


def test_a_streamed_answer_ends_with_done_once_its_result_is_stored(bench: Bench) -> None:
    assert bench.process(make_delivery(STREAMED)).disposition == Ack("completed")
    assert kinds(bench) == ["chunk", "done"]
    assert ANSWER_BODY in bench.store.client.get("infer_resp:r-1")
    assert bench.buffer.records[0].streamed


def test_a_request_that_asks_for_no_stream_leaves_none(bench: Bench) -> None:
    bench.process(make_delivery(request_body(payload={"stream": "true"})))
    assert kinds(bench) == []
    assert not bench.buffer.records[0].streamed


def test_a_failed_stream_ends_with_the_result_that_says_why(bench: Bench) -> None:
    bench.model.replies[0] = reply(ModelError(400, "too long", None))
    bench.process(make_delivery(STREAMED))
    *_, (_, last) = bench.store.client.xrange("infer_stream:r-1")
    assert last[b"type"] == b"failed"
    assert last[b"data"] == bench.store.client.get("infer_resp:r-1")


def test_an_expired_request_tells_those_who_follow_its_stream(bench: Bench) -> None:
    bench.process(make_delivery(request_body(payload={"stream": True}, received_at=1.0, timeout_s=1.0)))
    assert kinds(bench) == ["failed"]


def test_a_stream_that_is_retried_is_not_ended_and_begins_again_with_restart(bench: Bench) -> None:
    bench.model.replies[0] = reply(Unavailable("cut"), Sign.SUSPECT)
    assert isinstance(bench.process(make_delivery(STREAMED)).disposition, Republish)
    assert kinds(bench) == ["chunk"]
    bench.holds.lift(bench.holds.snapshot()[0].name) if bench.holds.snapshot() else None
    bench.model.replies[0] = reply(ModelError(404, "gone", None))
    bench.process(make_delivery(STREAMED, headers={"x-retry-count": 1}))
    assert kinds(bench) == ["chunk", "restart", "chunk", "failed"]


def test_a_stored_result_found_on_redelivery_says_done_again(bench: Bench) -> None:
    bench.store.client.set(
        "infer_resp:r-1", encode_result(Completed(200, b'{"choices":[{"message":{"content":"a"}}]}'))
    )
    bench.process(make_delivery(STREAMED, redelivered=True))
    (_, restart), (_, chunk), (_, done) = bench.store.client.xrange("infer_stream:r-1")
    assert [entry[b"type"] for entry in (restart, chunk, done)] == [b"restart", b"chunk", b"done"]
    # the whole answer once more: the worker that stored it may have died before its last chunks were written
    assert chunk[b"data"] == b'[{"choices":[{"delta":{"content":"a"}}]}]'
    assert bench.model.requests == []


def test_an_answer_that_was_kept_goes_whole_into_the_stream_of_the_attempt_that_stores_it(bench: Bench) -> None:
    bench.kept.put("r-1", ANSWER)
    bench.process(make_delivery(STREAMED, redelivered=True))
    assert bench.model.requests == []
    assert kinds(bench) == ["restart", "chunk", "done"]


def test_of_two_attempts_at_once_the_one_whose_answer_is_stored_says_it_whole_before_done(bench: Bench) -> None:
    other = bench.streams.open("r-1", attempt="ffffffff", is_retry=True, is_wanted=lambda: True)
    bench.model.meanwhile = lambda: other.append(b'{"n":9}')
    bench.process(make_delivery(STREAMED))
    *_, (_, restart), (_, chunk), (_, done) = bench.store.client.xrange("infer_stream:r-1")
    assert [entry[b"type"] for entry in (restart, chunk, done)] == [b"restart", b"chunk", b"done"]
    assert chunk[b"data"] == b"[" + whole_chunk(ANSWER_BODY) + b"]"


def test_an_answer_that_came_unstreamed_goes_whole_into_the_stream(bench: Bench) -> None:
    bench.model.chunks = []
    bench.process(make_delivery(STREAMED))
    *_, (_, chunk), (_, done) = bench.store.client.xrange("infer_stream:r-1")
    assert chunk[b"data"] == b"[" + whole_chunk(ANSWER_BODY) + b"]"
    assert done[b"type"] == b"done"


def test_an_end_that_redis_does_not_take_sends_the_message_back_and_loses_nothing(bench: Bench) -> None:
    original = bench.streams.write

    def refuse_the_end(key: str, entries: list[dict[str, bytes | str]], **options: Any) -> int | None:
        bench.redis.connected = all(entry["type"] != "done" for entry in entries)
        return original(key, entries, **options)

    bench.streams.write = refuse_the_end  # type: ignore[method-assign]
    assert bench.process(make_delivery(STREAMED)).disposition == Requeue("result_store_down")
    bench.redis.connected = True
    assert ANSWER_BODY in bench.store.client.get("infer_resp:r-1")


def test_an_attempt_whose_session_has_ended_writes_no_chunk(bench: Bench) -> None:
    bench.process(make_delivery(STREAMED, session=Session(1, ended=True)))
    assert kinds(bench) == []
