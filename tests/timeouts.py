"""How long tests wait, named for what the wait is for."""

from __future__ import annotations

from typing import Final

#: a bound that a test means to run into
SHORT_TIMEOUT_S: Final = 0.3
#: a bound that only a failing test, or a machine that is far too slow, runs into
LONG_TIMEOUT_S: Final = 30.0
