"""A look at the model servers alone, before anything is measured: neither may be what is waited for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from benchmarks import messages, process_usage
from benchmarks.bench import Bench
from benchmarks.figures import slots
from benchmarks.results import Results
from benchmarks.servers.http_servers import CHAT_PATH, StandIn
from benchmarks.servers.raw_client import measure_rate, request_bytes

_SECONDS = 1.0
#: of the 640 requests a second, what the slow stand-in must hold: below it, the figure would show the model
LEAST_SHARE = 0.97


def check_models(bench: Bench, results: Results, say: Callable[[str], None]) -> None:
    """Measure what they take from a client that costs next to nothing, and enter it among the facts."""
    request = request_bytes(CHAT_PATH, json.dumps(messages.make_request()["payload"]).encode())
    rate = measure_rate(bench.model.port, request, connections=1, seconds=_SECONDS)
    results.facts["instant model"] = f"{bench.model_kind}: {rate:,.0f} requests a second on one connection, raw client"
    say(f"instant model: {results.facts['instant model']}")
    with StandIn(delay_s=slots.DELAY_S) as slow:
        stagger_s = slots.DELAY_S / slots.SLOTS * 0.9
        began_s, began_at = process_usage.cpu_s([slow.pid]), time.perf_counter()
        rate = measure_rate(slow.port, request, connections=slots.SLOTS, seconds=2.0, stagger_s=stagger_s)
        cpu_share = (process_usage.cpu_s([slow.pid]) - began_s) / (time.perf_counter() - began_at)
    share = rate / slots.FULL_RATE
    results.facts["model of 100 ms"] = (
        f"the asyncio stand-in: {rate:.0f} of {slots.FULL_RATE:.0f} requests a second on {slots.SLOTS} connections, "
        f"{cpu_share:.0%} of a core"
    )
    say(f"model of 100 ms: {results.facts['model of 100 ms']}")
    if share < LEAST_SHARE:
        results.notes.append(f"the stand-in held only {share:.1%} of what 64 slots ask of a model of 100 ms")
