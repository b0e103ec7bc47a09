"""`python -m devstack.demo`: thirty requests through everything, and a look at every place where they left a trace.

Exits with 0 only if everything is as it must be. With MODEL_CONTAINER_URL and MODEL set, a real model server answers,
and what only our own can be told or asked is left out.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from devstack import processes
from devstack.demo_checks import Evidence, Outcome, run_checks
from devstack.demo_requests import DemoRequest, plan_requests
from devstack.install import ServersMissing
from devstack.stack import Stack
from devstack.terminal import ProgressBar, Terminal
from devstack.worker_process import WorkerProcess

#: seconds for all results from our own model server; a real one gets more
_RESULTS_TIMEOUT_S = 30.0
_REAL_MODEL_TIMEOUT_S = 600.0
#: seconds per token of our model server, so that there is something to watch
_TOKEN_DELAY_S = 0.005
#: seconds for documents and events to arrive before the worker is stopped
_SINKS_TIMEOUT_S = 10.0


def main() -> int:
    """Run the demo; 0 when all holds, 1 when something does not, 2 when it cannot run here."""
    terminal = Terminal()
    begun_at = time.monotonic()
    try:
        with processes.signals_unwind(), Stack.from_environment() as stack:
            holds = run_demo(stack, terminal)
    except (ServersMissing, ValueError) as err:
        terminal.line(str(err))
        return 2
    except processes.Interrupted:
        terminal.line("\nInterrupted; nothing is left running.")
        raise
    except processes.NotInTime as err:
        terminal.line(terminal.paint(f"The demo failed: {err}", "red"))
        return 1
    terminal.line()
    verdict = "Everything is as it must be." if holds else "Something is not as it must be; see above."
    terminal.line(terminal.paint(f"{verdict} ({time.monotonic() - begun_at:.1f} s)", "green" if holds else "red"))
    return 0 if holds else 1


def run_demo(stack: Stack, terminal: Terminal) -> bool:
    """Send, watch, show and check; return whether everything holds."""
    if stack.model is not None:
        stack.model.behave(token_delay_s=_TOKEN_DELAY_S)
    model = stack.model_url if stack.model is None else f"{stack.model_url} (ours)"
    terminal.line(
        f"RabbitMQ {stack.rabbitmq.version} on port {stack.rabbitmq.port}, Redis on port {stack.redis_server.port}"
    )
    terminal.line(f"model {stack.model_name} at {model}")
    worker = stack.start_worker()
    terminal.line(f"worker: python -m inference_worker, process {worker.pid}, consuming {stack.queue}")
    terminal.line()

    outcomes = send_and_watch(stack, worker, plan_requests(stack), terminal)
    wait_for_sinks(stack)
    exit_code = worker.stop()
    evidence = Evidence(stack, outcomes, stack.dead_letters(), exit_code)

    show_requests(evidence, terminal)
    show_dead_letters(evidence, terminal)
    show_sinks(evidence, terminal)
    show_overhead(evidence, terminal)
    return show_checks(evidence, worker, terminal)


def send_and_watch(
    stack: Stack, worker: WorkerProcess, requests: list[DemoRequest], terminal: Terminal
) -> list[Outcome]:
    """Publish all requests, then collect results until each has come to its end or time is up."""
    published_at = {}
    for request in requests:
        stack.publish(request.body)
        published_at[request] = time.monotonic()
    bar = ProgressBar(terminal, len(requests), what="requests answered or dead-lettered")
    outcomes: dict[DemoRequest, Outcome] = {}
    unanswerable = [request for request in requests if not request.status]
    timeout_s = _RESULTS_TIMEOUT_S if stack.model is not None else _REAL_MODEL_TIMEOUT_S
    deadline = time.monotonic() + timeout_s
    while len(outcomes) < len(requests) and time.monotonic() < deadline and worker.running:
        for request in requests:
            if request in outcomes or not request.status:
                continue
            if (result := stack.result(request.request_id)) is not None:
                outcomes[request] = Outcome(request, result, time.monotonic() - published_at[request])
        bodies = {letter.body for letter in stack.dead_letters()}
        outcomes.update({request: Outcome(request, None, None) for request in unanswerable if request.body in bodies})
        bar.show(len(outcomes))
        time.sleep(0.01)
    return [outcomes.get(request, Outcome(request, None, None)) for request in requests]


def wait_for_sinks(stack: Stack) -> None:
    """Give a regular flush the chance to come before the last one; what is missing then, the checks will name."""
    try:
        stack.metric_server.wait_until(
            lambda: any(document["queue"] for document in stack.metric_server.documents[1:]),
            what="a regular metrics document",
            timeout_s=_SINKS_TIMEOUT_S,
        )
    except processes.NotInTime:
        return


def show_requests(evidence: Evidence, terminal: Terminal) -> None:
    """Print the table of requests."""
    final = {
        record["request_id"] or "": record
        for record in evidence.stack.metric_server.records
        if record["disposition"] in ("ack", "reject")
    }
    rows, colours = [], []
    for number, outcome in enumerate(evidence.outcomes, start=1):
        result, record = outcome.result or {}, final.get(outcome.request.request_id, {})
        latency = "-" if outcome.latency_s is None else f"{outcome.latency_s * 1000:.0f}"
        rows.append(
            [
                str(number),
                outcome.request.title,
                str(result.get("status", "dead letter" if outcome.request.dead_letter else "missing")),
                str(result.get("status_code", "-")),
                latency,
                shown(record.get("total_tokens")),
                shown(record.get("retry_count")),
            ]
        )
        colours.append("" if result.get("status") == "completed" else "yellow")
    terminal.heading("Requests")
    terminal.table(["#", "request", "status", "code", "latency ms", "tokens", "retries"], rows, colours=colours)


def shown(value: object) -> str:
    """Return a cell's text; unknown is a dash."""
    return "-" if value is None else str(value)


