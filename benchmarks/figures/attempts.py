"""One measurement that may fail without ending the run: it is noted, and the others go on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from benchmarks.drain import WrongResults
from benchmarks.results import Results
from devstack.processes import NotInTime


@contextlib.contextmanager
def attempt(results: Results, say: Callable[[str], None], what: str) -> Iterator[None]:
    """Note a contender that does not get through in time, or does it wrong; the error's first line says why."""
    try:
        yield
    except (NotInTime, WrongResults) as err:
        say(f"{what}: {err}")
        results.notes.append(f"{what}: {str(err).splitlines()[0]}")
