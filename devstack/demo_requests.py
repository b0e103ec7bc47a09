"""The thirty requests of the demo, and what must become of each. Pure, but for the ids and the clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from devstack.stack import Stack

_TOPICS = (
    *(
        "tides",
        "rainbows",
        "glaciers",
        "thunder",
        "dew",
        "auroras",
        "geysers",
        "sand dunes",
        "coral reefs",
        "snowflakes",
    ),
    *("comets", "eclipses", "sunspots", "meteors", "black holes", "pulsars", "nebulae", "Saturn's rings", "moonlight"),
    *("bees", "whale song", "bird migration", "fireflies", "spider silk", "octopuses", "hibernation", "tree rings"),
    *("echoes", "magnets", "ink"),
)
#: enough to say something, little enough for a slow model on a laptop
_MAX_TOKENS = 32
REQUEST_COUNT = 30


@dataclass(frozen=True)
class DemoRequest:
    """One request and its expected end."""

    title: str
    body: bytes
    request_id: str  #: empty when none can be read
    text: str  #: the prompt, by which the model's ledger knows it
    status: str = "completed"  #: of the result; empty when there is to be none
    status_code: int | None = 200
    retry_count: int = 0
    model_calls: int = 1
    dead_letter: bool = False


def ordinary_request(stack: Stack, topic: str) -> DemoRequest:
    """Return one that the model just answers."""
    return _to_demo_request(stack.request(**_payload(stack, topic)), title=f"explain {topic}")


def malformed_request(stack: Stack, topic: str) -> DemoRequest:
    """Return one whose request_id can be read, and whose timeout_s is a text."""
    request = stack.request(timeout_s="sixty", **_payload(stack, topic))
    fate = {"status": "failed", "status_code": 400, "model_calls": 0, "dead_letter": True}
    return _to_demo_request(request, title="malformed: timeout_s is text", **fate)


def unreadable_request() -> DemoRequest:
    """Return one that is no JSON, so that nobody can be answered."""
    return DemoRequest("unreadable: no JSON", b"{ this is no JSON", "", "", "", None, model_calls=0, dead_letter=True)


def expired_request(stack: Stack, topic: str) -> DemoRequest:
    """Return one that nobody waits for any more."""
    request = stack.request(age_s=120.0, timeout_s=60.0, **_payload(stack, topic))
    return _to_demo_request(request, title="expired a minute ago", status="failed", status_code=408, model_calls=0)


def refused_request(stack: Stack, topic: str) -> DemoRequest:
    """Return one that the model answers with 400: it asks for no tokens at all."""
    fields = _payload(stack, topic)
    fields["payload"]["max_tokens"] = 0
    return _to_demo_request(stack.request(**fields), title="refused by the model", status="failed", status_code=400)


def reset_request(stack: Stack, topic: str) -> DemoRequest:
    """Return one whose first attempt the model resets in the middle of its answer; tells our model server to do so."""
    request = _to_demo_request(
        stack.request(**_payload(stack, topic)), title=f"explain {topic} (reset once)", retry_count=1, model_calls=2
    )
    if stack.model is not None:
        stack.model.behave(match=request.text, times=1, fault="reset_body")
    return request


def plan_requests(stack: Stack) -> list[DemoRequest]:
    """Return the requests in the order of their sending; a real model is not asked to misbehave."""
    topics = iter(_TOPICS)
    special: dict[int, Callable[[str], DemoRequest]] = {
        5: lambda topic: malformed_request(stack, topic),
        10: lambda topic: unreadable_request(),
        15: lambda topic: expired_request(stack, topic),
    }
    if stack.model is not None:
        special[20] = lambda topic: refused_request(stack, topic)
        special[25] = lambda topic: reset_request(stack, topic)
    requests = []
    for number in range(1, REQUEST_COUNT + 1):
        make = special.get(number)
        topic = next(topics)
        requests.append(make(topic) if make else ordinary_request(stack, topic))
    return requests


def _payload(stack: Stack, topic: str) -> dict[str, Any]:
    message = {"role": "user", "content": f"Explain {topic} in one short sentence."}
    return {"payload": {"model": stack.model_name, "messages": [message], "max_tokens": _MAX_TOKENS}}


def _to_demo_request(request: dict[str, Any], *, title: str, **fate: Any) -> DemoRequest:
    text = request["payload"]["messages"][0]["content"]
    return DemoRequest(title, json.dumps(request).encode(), request["request_id"], text, **fate)
