"""`--healthcheck`: is the worker beside this process alive? For a container's HEALTHCHECK.

A process of its own, every few seconds, so it needs next to nothing.
"""

from __future__ import annotations

import http.client

_TIMEOUT_S = 4.0
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def is_alive(host: str, port: int) -> bool:
    """Ask the worker's own /healthz; with port 0 there is none, and nothing to complain of."""
    if port == 0:
        return True
    connection = http.client.HTTPConnection(_EVERY_ADDRESS.get(host, host), port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
