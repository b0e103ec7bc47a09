"""The command line: run, `--check`, `--healthcheck`, `--version`, `--help`.

Main thread. The configuration itself comes from the environment alone.
"""

from __future__ import annotations

import argparse
import sys
from queue import SimpleQueue

from inference_worker import __version__, logs
from inference_worker.config import Config, load_config, load_environment, to_text
from inference_worker.errors import ConfigError, Fault, OutboxUnusable
from inference_worker.healthcheck import is_alive
from inference_worker.supervisor import ExitCode

_EXIT_CODES = """
Exit codes: 0 asked to stop; 70 a thread died, which is a bug; 75 what was cut off could not be given back in time;
78 bad configuration. A value may be quoted; an empty one counts as unset; `.env` in the working directory is read.
"""


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags; ends the process for `--help` and `--version`."""
    parser = argparse.ArgumentParser(
        prog="python -m inference_worker",
        description="Consume inference requests from RabbitMQ, ask the model, write results to Redis.",
        epilog="Environment:\n" + to_text() + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="print the effective configuration, try RabbitMQ, Redis, the model, MetricServer and Croesus, and exit",
    )
    parser.add_argument(
        "--healthcheck", action="store_true", help="exit 0 when the worker of this environment is alive"
    )
    parser.add_argument("--version", action="version", version=f"inference_worker {__version__}")
    return parser.parse_args(argv)


def run(argv: list[str], signals: SimpleQueue[int]) -> int:
    """Do what the flags say; return the exit code."""
    arguments = parse(argv)
    try:
        config = load_config(load_environment())
    except ConfigError as err:
        _print_faults(err)
        return ExitCode.BAD_CONFIG
    if arguments.healthcheck:
        return 0 if is_alive(config.process.http_host, config.process.http_port) else 1
    return _check(config) if arguments.check else _work(config, signals)


def _print_faults(err: ConfigError) -> None:
    count = len(err.faults)
    print(f"inference_worker: {count} {'fault' if count == 1 else 'faults'} in the configuration:", file=sys.stderr)
    for fault in err.faults:
        print(f"  {fault}", file=sys.stderr)


def _check(config: Config) -> int:
    from inference_worker.check import check

    logs.set_up(level="ERROR", log_format="text")
    return 0 if check(config, print) else 1


def _work(config: Config, signals: SimpleQueue[int]) -> int:
    from inference_worker import app

    logs.set_up(level=config.process.log_level, log_format=config.process.log_format)
    try:
        return app.run(config, signals)
    except OutboxUnusable as err:
        _print_faults(ConfigError((Fault("USAGE_OUTBOX_PATH", config.billing.outbox_path, str(err)),)))
        return ExitCode.BAD_CONFIG
