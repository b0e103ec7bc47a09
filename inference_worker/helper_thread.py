"""A thread for one neighbour, so that its hanging is its own.

Owned by the thread that hands calls in. Knows no library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class HelperThread:
    """Makes one call at a time. The thread lives on, since the HTTP client keeps connections by thread.

    It is a daemon: a name lookup can outlast every bound, and must not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._inbox: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"metrics-reporter-{name}", daemon=True)
        self._last: Future[Any] | None = None

    def begin(self, call: Callable[[], T]) -> Future[T] | None:
        """Start the call; None when the call before has not come back yet."""
        if self._last is not None and not self._last.done():
            return None
        if self._thread.ident is None:
            self._thread.start()
        future: Future[T] = Future()
        self._last = future
        self._inbox.put((future, call))
        return future

    def close(self) -> None:
        """Let the thread end after its call; does not wait for it."""
        self._inbox.put(None)

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            future, call = work
            try:
                future.set_result(call())
            except BaseException as err:
                # carried to the owner's thread: `Future.result` raises it there, a bug of ours included
                future.set_exception(err)


def result_of(future: Future[T], wait_s: float, *, interrupt: Future[None] | None) -> T:
    """Wait for a result; give up early when `interrupt` is done.

    Raises:  TimeoutError (not there yet), and what the call raised
    """
    if interrupt is not None:
        either: tuple[Future[Any], ...] = (future, interrupt)
        wait(either, wait_s, FIRST_COMPLETED)
        wait_s = 0.0
    return future.result(wait_s)
