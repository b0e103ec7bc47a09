"""The producers: a steady rate of requests, each confirmed, and a note of what must become of it.

The right answer follows from the request: the model says the prompt back, and a prompt is made of hashes of the
request's id. A few requests can only fail, each in a known way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import pika
import pika.exceptions

from devstack.chat_completions import count_tokens

from .fleet import Fleet
from .journal import WITH_RESULT, Expected, Sent
from .store_log import StoreLog

#: tokens that "You said: " puts before a prompt
_PREFIX_TOKENS = count_tokens("You said:")
_MIN_TOKENS, _MAX_TOKENS = 5, 50
#: one of so many requests can only fail
_BAD_EVERY = 50
#: one of so many answers is to be streamed
_STREAMED_EVERY = 15
_BAD = (Expected.MALFORMED, Expected.UNREADABLE, Expected.EXPIRED, Expected.REFUSED)
_TIMEOUT_S = 900.0
_AGAIN_S = 0.2
_GIVE_UP_S = 180.0
#: publishers side by side, so that a slow disk under the broker's confirms does not slow the load
_PUBLISHERS = 4


@dataclass(frozen=True)
class Draft:
    """A request that is to be published."""

    request_id: str
    body: bytes
    expected: Expected
    text: str = ""
    total_tokens: int = 0
    is_streamed: bool = False


def draft(
    request_id: str, expected: Expected, *, model: str, token_count: int = _MIN_TOKENS, is_streamed: bool = False
) -> Draft:
    """Make a request that must come to what is expected."""
    words = max(1, token_count - _PREFIX_TOKENS)
    digest = hashlib.sha256(request_id.encode()).hexdigest()
    prompt = " ".join(
        [request_id.replace("-", "_"), *(digest[index % 60 : index % 60 + 4] for index in range(words - 1))]
    )
    request: dict[str, Any] = {
        "request_id": request_id,
        "received_at": time.time(),
        "timeout_s": _TIMEOUT_S,
        "payload": {"model": model, "messages": [{"role": "user", "content": prompt}]},
    }
    if is_streamed:
        request["payload"]["stream"] = True
    match expected:
        case Expected.COMPLETED | Expected.UNANSWERABLE:
            text = f"You said: {prompt}"
            total_tokens = count_tokens(prompt) + 1 + count_tokens(text)
            return Draft(request_id, json.dumps(request).encode(), expected, text, total_tokens, is_streamed)
        case Expected.MALFORMED:
            request["timeout_s"] = "soon"
        case Expected.EXPIRED:
            request |= {"received_at": time.time() - 600.0, "timeout_s": 1.0}
        case Expected.REFUSED:
            request["payload"]["messages"] = []
        case Expected.UNREADABLE:
            # readable for the wires, which know a message by that, and for nobody who reads JSON
            return Draft(request_id, f'no JSON, "request_id": "{request_id}"'.encode(), expected)
    return Draft(request_id, json.dumps(request).encode(), expected)


class Load:
    """Publishes until it is told to stop. Each publisher thread has a connection of its own, straight to the broker."""

    def __init__(self, fleet: Fleet, store_log: StoreLog, *, per_second: float, seed: int, prefix: str = "r") -> None:
        self._fleet, self._store_log, self._prefix = fleet, store_log, prefix
        self.per_second = per_second
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._number = 0
        self._sent: dict[str, Sent] = {}
        #: without a result yet, in the order of their confirms
        self._open: dict[str, float] = {}
        self._flowing, self._stop = threading.Event(), threading.Event()
        self._on_their_way = 0
        #: while set, nothing is published that would be dead-lettered
        self.spares_dead_letters = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failure: BaseException | None = None
        #: that had to be taken out of their queue before the end
        self.dead_letters: list[bytes] = []

    def start(self) -> Load:
        self._flowing.set()
        for index in range(_PUBLISHERS):
            thread = threading.Thread(target=self._run, args=(index,), name=f"load-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def pause(self) -> None:
        """Publish nothing from now on; what is on its way is confirmed yet."""
        with self._lock:
            self._flowing.clear()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way to the broker; after a `pause` that stays so."""
        return self._on_their_way == 0

    def resume(self) -> None:
        """Go on publishing."""
        self._flowing.set()

    def close(self) -> None:
        """End the publishers."""
        self._stop.set()
        self._flowing.set()
        for thread in self._threads:
            thread.join(30.0)

    @property
    def sent(self) -> list[Sent]:
        """All that was confirmed."""
        with self._lock:
            return list(self._sent.values())

    @property
    def sent_count(self) -> int:
        return len(self._sent)

    def forget(self) -> None:
        """Forget what was sent; for a run that lasts."""
        with self._lock:
            self._sent, self._open, self.dead_letters = {}, {}, []

    def unanswered(self, *, before: float) -> list[str]:
        """Return the requests that were confirmed before a time and have no result."""
        with self._lock:
            for request_id in [each for each in self._open if self._store_log.is_answered(each)]:
                del self._open[request_id]
            return [request_id for request_id, confirmed_at in self._open.items() if confirmed_at < before]

    def keep_dead_letters(self, bodies: list[bytes]) -> None:
        """Keep what was taken out of the dead-letter queue, for the checker."""
        with self._lock:
            self.dead_letters += bodies

    def _begin(self) -> Draft | None:
        """Make the next request; None while nothing is to be published."""
        with self._lock:
            if self._stop.is_set() or not self._flowing.is_set():
                return None
            self._on_their_way += 1
            self._number += 1
            number = self._number
            expected = Expected.COMPLETED
            if number % _BAD_EVERY == 0:
                expected = _BAD[number // _BAD_EVERY % len(_BAD)]
                if self.spares_dead_letters.is_set() and expected in (Expected.MALFORMED, Expected.UNREADABLE):
                    expected = Expected.COMPLETED
            tokens = self._random.randint(_MIN_TOKENS, _MAX_TOKENS)
        request_id = f"{self._prefix}-{number:07d}"
        is_streamed = expected is Expected.COMPLETED and number % _STREAMED_EVERY == 0
        model = self._fleet.stack.model_name
        return draft(request_id, expected, model=model, token_count=tokens, is_streamed=is_streamed)

    def add(self, item: Draft) -> None:
        """Publish one request, beside the steady ones."""
        publisher = Publisher(self._fleet)
        try:
            with self._lock:
                self._on_their_way += 1
            self._note(item, publisher.publish(item))
        finally:
            publisher.close()

    def _note(self, item: Draft, publish_count: int) -> None:
        now = time.time()
        with self._lock:
            self._on_their_way -= 1
            self._sent[item.request_id] = Sent(
                item.request_id, item.expected, item.text, item.total_tokens, now, publish_count, item.is_streamed
            )
            if item.expected in WITH_RESULT:
                self._open[item.request_id] = now

    def _run(self, index: int) -> None:
        publisher = Publisher(self._fleet)
        pause_s = _PUBLISHERS / self.per_second
        due = time.monotonic() + pause_s * index / _PUBLISHERS
        try:
            while not self._stop.is_set():
                self._flowing.wait()
                # after an outage of the broker it goes on at its pace: a proxy would have answered 503 meanwhile
                due = max(due + pause_s, time.monotonic() - 1.0)
                self._stop.wait(max(0.0, due - time.monotonic()))
                item = self._begin()
                if item is not None:
                    self._note(item, publisher.publish(item))
        except BaseException as err:
            self.failure = err
            raise
        finally:
            publisher.close()


class Publisher:
    """Publishes one request after the other and waits for each confirm. Owned by one thread."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._connection: pika.BlockingConnection | None = None
        self._channel: Any = None

    def publish(self, item: Draft) -> int:
        """Publish until the broker has confirmed it; return how often that took.

        Raises:  AMQPError, OSError when the broker stays away
        """
        count, give_up_at = 0, time.monotonic() + _GIVE_UP_S
        while True:
            try:
                channel = self._open_channel()
                count += 1
                properties = pika.BasicProperties(delivery_mode=2, content_type="application/json")
                channel.basic_publish("", self._fleet.stack.queue, item.body, properties, mandatory=True)
                return count
            except (pika.exceptions.AMQPError, OSError):
                self.close()
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(_AGAIN_S)

    def close(self) -> None:
        """End the connection."""
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None and connection.is_open:
            with contextlib.suppress(pika.exceptions.AMQPError, OSError):
                connection.close()

    def _open_channel(self) -> Any:
        if self._channel is None or not self._channel.is_open:
            self.close()
            self._connection = self._fleet.rabbitmq.connect()
            self._channel = self._connection.channel()
            self._channel.confirm_delivery()
        return self._channel
