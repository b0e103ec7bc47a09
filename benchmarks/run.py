"""`python -m benchmarks.run`: everything is measured, printed as it comes, and written to docs/performance.md."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import machine, requirements
from devstack import processes
from devstack.install import ServersMissing

#: every result of the last run, from which `--report` writes the document again
RESULTS = Path(__file__).parent.parent / ".devstack" / "benchmark.json"
#: the memory over a million messages: its run is a long one of its own, and needs no quiet machine
MILLION_RESULTS = RESULTS.with_name("benchmark-million.json")
_MILLION = 1_000_000
_NAMES = ("throughput", "latency", "slots", "slow-model", "sizes", "workers", "memory", "start-up", "flush")


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each contender takes its turn (5)")
    parser.add_argument("--only", action="append", choices=_NAMES, help="only this figure; docs/ is left as it is")
    parser.add_argument(
        "--again", action="store_true", help="with --only: docs/ takes it for that of the last full run"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="so much less in each round; docs/ is left as it is")
    parser.add_argument(
        "--million", action="store_true", help="only the memory over a million messages; kept for docs/; half an hour"
    )
    parser.add_argument("--quick", action="store_true", help="the bare loop against the worker, under a minute")
    parser.add_argument("--report", action="store_true", help="measure nothing, write docs/ from the last full run")
    return parser.parse_args(argv)


def say(sentence: str) -> None:
    """Print a line of progress."""
    print(sentence, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for: 0; 1 when a quick comparison is beyond its margin; 2 when it cannot run here."""
    arguments = read_arguments(argv)
    if arguments.report:
        return write_again()
    try:
        with processes.signals_unwind():
            if arguments.quick:
                return run_quick()
            if arguments.million:
                return run_million()
            requirements.install_requirements()
            return run_figures(arguments)
    except ServersMissing as err:
        print(err)
        return 2
    except processes.NotInTime as err:
        print(err)
        return 1


def run_quick() -> int:
    """Compare two."""
    from benchmarks import quick
    from benchmarks.bench import Bench

    began_at = time.monotonic()
    with Bench() as bench:
        is_within = quick.compare(bench, say)
    say(f"took {time.monotonic() - began_at:.0f} s")
    return 0 if is_within else 1


def run_figures(arguments: argparse.Namespace) -> int:
    """Measure the figures, print their tables, and write docs/ when it was everything."""
    from benchmarks.bench import Bench
    from benchmarks.effort import Effort
    from benchmarks.figures import FIGURES
    from benchmarks.goals import goals_table
    from benchmarks.model_check import check_models
    from benchmarks.results import Results

    effort = Effort(rounds=arguments.rounds)
    if arguments.scale < 1.0:
        effort = effort.smaller(arguments.scale)
    results = Results()
    results.facts = machine.machine_facts()
    began_at = time.monotonic()
    with Bench() as bench:
        results.facts["servers"] = f"RabbitMQ {bench.rabbitmq.version}, Redis {machine.redis_version(bench.servers)}"
        results.facts["rounds"] = f"{effort.rounds}, {effort.messages:,} messages each at prefetch 1 to 64"
        check_models(bench, results, say)
        for figure in FIGURES:
            if arguments.only and figure.NAME not in arguments.only:
                continue
            figure_began_at = time.monotonic()
            figure.measure(bench, results, effort, _prefixed(figure.NAME))
            say(f"--- {figure.NAME} took {time.monotonic() - figure_began_at:.0f} s\n")
            for table in figure.tables(results):
                say(table.to_text())
    minutes = (time.monotonic() - began_at) / 60
    results.facts["duration"] = f"{minutes:.0f} minutes" if minutes >= 1.5 else "a minute or two"
    say(goals_table(results).to_text())
    for note in results.notes:
        say(f"! {note}")
    if arguments.only and arguments.again and arguments.scale == 1.0 and RESULTS.exists():
        full = Results.decode(RESULTS.read_text())
        for name in arguments.only:
            full.replace(results, name)
            full.facts[f"{name} again"] = f"in a run of its own on {time.strftime('%F')}"
        full.notes += results.notes
        RESULTS.write_text(full.encode())
        return write_again()
    if arguments.only or arguments.scale < 1.0:
        say("docs/performance.md is left as it is: this was not the whole")
        return 0
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(results.encode())
    return write_again()


def run_million() -> int:
    """Watch one worker's memory over a million messages, and keep what was seen for the document."""
    from benchmarks.bench import Bench
    from benchmarks.figures import memory
    from benchmarks.results import Results

    results = Results()
    with Bench() as bench:
        memory.measure_growth(bench, results, _MILLION, _prefixed(memory.NAME))
    if results.notes:
        return 1
    results.facts["growth of the memory"] = f"over {_MILLION:,} messages, in a run of its own on {time.strftime('%F')}"
    MILLION_RESULTS.parent.mkdir(exist_ok=True)
    MILLION_RESULTS.write_text(results.encode())
    for table in memory.tables(results):
        say(table.to_text())
    return 0


def write_again() -> int:
    """Write docs/ from the last full run and the last over a million messages, with the notes as they are now."""
    from benchmarks.figures import memory
    from benchmarks.report import write_report
    from benchmarks.results import Results

    if not RESULTS.exists():
        print("there has been no full run here: make bench")
        return 2
    results = Results.decode(RESULTS.read_text())
    if MILLION_RESULTS.exists():
        memory.take_growth(results, Results.decode(MILLION_RESULTS.read_text()))
    write_report(results)
    say("wrote docs/performance.md and docs/performance.svg")
    return 0


def _prefixed(name: str) -> Callable[[str], None]:
    began_at = time.monotonic()
    return lambda sentence: say(f"[{name} {time.monotonic() - began_at:5.0f} s] {sentence}")


if __name__ == "__main__":
    sys.exit(main())
