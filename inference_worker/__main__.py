"""argv and environment → exit code. The signal handlers are set before anything slow is imported (field report R59)."""

from __future__ import annotations

import signal
import sys
import threading
from queue import SimpleQueue


def listen_for_signals() -> SimpleQueue[int]:
    """Set handlers that put the signal's number on a queue and nothing else: no logging, no lock, no exception (R61).

    Off the main thread Python allows no handler; the worker runs without (R67).
    """
    signals: SimpleQueue[int] = SimpleQueue()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _frame: signals.put(received))
    return signals


def main(argv: list[str] | None = None) -> int:
    """Run the command line. The entry point of `inference-worker` and of `python -m inference_worker`."""
    signals = listen_for_signals()
    from inference_worker import cli

    return cli.run(sys.argv[1:] if argv is None else argv, signals)


if __name__ == "__main__":
    sys.exit(main())
