"""Where two answers to the same request differ: the plain one, and the one that was streamed and put together. Pure."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

_ABSENT = object()
#: said anew for each answer; that both have it, and of the same kind, is all that is asked
_OWN = re.compile(r"id|created|choices\[\d+\]\.message\.tool_calls\[\d+\]\.id|metrics\.\w+")
#: log probabilities of two computations, whose batches may have been others
_TOLERANCE = 1e-3

SAME_JSON = "the same JSON, other white space"
#: stands for a difference that is expected, whatever the values are
_ANYTHING = "anything"

#: null in plain answers of vLLM 0.32 and in no chunk of its streams, which leave unset fields out
NOT_IN_A_STREAM = frozenset(
    {
        "service_tier",
        "prompt_logprobs",
        "kv_transfer_params",
        "ec_transfer_params",
        "metrics",
        "metrics.speculative_decoding",
        "usage.prompt_tokens_details",
        "usage.completion_tokens_details",
        "choices[].routed_experts",
        "choices[].prompt_logprobs",
        "choices[].message.annotations",
        "choices[].message.audio",
        "choices[].message.function_call",
        "choices[].message.reasoning",
    }
)
#: what else differs, by the kind of request
_ARGUMENTS = {"choices[].message.tool_calls[].function.arguments": SAME_JSON}
_NO_CONTENT = {"choices[].message.content": '"" plain, null streamed'}
KNOWN_DIFFERENCES: dict[str, dict[str, str]] = {
    "chat": {},
    "logprobs": {},
    "two-choices": {},
    # vLLM writes the arguments of a plain answer anew; a stream has them as the model wrote them
    "tool-auto": _ARGUMENTS,
    # the content is null with "auto", whose chunks are the very same, so no client can tell
    "tool-by-name": _ARGUMENTS | _NO_CONTENT,
    "tool-required": _ARGUMENTS | _NO_CONTENT,
    # the plain answer has the raw text, the chunks have the call as far as it went
    "tool-cut-off": {
        "choices[].message.content": _ANYTHING,
        "choices[].message.tool_calls[].id": _ANYTHING,
        "choices[].message.tool_calls[].type": 'absent plain, "function" streamed',
        "choices[].message.tool_calls[].function.name": 'absent plain, "get_weather" streamed',
        "choices[].message.tool_calls[].function.arguments": _ANYTHING,
    },
    "text-completion": {},
}


@dataclass(frozen=True)
class Differences:
    """What one answer has and the other has not. Paths have no indexes."""

    #: null in the plain answer, and not there in the streamed one
    absent: frozenset[str] = frozenset()
    #: anything else, by path
    other: dict[str, str] = field(default_factory=dict)


def differences(plain: Any, streamed: Any) -> Differences:
    """Compare a plain answer with a streamed one, field by field."""
    before, after = _flatten(plain), _flatten(streamed)
    absent, other = set(), {}
    for path in [*before, *(path for path in after if path not in before)]:
        was, now = before.get(path, _ABSENT), after.get(path, _ABSENT)
        if _equal(path, was, now):
            continue
        name = re.sub(r"\[\d+\]", "[]", path)
        if was is None and now is _ABSENT:
            absent.add(name)
        elif path.endswith(".arguments") and _same_json(was, now):
            other[name] = SAME_JSON
        else:
            other[name] = f"{_shown(was)} plain, {_shown(now)} streamed"
    return Differences(frozenset(absent), other)


def unexpected_in(kind: str, found: Differences) -> list[str]:
    """Return what differs otherwise than vLLM's own two answers do for this kind of request."""
    known = KNOWN_DIFFERENCES[kind]
    unexpected = [f"{path}: only in the plain answer" for path in sorted(found.absent - NOT_IN_A_STREAM)]
    unexpected += [f"{path}: {what}" for path, what in found.other.items() if known.get(path) not in (what, _ANYTHING)]
    return unexpected + [f"{path}: the same" for path in known if path not in found.other]


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        members = [(f"{path}.{name}".lstrip("."), member) for name, member in value.items()]
    elif isinstance(value, list) and value:
        members = [(f"{path}[{number}]", member) for number, member in enumerate(value)]
    else:
        return {path: value}
    return {inner: leaf for at, member in members for inner, leaf in _flatten(member, at).items()}


def _equal(path: str, was: Any, now: Any) -> bool:
    if _OWN.fullmatch(path) and was not in (None, _ABSENT):
        return type(was) is type(now)
    if isinstance(was, float) and isinstance(now, float):
        return math.isclose(was, now, abs_tol=_TOLERANCE)
    return type(was) is type(now) and bool(was == now)


def _same_json(was: Any, now: Any) -> bool:
    try:
        return bool(json.loads(was) == json.loads(now))
    except (TypeError, ValueError):
        return False


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
