"""Fuzz one target with libFuzzer, in a process of its own: `python -m tests.fuzz.fuzz_one TARGET RUNS FOLDER SEED`.

Prints a line of progress every few seconds, and at the end one JSON line with what was executed.
"""

from __future__ import annotations

import atexit
import json
import sys
from pathlib import Path
from time import monotonic
from typing import NoReturn

import atheris

with atheris.instrument_imports(include=["inference_worker", "pika.data"]):
    from .findings import Findings
    from .targets import TARGETS

_PROGRESS_S = 5.0
#: by the wall clock, and a busy machine can stand still for ten seconds
_HANG_S = 120
#: how often the clock is looked at
_LOOK_MASK = 0x3FF


def main() -> NoReturn:
    name, runs, folder, seed = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    target = TARGETS[name]
    findings = Findings(target, folder / "findings")
    began_at = shown_at = monotonic()
    executed = 0

    def say(kind: str) -> None:
        said = {"kind": kind, "target": name, "executed": executed, "findings": len(findings)}
        print(json.dumps(said | {"elapsed_s": round(monotonic() - began_at, 1)}), flush=True)

    def check_one(data: bytes) -> None:
        nonlocal executed, shown_at
        executed += 1
        findings.check(data)
        if executed & _LOOK_MASK == 0 and monotonic() - shown_at >= _PROGRESS_S:
            shown_at = monotonic()
            say("progress")

    def end() -> None:
        findings.minimise()
        say("end")

    atexit.register(end)
    arguments = [
        sys.argv[0],
        str(folder / "corpus" / name),
        f"-atheris_runs={runs}",
        f"-max_len={target.max_input_bytes}",
        f"-seed={seed}",
        "-rss_limit_mb=512",
        f"-timeout={_HANG_S}",
        f"-artifact_prefix={folder}/findings/{name}-",
    ]
    (folder / "findings").mkdir(parents=True, exist_ok=True)
    atheris.Setup(arguments, check_one)
    atheris.Fuzz()
    raise SystemExit(0)


if __name__ == "__main__":
    main()
