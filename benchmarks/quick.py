"""The short paired comparison of CI: the bare loop and the worker, prefetch 1, in under a minute."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import contender as who
from benchmarks import tables as write
from benchmarks.bench import Bench
from benchmarks.drain import measure_drain
from benchmarks.results import Results, in_turn

#: the goal is 1.10; machines are noisy, and a step that cries wolf is switched off
FAILS_BEYOND = 2.0
_NAME, _CASE = "quick", "prefetch 1"
_ROUNDS = 3
_MESSAGES = 1500


def compare(bench: Bench, say: Callable[[str], None]) -> bool:
    """Measure and print the ratios; tell whether they are within the wide margin.

    Raises:  NotInTime; WrongResults
    """
    results = Results()
    for number in range(_ROUNDS):
        for contender in in_turn((who.BARE, who.WORKER), number):
            drain = measure_drain(bench, contender, prefetch=1, count=_MESSAGES, warm_count=_MESSAGES // 5)
            wall_s, cpu_s = drain.wall_per_message_s, drain.cpu_per_message_s
            results.add(_NAME, contender.name, _CASE, number, wall_s=wall_s, cpu_s=cpu_s)
            say(f"round {number + 1}, {contender.name}: {wall_s * 1000:.3f} ms wall, {cpu_s * 1000:.3f} ms CPU")
    wall = results.ratio(_NAME, _CASE, "wall_s", who.WORKER.name, who.BARE.name)
    cpu = results.ratio(_NAME, _CASE, "cpu_s", who.WORKER.name, who.BARE.name)
    assert wall is not None
    if cpu is not None:
        say(f"worker against the bare loop, CPU:  {write.with_spread(cpu, write.ratio)}")
    margins = f"goal 1.10, fails beyond {FAILS_BEYOND:g}"
    say(f"worker against the bare loop, wall: {write.with_spread(wall, write.ratio)}; {margins}")
    return wall.median <= FAILS_BEYOND
