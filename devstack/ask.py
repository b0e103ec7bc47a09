"""`python -m devstack.ask "PROMPT"`: one request to the running `devstack.up`, and its answer."""

from __future__ import annotations

import sys

import pika.exceptions
import redis

from devstack.producer import ask
from devstack.state_file import load_state

_TIMEOUT_S = 300.0


def main(arguments: list[str]) -> int:
    """Print the answer (0) or the error (1); 2 when there is nobody to ask."""
    prompt = " ".join(arguments).strip()
    if not prompt:
        print('Say what to ask: python -m devstack.ask "PROMPT"', file=sys.stderr)
        return 2
    state = load_state()
    if state is None:
        print("Nothing runs that could answer: start `make up` in another terminal first.", file=sys.stderr)
        return 2
    try:
        result = ask(
            prompt,
            model=state.model_name,
            deployment_id=state.deployment_id,
            amqp_url=state.amqp_url,
            redis_url=state.redis_url,
            timeout_s=_TIMEOUT_S,
        )
    except (pika.exceptions.AMQPError, redis.RedisError, OSError) as err:
        print(f"What `make up` started does not answer ({err or type(err).__name__}); start it again.", file=sys.stderr)
        return 2
    if result["status"] != "completed":
        print(f"{result['status']} {result['status_code']}: {result['error']}", file=sys.stderr)
        return 1
    print(result["result"]["choices"][0]["message"]["content"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
