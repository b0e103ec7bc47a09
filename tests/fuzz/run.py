"""Fuzz every target in turn, in one process at a time: `make fuzz RUNS=10000000`.

Shows a line of progress every few seconds. Ends with 1 when a law broke; what broke is in `.devstack/fuzz/findings`,
one smallest input each. The corpus stays in `.devstack/fuzz/corpus`, so the next run goes on from there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

from .seeds import write_corpus
from .targets import TARGETS, Target

FOLDER = Path(".devstack/fuzz")


def main() -> int:
    options = _options()
    shutil.rmtree(FOLDER / "findings", ignore_errors=True)
    write_corpus(FOLDER / "corpus")
    targets = [TARGETS[name] for name in options.targets] or list(TARGETS.values())
    shares = sum(target.share for target in targets)
    began_at = monotonic()
    ends = []
    for target in targets:
        before = sum(end["executed"] for end in ends)
        runs = -(-options.runs * target.share // shares)
        ends.append(_fuzz(target, int(runs), options, before, began_at))
    summary = {"executed": sum(end["executed"] for end in ends), "elapsed_s": round(monotonic() - began_at)}
    summary |= {"targets": ends, "coverage": _coverage(targets), "findings": _findings()}
    (FOLDER / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return _report(summary)


def _options() -> Any:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000_000, help="inputs over all targets")
    parser.add_argument("--seed", type=int, default=1, help="of libFuzzer's random numbers")
    parser.add_argument("targets", nargs="*", help=f"any of {', '.join(TARGETS)}; none: all")
    return parser.parse_args()


def _fuzz(target: Target, runs: int, options: Any, before: int, began_at: float) -> dict[str, Any]:
    end: dict[str, Any] = {"target": target.name, "executed": 0, "elapsed_s": 0.0, "findings": 0, "exit_code": None}
    log_path = FOLDER / f"{target.name}.log"
    command = [sys.executable, "-m", "tests.fuzz.fuzz_one", target.name, str(runs), str(FOLDER), str(options.seed)]
    with (
        log_path.open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            said = json.loads(line)
            end |= {name: said[name] for name in ("executed", "elapsed_s", "findings")}
            done = before + end["executed"]
            print(
                f"{monotonic() - began_at:6.0f} s  {done:>10,} of {options.runs:,}  {target.name:<8} "
                f"{end['executed']:>10,} of {runs:,}  {end['executed'] / max(end['elapsed_s'], 0.1):>7,.0f}/s  "
                f"findings {end['findings']}",
                flush=True,
            )
    end["exit_code"] = process.returncode
    return end


def _coverage(targets: list[Target]) -> dict[str, float]:
    """Which part of the lines and branches of each module the corpora reach."""
    data = FOLDER / ".coverage"
    run = [sys.executable, "-m", "coverage", "run", "--branch", f"--data-file={data}"]
    subprocess.run([*run, "-m", "tests.fuzz.replay", str(FOLDER / "corpus")], check=True)
    report = FOLDER / "coverage.json"
    subprocess.run(
        [sys.executable, "-m", "coverage", "json", "-q", f"--data-file={data}", "-o", str(report)], check=True
    )
    files = json.loads(report.read_text())["files"]
    modules = dict.fromkeys(module for target in targets for module in target.modules)
    covered = {module: files[f"inference_worker/{module}.py"]["summary"]["percent_covered"] for module in modules}
    return {module: round(percent, 1) for module, percent in covered.items()}


def _findings() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((FOLDER / "findings").glob("*.json"))]


def _report(summary: dict[str, Any]) -> int:
    print(f"\n{summary['executed']:,} inputs in {summary['elapsed_s']:,} s")
    for end in summary["targets"]:
        broke = "" if end["exit_code"] == 0 else f"  ended with {end['exit_code']}: see {FOLDER}/{end['target']}.log"
        print(f"  {end['target']:<8} {end['executed']:>10,}  {end['elapsed_s']:>7,.0f} s{broke}")
    print("lines and branches reached")
    for module, percent in summary["coverage"].items():
        print(f"  {module:<16} {percent:5.1f} %")
    for finding in summary["findings"]:
        print(f"finding: {finding['target']}: {finding['signature']} ({finding['count']} times): {finding['input']}")
    is_well = not summary["findings"] and all(end["exit_code"] == 0 for end in summary["targets"])
    print("No law broke." if is_well else f"See {FOLDER}/findings.")
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
