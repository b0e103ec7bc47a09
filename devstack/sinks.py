"""MetricServer and Croesus, as far as the worker can tell. Both misbehave on command. Safe from any thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from devstack.behaviour import Answer, Behaviour, Script, deliver
from devstack.http_server import Exchange, HttpServer, Request
from devstack.processes import NotInTime

_JSON = {"Content-Type": "application/json"}
_EVENT = "application/cloudevents+json"
_EVENT_BATCH = "application/cloudevents-batch+json"
_SinkT = TypeVar("_SinkT", bound="Sink")


class Refused(Exception):
    """A post is answered with an error status. Raised by `_accept` of a sink, caught by its `_answer`."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Sink:
    """What both sinks share: one path that takes posts, and a script of behaviours."""

    _path = "/"

    def __init__(self, *, token: str = "", port: int = 0) -> None:
        self._token = token
        self._changed = threading.Condition()
        self._script = Script()
        self._server = HttpServer(self._answer, port=port)
        self._post_count = 0
        self._refusals: list[int] = []
        self.url = self._server.url

    def start(self: _SinkT) -> _SinkT:
        """Listen; also ends a `refuse`."""
        self._server.start()
        return self

    def close(self) -> None:
        """End all connections and give the port back."""
        self._server.close()

    def __enter__(self: _SinkT) -> _SinkT:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def behave(self, *, match: str | None = None, times: int | None = None, **behaviour: Any) -> None:
        """Tell how to answer from now on, or the next `times` posts whose body holds the text `match`.

        A status other than 2xx keeps nothing of the post; any other fault keeps it and spoils the answer.
        """
        self._script.tell(Behaviour.from_document(behaviour), match=match, times=times)

    def refuse(self) -> None:
        """Refuse connections and reset those that are open; `start` ends it."""
        self._server.refuse()

    @property
    def post_count(self) -> int:
        """Posts that arrived, accepted or not."""
        with self._changed:
            return self._post_count

    @property
    def refusals(self) -> list[int]:
        """The statuses of the posts that were not accepted."""
        with self._changed:
            return list(self._refusals)

    def wait_until(self, condition: Callable[[], bool], *, what: str, timeout_s: float = 10.0) -> None:
        """Wait until a condition on this sink holds; looked at after every post.

        Raises:  NotInTime
        """
        with self._changed:
            if not self._changed.wait_for(condition, timeout_s):
                raise NotInTime(f"not within {timeout_s:g} s: {what}")

    def _accept(self, request: Request) -> None:
        """Keep what was posted. Called with the lock held.

        Raises:  Refused
        """
        raise NotImplementedError

    def _answer(self, exchange: Exchange) -> None:
        request = exchange.request
        if request.method != "POST" or request.path != self._path:
            exchange.respond(404, json.dumps({"error": f"POST {self._path}"}).encode(), headers=_JSON)
            return
        behaviour = self._script.behaviour_for(request.body)
        with self._changed:
            self._post_count += 1
            try:
                if self._token and request.headers.get("authorization") != f"Bearer {self._token}":
                    raise Refused(401, "no or a wrong token")
                if behaviour.status is not None and not 200 <= behaviour.status < 300:
                    raise Refused(behaviour.status, "told to")
                self._accept(request)
            except Refused as err:
                self._refusals.append(err.status)
                answer = Answer(err.status, json.dumps({"error": str(err)}).encode(), _JSON)
            else:
                answer = Answer(202)
            self._changed.notify_all()
        deliver(exchange, answer, behaviour)


class MetricServer(Sink):
    """Keeps the documents that workers post."""

    _path = "/metrics"

    def __init__(self, *, token: str, port: int = 0) -> None:
        super().__init__(token=token, port=port)
        self._documents: list[dict[str, Any]] = []

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The documents, in the order of arrival."""
        with self._changed:
            return list(self._documents)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The request records of all documents."""
        return [record for document in self.documents for record in document["requests"]]

    def records_for(self, request_id: str) -> list[dict[str, Any]]:
        """Return the records of one request, one for each delivery."""
        return [record for record in self.records if record["request_id"] == request_id]

    def forget(self) -> None:
        """Forget all documents; for a run that lasts."""
        with self._changed:
            self._documents.clear()

    def _accept(self, request: Request) -> None:
        document = load_strict_json(request.body)
        if not isinstance(document, dict) or not isinstance(document.get("requests"), list):
            raise Refused(400, "no metrics document")
        self._documents.append(document)


class Croesus(Sink):
    """Bills tokens: takes CloudEvents, one or a batch, and drops an event whose source and id it has."""

    _path = "/events"

    def __init__(self, *, token: str = "", port: int = 0) -> None:
        super().__init__(token=token, port=port)
        self._events: dict[tuple[str, str], dict[str, Any]] = {}
        self._duplicate_count = 0

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events that count, in the order of arrival."""
        with self._changed:
            return list(self._events.values())

    @property
    def duplicate_count(self) -> int:
        """Events that were dropped because they were here already."""
        with self._changed:
            return self._duplicate_count

    @property
    def tokens_billed(self) -> int:
        """The sum over all events that count."""
        return sum(event["data"]["total_tokens"] for event in self.events)

    def event_for(self, request_id: str) -> dict[str, Any] | None:
        """Return the event that bills a request."""
        return next((event for event in self.events if event["id"] == request_id), None)

    def forget(self) -> None:
        """Forget all events; for a run that lasts."""
        with self._changed:
            self._events.clear()
            self._duplicate_count = 0

    def _accept(self, request: Request) -> None:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type not in (_EVENT, _EVENT_BATCH):
            raise Refused(415, f"Content-Type is {content_type or 'missing'}")
        document = load_strict_json(request.body)
        if isinstance(document, list) != (content_type == _EVENT_BATCH):
            raise Refused(400, "the body is not what its Content-Type says")
        events = document if isinstance(document, list) else [document]
        for event in events:
            check_event(event)
        for event in events:
            key = (event["source"], event["id"])
            if key in self._events:
                self._duplicate_count += 1
            else:
                self._events[key] = event


def load_strict_json(body: bytes) -> Any:
    """Parse JSON as the standard has it: UTF-8, no NaN.

    Raises:  Refused
    """

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(body.decode("utf-8"), parse_constant=refuse_constant)
    except ValueError as err:
        raise Refused(400, f"no JSON: {err}") from err


def check_event(event: Any) -> None:
    """Check the attributes that CloudEvents 1.0 requires, and that there are tokens to bill.

    Raises:  Refused
    """
    if not isinstance(event, dict) or event.get("specversion") != "1.0":
        raise Refused(400, "no CloudEvents 1.0 event")
    for name in ("id", "source", "type"):
        if not isinstance(event.get(name), str) or not event[name]:
            raise Refused(400, f"the event has no {name}")
    data = event.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("total_tokens"), int):
        raise Refused(400, "the event bills no tokens")
