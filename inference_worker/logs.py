"""Log set-up: text for people or one JSON object a line, with the same fields.

Main thread, once. `event` is an API that dashboards match; the sentence beside it may be reworded. Nothing here, and no
caller, logs a body, a prompt, an answer, a header, a secret or a URL with a password, at any level.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Final

#: what a LogRecord has by itself; the rest are our fields
_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextFormatter(logging.Formatter):
    """`2026-11-29T18:00:00.123Z INFO  rmq-listener  consuming from infer_req.x  event=consuming session=1`."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        stamp = f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z"
        fields = " ".join(
            f"{name}={_shown(value)}" for name, value in vars(record).items() if name not in _OWN and value is not None
        )
        line = f"{stamp} {record.levelname:<7} {record.threadName:<16} {record.getMessage()}"
        if fields:
            line += f"  [{fields}]"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _shown(value: object) -> str:
    text = str(value)
    # as one word, or quoted
    return text if text.split() == [text] else repr(text)


def set_up(*, level: str, log_format: str) -> None:
    """Send the log to standard error, where container runtimes and supervisord look for it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_json_formatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("inference_worker").setLevel(level)
    # pika logs each failed connect with a traceback, and at DEBUG what it sends; we say the same in one line
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    logging.getLogger("urllib3").setLevel(logging.ERROR)


def _json_formatter() -> logging.Formatter:
    from pythonjsonlogger.json import JsonFormatter

    return JsonFormatter(
        "{levelname}{threadName}{name}{message}",
        style="{",
        timestamp=True,
        rename_fields={"levelname": "level", "threadName": "thread", "name": "logger"},
    )
