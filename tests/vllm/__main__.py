"""`python -m tests.vllm`: run all scenarios, one line each, and exit with 0 only if all hold.

--record            write docs/vllm.md from this run
--captures FOLDER   keep what vLLM itself says to the requests of the comparisons, plain and streamed
--only TEXT         only the scenarios whose title holds the text
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path

from devstack import processes
from devstack.install import ServersMissing
from devstack.terminal import Terminal
from devstack.vllm_install import DEFAULT_FOLDER, InstallFailed, installed_versions, provide_vllm
from inference_worker import __version__
from tests.vllm import answers, faults, overload  # noqa: F401  (they fill the list)
from tests.vllm.registry import SCENARIOS, Scenario
from tests.vllm.report import Line, write_report
from tests.vllm.rig import Rig, ScenarioFailed

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"


def main() -> int:
    """Run; 0 when all scenarios hold, 1 when one does not, 2 when they cannot run here."""
    options = _read_options()
    terminal = Terminal()
    chosen = [each for each in SCENARIOS if options.only.lower() in each.title.lower()]
    try:
        provide_vllm()
        with processes.signals_unwind(), Rig(captures=options.captures) as rig:
            lines = [run_scenario(each, rig, terminal) for each in chosen]
            versions = find_versions(rig)
    except (ServersMissing, InstallFailed, processes.NotInTime) as err:
        terminal.line(str(err))
        return 2
    passed = sum(line.passed for line in lines)
    verdict = f"{passed} passed, {len(lines) - passed} failed"
    terminal.line()
    terminal.line(", ".join(f"{name} {version}" for name, version in versions.items()))
    terminal.line(verdict)
    if options.record:
        write_report(DOCUMENT, lines=lines, versions=versions, verdict=verdict, rig=rig)
    return 0 if passed == len(lines) else 1


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm", description="The worker against a real vLLM.")
    parser.add_argument("--record", action="store_true", help="write docs/vllm.md from this run")
    parser.add_argument("--captures", type=Path, metavar="FOLDER", help="keep vLLM's own answers there")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the scenarios whose title holds the text")
    return parser.parse_args()


def run_scenario(scenario: Scenario, rig: Rig, terminal: Terminal) -> Line:
    """Run one scenario on a vLLM that serves with its options, and print what came of it."""
    if not rig.vllm.running or rig.vllm.options != scenario.options:
        begun_at = time.monotonic()
        terminal.line(f"starting vLLM {' '.join(scenario.options)}")
        rig.serve(scenario.options)
        terminal.line(f"  healthy after {time.monotonic() - begun_at:.0f} s")
    begun_at = time.monotonic()
    try:
        seen, passed = scenario.run(rig), True
    except (ScenarioFailed, processes.NotInTime) as err:
        seen, passed = str(err), False
    line = Line(scenario.title, seen, time.monotonic() - begun_at, passed)
    mark = terminal.paint("ok", "green") if passed else terminal.paint("failed", "red")
    terminal.line(f"{mark}  {line.title} ({line.took_s:.1f} s)\n      {line.seen}")
    return line


def find_versions(rig: Rig) -> dict[str, str]:
    """Return the versions of everything that took part."""
    vllm = installed_versions(DEFAULT_FOLDER / "venv")
    with rig.redis_server.client() as client:
        redis_version = str(client.info("server")["redis_version"])
    return {
        "vLLM": vllm["vllm"],
        "torch": vllm["torch"],
        "Python of vLLM": vllm["Python"],
        "RabbitMQ": rig.rabbitmq.version,
        "Redis": redis_version,
        "worker": __version__,
        "Python of the worker": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