def show_dead_letters(evidence: Evidence, terminal: Terminal) -> None:
    """Print what is in the dead-letter queue."""
    terminal.heading("Dead-letter queue")
    for letter in evidence.dead_letters:
        text = letter.body.decode("utf-8", "replace")
        terminal.line(f"  {text if len(text) <= 100 else text[:99] + '…'}")


def show_sinks(evidence: Evidence, terminal: Terminal) -> None:
    """Print what MetricServer and Croesus received."""
    metric_server, croesus = evidence.stack.metric_server, evidence.stack.croesus
    documents = metric_server.documents
    model_metrics = [document["model_metrics"] for document in documents if document["model_metrics"]]
    queues = [document["queue"] for document in documents if document["queue"]]
    terminal.heading("MetricServer")
    terminal.line(f"  {len(documents)} documents with {len(metric_server.records)} records")
    terminal.line(f"  model, last: {json.dumps(model_metrics[-1]) if model_metrics else 'no numbers'}")
    terminal.line(f"  queue, last: {json.dumps(queues[-1]) if queues else 'no numbers'}")
    terminal.heading("Croesus")
    terminal.line(f"  {len(croesus.events)} events, {croesus.tokens_billed} tokens billed")


def show_overhead(evidence: Evidence, terminal: Terminal) -> None:
    """Print what the worker adds to the model's own time, by its own records."""
    overheads_ms = [
        (record["total_latency_s"] - record["model_latency_s"]) * 1000
        for record in evidence.stack.metric_server.records
        if record["status"] == "completed" and record["model_latency_s"] is not None
    ]
    terminal.heading("Overhead per request (total less model, as the worker's records say)")
    if len(overheads_ms) < 2:
        terminal.line("  no records")
        return
    percentiles = statistics.quantiles(overheads_ms, n=100, method="inclusive")
    terminal.line(f"  p50 {percentiles[49]:.2f} ms, p99 {percentiles[98]:.2f} ms, of {len(overheads_ms)} requests")


def show_checks(evidence: Evidence, worker: WorkerProcess, terminal: Terminal) -> bool:
    """Print every check and what speaks against it, and the worker's log if any does not hold."""
    checks = run_checks(evidence)
    terminal.heading("Checks")
    for check in checks:
        mark = terminal.paint("failed", "red") if check.objections else terminal.paint("ok", "green")
        terminal.line(f"  {mark}  {check.sentence}")
        for objection in check.objections:
            terminal.line(terminal.paint(f"        {objection}", "red"))
    holds = not any(check.objections for check in checks)
    if not holds:
        terminal.heading("The end of the worker's log")
        terminal.line(worker.log()[-4000:])
    return holds


if __name__ == "__main__":
    sys.exit(main())
