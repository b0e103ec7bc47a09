"""The exception tree."""

from __future__ import annotations

import builtins
import inspect

from inference_worker import errors
from inference_worker.errors import ConfigError, Fault, WorkerError

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]


def test_every_error_has_the_one_root_and_never_a_builtins_name() -> None:
    assert all(issubclass(kind, WorkerError) for kind in CLASSES)
    assert not [kind.__name__ for kind in CLASSES if hasattr(builtins, kind.__name__)]


def test_every_error_says_who_raises_it_or_what_it_means() -> None:
    assert not [kind.__name__ for kind in CLASSES if not (kind.__doc__ or "").strip()]


def test_no_error_is_one_that_a_retry_would_catch_by_accident() -> None:
    assert not [kind.__name__ for kind in CLASSES if issubclass(kind, (OSError, ValueError, LookupError))]


def test_config_error_tells_every_fault() -> None:
    err = ConfigError((Fault("A", "x", "must be y"), Fault("B", None, "is required")))
    assert str(err) == "A is 'x', but must be y; B is required"
