"""Wall and CPU time per message for payloads and answers of 0.3 kB, 100 kB and 10 MB, and for a streamed answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import contender as who
from benchmarks import messages
from benchmarks import tables as write
from benchmarks.bench import Bench
from benchmarks.drain import measure_drain
from benchmarks.effort import Effort
from benchmarks.figures.attempts import attempt
from benchmarks.results import Results, in_turn
from benchmarks.servers.answers import SMALL_ANSWER_BYTES
from benchmarks.servers.http_servers import StandIn
from benchmarks.tables import Table

NAME = "sizes"
_KB, _MB = 1000, 1_000_000
CONTENDERS = (who.BARE, who.BARE_URLLIB3, who.WORKER, who.AIO)


@dataclass(frozen=True)
class Case:
    """One pair of sizes."""

    name: str
    prompt_bytes: int
    answer_bytes: int
    stream: bool = False

    def count(self, effort: Effort) -> int:
        """Return how many messages are sent."""
        size = max(self.prompt_bytes, self.answer_bytes)
        if size >= 10 * _MB:
            return effort.big_messages
        return max(40, effort.messages // 5) if size >= 100 * _KB else effort.messages // 3


BIG_PAYLOAD = Case("payload 10 MB", 10 * _MB, SMALL_ANSWER_BYTES)
CASES = (
    Case("payload and answer 0.3 kB", messages.PROMPT_BYTES, SMALL_ANSWER_BYTES),
    Case("payload 100 kB", 100 * _KB, SMALL_ANSWER_BYTES),
    BIG_PAYLOAD,
    Case("answer 100 kB", messages.PROMPT_BYTES, 100 * _KB),
    Case("answer 10 MB", messages.PROMPT_BYTES, 10 * _MB),
    Case("answer streamed, 64 chunks", messages.PROMPT_BYTES, SMALL_ANSWER_BYTES, stream=True),
)


def measure(bench: Bench, results: Results, effort: Effort, say: Callable[[str], None]) -> None:
    """Drain a queue of each size with each contender in turn; the stand-in, unlike nginx, reads all of a payload."""
    for number in range(effort.rounds):
        for case in CASES:
            with StandIn(answer_bytes=case.answer_bytes) as model:
                # the loops know nothing of streams
                contenders = (who.WORKER,) if case.stream else CONTENDERS
                count = case.count(effort)
                for contender in in_turn(contenders, number):
                    what = f"round {number + 1}, {case.name}, {contender.name}"
                    with attempt(results, say, what):
                        drain = measure_drain(
                            bench,
                            contender,
                            prefetch=1,
                            count=count,
                            warm_count=max(1, count // 6),
                            model=model,
                            keys_per_result=2 if case.stream else 1,
                            make_request=lambda case=case: messages.make_request(  # type: ignore[misc]
                                prompt_bytes=case.prompt_bytes, stream=case.stream
                            ),
                        )
                        wall_s, cpu_s = drain.wall_per_message_s, drain.cpu_per_message_s
                        results.add(NAME, contender.name, case.name, number, wall_s=wall_s, cpu_s=cpu_s)
                        say(f"{what}: {wall_s * 1000:.2f} ms wall, {cpu_s * 1000:.2f} ms CPU")


def tables(results: Results) -> list[Table]:
    """Wall, CPU, and the CPU against the bare loop."""
    rows = [
        [
            case,
            name,
            write.with_spread(results.spread(NAME, name, case, "wall_s"), write.milliseconds),
            write.with_spread(results.spread(NAME, name, case, "cpu_s"), write.milliseconds),
            write.with_spread(results.ratio(NAME, case, "cpu_s", name, who.BARE.name), write.ratio),
        ]
        for case in results.cases(NAME)
        for name in results.contenders(NAME, case)
    ]
    columns = ("", "", "wall, ms", "CPU, ms", "CPU, bare loop = 1")
    return [Table("Payloads and answers of other sizes, prefetch 1", columns, rows, _HOW)] if rows else []


_HOW = "The size that is not named is 0.3 kB. The model is the asyncio stand-in, which reads a payload to its end."
