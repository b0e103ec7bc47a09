"""A place that numbers come from, such as the model's metrics page; unknown when it does not give them in time.

Owned by the reporter's thread; asked on a helper thread of its own. Knows no library.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from inference_worker.errors import WorkerError
from inference_worker.helper_thread import HelperThread, result_of
from inference_worker.trouble import Trouble

#: a failing source is logged again at every 120th failure (an hour at 30 s): a model without metrics is no emergency
_REPEATS = 120

T = TypeVar("T")


class NoNumbers(WorkerError):
    """A source answered, but with nothing that can be read."""


class Source(Generic[T]):
    """Asks, and waits for the answer no longer than it is told."""

    def __init__(self, name: str, ask: Callable[[float], T | None]) -> None:
        self._ask = ask
        self._helper = HelperThread(name)
        self._trouble = Trouble("metrics_source", neighbour=name, repeats=_REPEATS)
        self._answer: Future[T | None] | None = None

    def begin(self, timeout_s: float) -> None:
        self._answer = self._helper.begin(lambda: self._ask(timeout_s))

    def collect(self, wait_s: float, *, interrupt: Future[None] | None) -> T | None:
        if self._answer is None:
            self._trouble.failed("still busy with the call before")
            return None
        try:
            value = result_of(self._answer, wait_s, interrupt=interrupt)
        except TimeoutError:
            if interrupt is None or not interrupt.done():
                self._trouble.failed("no answer in time")
        except WorkerError as err:
            self._trouble.failed(str(err))
        else:
            self._trouble.ended()
            return value
        return None

    def close(self) -> None:
        self._helper.close()
