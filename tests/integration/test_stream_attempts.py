"""Two and more attempts at one streamed request at once, on a real Redis."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from inference_worker.redis_client import open_client
from inference_worker.stream_store import StreamStore
from tests.fakes.following import followed

pytestmark = pytest.mark.integration

#: enough for each of the three to end first now and then, and to begin between another's look and its end
ROUNDS = 60
PIECES = 6


@pytest.fixture
def store(redis_server: Any) -> Iterator[StreamStore]:
    client = open_client(redis_server.url, password="", timeout_s=5.0, retry_count=0)
    yield StreamStore(client, ttl_s=60)
    client.close()


def test_whichever_attempt_ends_first_has_said_its_answer_whole(redis_server: Any, store: StreamStore) -> None:
    reader = redis_server.client()
    winners = set()
    for round_number in range(ROUNDS):
        request_id = f"r-{round_number}"
        begin = threading.Barrier(3)

        def answer(attempt: str, *, is_retry: bool, request_id: str = request_id, begin: Any = begin) -> None:
            stream = store.open(request_id, attempt=attempt, is_retry=is_retry, is_wanted=lambda: True)
            pieces = [f'"{attempt}-{number}"'.encode() for number in range(PIECES)]
            begin.wait()
            for piece in pieces:
                stream.append(piece)
                stream.flush()
            stream.end("done", whole=lambda: b",".join(pieces))

        attempts = {"aaaaaaaa": False, "bbbbbbbb": True, "cccccccc": True}
        threads = [
            threading.Thread(target=answer, args=(attempt,), kwargs={"is_retry": is_retry})
            for attempt, is_retry in attempts.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pieces, kind, attempt = followed(reader, request_id)
        name = attempt.decode()
        assert (kind, pieces) == ("done", b",".join(f'"{name}-{number}"'.encode() for number in range(PIECES)))
        winners.add(name)
    assert len(winners) > 1
    reader.close()
