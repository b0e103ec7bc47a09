"""`/healthz` and `/readyz`: is the process alive, is it consuming, and if not, why.

Its own daemon thread. Knows the standard library's HTTP server; what it tells is handed in.
Source: design section 10 (end).
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from inference_worker.holds import Holds, ListenerState

logger = logging.getLogger(__name__)

#: a client that connects and says nothing does not keep a thread for longer
_CLIENT_TIMEOUT_S = 5.0


class StatusServer:
    """Serves until the process ends. A port that is taken is a warning, not an end."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        is_alive: Callable[[], bool],
        state: Callable[[], ListenerState],
        holds: Holds,
    ) -> None:
        self._host, self._port = host, port
        self._is_alive, self._state, self._holds = is_alive, state, holds
        self._server: ThreadingHTTPServer | None = None

    @property
    def port(self) -> int | None:
        """The port that it listens on; None when it does not."""
        return self._server.server_address[1] if self._server else None

    def start(self) -> None:
        """Listen, unless the port is 0."""
        if self._port == 0:
            return
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        pages = {"/healthz": self.healthz, "/readyz": self.readyz}
        server_class = type("Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True})
        try:
            self._server = server_class((self._host, self._port), _handler_class(pages))
        except OSError as err:
            extra = {"event": "status_server_off", "host": self._host, "port": self._port}
            logger.warning("no /healthz and /readyz: WORKER_HTTP_PORT cannot be used (%s)", err.strerror, extra=extra)
            return
        threading.Thread(target=self._server.serve_forever, name="status-server", daemon=True).start()

    def healthz(self) -> tuple[int, dict[str, Any]]:
        """200 while every thread is alive and ticking."""
        is_alive = self._is_alive()
        return (200 if is_alive else 503), {"alive": is_alive}

    def readyz(self) -> tuple[int, dict[str, Any]]:
        """200 while consuming, else 503 with the reasons."""
        state = self._state()
        is_ready = state is ListenerState.CONSUMING
        holds = [{"name": hold.name, "since": hold.since, "detail": hold.detail} for hold in self._holds.snapshot()]
        return (200 if is_ready else 503), {"ready": is_ready, "state": state, "holds": holds}


def _handler_class(pages: dict[str, Callable[[], tuple[int, dict[str, Any]]]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            status, document = page() if page else (404, {"error": "there are /healthz and /readyz"})
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: a probe every second is no event."""

    return Handler
