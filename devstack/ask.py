"""`python -m devstack.ask "PROMPT"`: one request to the running `devstack.up`, its answer printed as it is made."""

from __future__ import annotations

import json
import sys
from typing import Any

import pika.exceptions
import redis

from devstack.follow import follow
from devstack.producer import cancel, send, wait_result
from devstack.state_file import State, load_state

_TIMEOUT_S = 300.0


def main(arguments: list[str]) -> int:
    """Print the answer (0) or the error (1); 2 when there is nobody to ask; 130 when Ctrl-C cancelled it."""
    prompt = " ".join(arguments).strip()
    if not prompt:
        print('Say what to ask: python -m devstack.ask "PROMPT"', file=sys.stderr)
        return 2
    state = load_state()
    if state is None:
        print("Nothing runs that could answer: start `make up` in another terminal first.", file=sys.stderr)
        return 2
    try:
        return ask(prompt, state)
    except TimeoutError as err:
        print(f"No answer: {err}.", file=sys.stderr)
        return 1
    except (pika.exceptions.AMQPError, redis.RedisError, OSError) as err:
        print(f"What `make up` started does not answer ({err or type(err).__name__}); start it again.", file=sys.stderr)
        return 2


def ask(prompt: str, state: State) -> int:
    """Send one request and print its answer as it comes."""
    request_id = send(
        prompt,
        model=state.model_name,
        deployment_id=state.deployment_id,
        amqp_url=state.amqp_url,
        timeout_s=_TIMEOUT_S,
        stream=True,
    )
    with redis.Redis.from_url(state.redis_url) as results:
        try:
            print_stream(results, request_id)
            result = wait_result(results, request_id, timeout_s=_TIMEOUT_S)
        except KeyboardInterrupt:
            cancel(results, request_id)
            print("\ncancelled", file=sys.stderr)
            return 130
    if result["status"] != "completed":
        print(f"{result['status']} {result['status_code']}: {result['error']}", file=sys.stderr)
        return 1
    print()
    return 0


def print_stream(results: redis.Redis, request_id: str) -> None:
    """Print the text of the chunks up to the stream's end."""
    has_printed = False
    for entry in follow(results, request_id, give_up_after_s=_TIMEOUT_S):
        if entry.kind == "restart" and has_printed:
            print("\n(the model is asked once more)", file=sys.stderr)
            has_printed = False
        for chunk in entry.data if entry.kind == "chunk" else ():
            text = text_of(chunk.get("choices", []))
            print(text, end="", flush=True)
            has_printed = has_printed or bool(text)


def text_of(choices: list[dict[str, Any]]) -> str:
    """Return the text of the first choice's delta; of a tool call, its function."""
    message = choices[0].get("delta", {}) if choices else {}
    calls = message.get("tool_calls") or []
    return (message.get("content") or "") + "".join(json.dumps(call.get("function", {})) for call in calls)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
