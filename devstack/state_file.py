"""Where a running `devstack.up` listens, for `devstack.ask` to read."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass

from devstack import processes
from devstack.worker_process import PROJECT_FOLDER

#: of its own: what else is kept under .devstack must not go with it
STATE_FOLDER = PROJECT_FOLDER / ".devstack" / "up"
STATE_PATH = STATE_FOLDER / "state.json"


@dataclass(frozen=True)
class State:
    """What a producer has to know, and what a person may want to."""

    process_id: int
    amqp_url: str
    redis_url: str
    deployment_id: str
    model_name: str
    model_url: str
    model_control_url: str  #: empty for a real model server
    worker_url: str


def write_state(state: State) -> None:
    """Write the file; it goes with this process, in whatever way that ends."""
    STATE_FOLDER.mkdir(parents=True, exist_ok=True)
    processes.guardian.order(folder=str(STATE_FOLDER))
    unfinished = STATE_PATH.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(state), indent=2) + "\n")
    unfinished.replace(STATE_PATH)


def load_state() -> State | None:
    """Return the state of what runs, or None when nothing does."""
    try:
        state = State(**json.loads(STATE_PATH.read_text()))
        os.kill(state.process_id, 0)  # a file whose process is gone was left by a crash of the whole machine
    except (OSError, ValueError, TypeError):
        return None
    return state


def remove_state() -> None:
    """Remove the file and its folder."""
    shutil.rmtree(STATE_FOLDER, ignore_errors=True)
