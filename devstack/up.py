"""`python -m devstack.up`: the stack and a worker in the foreground, until Ctrl-C."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from devstack import processes
from devstack.install import ServersMissing
from devstack.stack import Stack
from devstack.state_file import State, load_state, remove_state, write_state
from devstack.worker_process import WorkerProcess

#: seconds between two looks at the worker's log
_LOG_INTERVAL_S = 0.2
#: seconds for the worker to finish what it works on, once we were asked to end
_STOP_TIMEOUT_S = 30.0


def main() -> int:
    """Run until interrupted (0), or until the worker ends (1); 2 when it cannot run here."""
    running = load_state()
    if running is not None:
        print(f"Another `devstack.up` runs already, as process {running.process_id}; end it first.")
        return 2
    try:
        with processes.signals_unwind(), Stack.from_environment() as stack:
            return serve(stack)
    except (ServersMissing, ValueError) as err:
        print(err)
        return 2
    except processes.NotInTime as err:
        print(err)
        return 1
    except processes.Interrupted:
        return 0


def serve(stack: Stack) -> int:
    """Start the worker, say where everything is, and show the worker's log for as long as it runs."""
    worker = stack.start_worker()
    try:
        state = to_state(stack, worker)
        write_state(state)
        print_addresses(state, stack)
        with worker.log_path.open(errors="replace") as log:
            return follow(worker, log)
    finally:
        remove_state()


def follow(worker: WorkerProcess, log: TextIO) -> int:
    """Print the log as it grows; when we are interrupted, stop the worker first and print its last lines."""
    try:
        while worker.running:
            print(log.read(), end="", flush=True)
            time.sleep(_LOG_INTERVAL_S)
    except processes.Interrupted:
        worker.stop(timeout_s=_STOP_TIMEOUT_S)
        print(log.read(), end="", flush=True)
        raise
    print(log.read(), end="", flush=True)
    print(f"The worker ended by itself, with exit code {worker.exit_code}.")
    return 1


def to_state(stack: Stack, worker: WorkerProcess) -> State:
    """Return where everything listens."""
    return State(
        process_id=os.getpid(),
        amqp_url=stack.amqp_url,
        redis_url=stack.redis_server.url,
        deployment_id=stack.deployment_id,
        model_name=stack.model_name,
        model_url=stack.model_url,
        model_control_url=stack.model.control_url if stack.model else "",
        worker_url=worker.http_url,
    )


def print_addresses(state: State, stack: Stack) -> None:
    """Tell the person at the terminal what is where."""
    print(f"RabbitMQ      {state.amqp_url}  queue infer_req.{state.deployment_id}")
    print(f"Redis         {state.redis_url}")
    print(f"model         {state.model_url}  {state.model_name}")
    if state.model_control_url:
        print(f"its control   {state.model_control_url}  PUT /_control, GET /_ledger")
    print(f"MetricServer  {stack.metric_server.url}")
    print(f"Croesus       {stack.croesus.url}")
    print(f"worker        {state.worker_url}  /healthz, /readyz")
    print('Ask it in another terminal: make ask PROMPT="..."   Ctrl-C ends everything.', flush=True)


if __name__ == "__main__":
    sys.exit(main())
