"""Run the fault suite: `make faults`, `make faults-quick`, `make soak`, or `python -m tests.faults.run --help`.

Ends with 0 when every promise was kept, with 1 when one was broken or too few faults were injected.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import pika.exceptions
import redis

from benchmarks.machine import machine_facts, redis_version
from devstack import processes
from devstack.install import provide_servers
from devstack.worker_process import PROJECT_FOLDER
from inference_worker import __version__

from . import report
from .checker import BAD, Verdict, check
from .collect import DRAIN_TIMEOUT_S, collect, drain, wait_bills
from .faults import KINDS, Arena, Kind, NotInjected
from .fleet import SETTINGS, Fleet, kept_log_folder
from .journal import Effect, Injected, Say
from .load import Load
from .processes_seen import Sample, by_process, growth, look, to_rows
from .store_log import StoreLog

RESULTS_FOLDER = PROJECT_FOLDER / ".devstack" / "reliability"
PER_SECOND = 60.0
WARM_UP_S = 3.0
#: seconds for all to be well again after the end of a cause; reconnecting may pause for 30 s
WHOLE_TIMEOUT_S = 150.0
#: of the faults of a run, this share comes in turn, kind by kind; the rest at random
IN_TURN = 0.7
#: at random, so many faults may be not yet overcome before the next strikes
_OVERLAP = 4
_QUICK_S = 110.0
_SAMPLE_EVERY_S = 10.0
_LOOK_S = 0.1
#: what our own commands to the servers may end with
_TROUBLE = (processes.NotInTime, processes.CommandFailed, redis.RedisError, pika.exceptions.AMQPError, OSError)
#: a heartbeat of 2 s and Redis' timeout do not survive that
_STANDSTILL_S = 1.0
#: a round of a soak: then all is counted, and forgotten
_ROUND_S = 600.0


@dataclass(frozen=True)
class Plan:
    """What a run is to be."""

    name: str
    seed: int
    queue_type: str = "classic"
    fault_count: int = 200
    #: ends sooner than its faults; 0: no limit
    seconds: float = 0.0
    #: all at random from the start, all is counted in rounds, one worker is never ended
    is_soak: bool = False
    #: each kind at most once, in random order
    is_quick: bool = False
    per_second: float = PER_SECOND
    #: only kinds and points that hold this text
    only: str = ""

    def kinds(self) -> list[Kind]:
        """Return the rows of the table that are wanted."""
        return [kind for kind in KINDS if self.only in f"{kind.name}, {kind.point.value if kind.point else ''}"]


@dataclass
class Outcome:
    """What a run came to."""

    verdict: Verdict = field(default_factory=Verdict)
    faults: list[Injected] = field(default_factory=list)
    #: (second since the start, published, answered)
    throughput: list[tuple[int, int, int]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    not_injected: list[str] = field(default_factory=list)
    #: of this process, and so most likely of the machine
    standstills: list[str] = field(default_factory=list)
    begun_at: float = 0.0
    ended_at: float = 0.0


class Run:
    """One run, from start to verdict. Owned by the main thread."""

    def __init__(self, plan: Plan, fleet: Fleet, *, say: Say) -> None:
        self._plan, self._fleet, self._say = plan, fleet, say
        self._random = random.Random(plan.seed)
        self.outcome = Outcome()
        #: injected and not yet overcome
        self._pending: list[Injected] = []
        self._injected: list[Injected] = []
        self._disturbances: list[Injected] = []
        self._published: Counter[int] = Counter()
        self._answered: Counter[int] = Counter()
        self._stop_watching = threading.Event()
        seats = tuple(fleet.seats)
        self._mortal = seats[1:] if plan.is_soak else seats

    def run(self) -> Outcome:
        """Do it all."""
        fleet, outcome = self._fleet, self.outcome
        fleet.start_workers()
        store_log = StoreLog(fleet.append_only_folder()).start()
        self._store_log = store_log
        self._load = load = Load(fleet, store_log, per_second=self._plan.per_second, seed=self._plan.seed).start()
        watchers = [
            threading.Thread(target=watch, name=watch.__name__, daemon=True)
            for watch in (self._sample, self._watch_standstills)
        ]
        for watcher in watchers:
            watcher.start()
        outcome.begun_at = time.time()
        try:
            time.sleep(WARM_UP_S)
            self._arena = Arena(fleet, load, self._random, self._mortal)
            round_s = min(_ROUND_S, self._plan.seconds / 3)
            round_ends_at = time.monotonic() + round_s
            for part, kind in self._kinds():
                self._inject(part, kind)
                if load.failure is not None:
                    raise load.failure
                if self._plan.is_soak and time.monotonic() > round_ends_at:
                    self._end_round()
                    round_ends_at = time.monotonic() + round_s
            self._end_round(is_last=True)
        finally:
            self._stop_watching.set()
            for watcher in watchers:
                watcher.join()
            load.close()
            store_log.close()
        outcome.ended_at = time.time()
        first = int(outcome.begun_at)
        outcome.throughput = [
            (second - first, self._published[second], self._answered[second])
            for second in range(first, max([first, *self._published, *self._answered]) + 1)
        ]
        return outcome

    # -- faults -------------------------------------------------------------------------------------------------------

    def _kinds(self) -> Iterator[tuple[str, Kind]]:
        plan = self._plan
        ends_at = time.monotonic() + plan.seconds if plan.seconds else float("inf")
        if plan.is_quick:
            kinds = [kind for kind in plan.kinds() if kind.weight == 1.0]
            self._random.shuffle(kinds)
            planned = [("in turn", kind) for kind in kinds]
        elif plan.is_soak:
            planned = []
        else:
            planned = [("in turn", kind) for kind in self._in_turn(round(plan.fault_count * IN_TURN))]
        for part, kind in planned:
            if time.monotonic() > ends_at:
                return
            yield part, kind
        kinds = plan.kinds()
        while not plan.is_quick and time.monotonic() < ends_at:
            if not plan.is_soak and len(self.outcome.faults) + len(self._injected) >= plan.fault_count:
                return
            yield "at random", self._random.choices(kinds, [kind.weight for kind in kinds])[0]

    def _in_turn(self, count: int) -> list[Kind]:
        """Spread a number of faults over the kinds by their weights, kind by kind, each kind once at least."""
        kinds = self._plan.kinds()
        total = sum(kind.weight for kind in kinds)
        return [kind for kind in kinds for _ in range(max(1, round(count * kind.weight / total)))]

    def _inject(self, part: str, kind: Kind) -> None:
        number = len(self.outcome.faults) + len(self._injected) + 1
        point = kind.point.value if kind.point else ""
        entry = Injected(number, kind.name, point, part, effects=kind.effects)
        try:
            kind.inject(self._arena, entry)
        except (NotInjected, *_TROUBLE) as err:
            # on a busy machine a command of ours may not end in time, having done its harm
            self._note_disturbance(entry)
            self.outcome.not_injected.append(f"{kind.name}, {point}: {err}")
            self._say(f"{_clock()}      -   not injected: {kind.name}, {point}: {str(err)[:200]}")
            return
        self._injected.append(entry)
        self._pending.append(entry)
        if part == "in turn":
            self._wait_whole(0)
            # some load without a fault between two
            time.sleep(0.5)
        else:
            self._wait_whole(_OVERLAP)
            self._look_whole()
            time.sleep(self._random.uniform(0.0, 2.0))

    def _note_disturbance(self, entry: Injected) -> None:
        """Keep what is no fault of the table and yet may be a reason for what the checker sees."""
        entry.begun_at = entry.begun_at or time.time()
        entry.cleared_at = entry.whole_at = time.time()
        self._disturbances.append(entry)

    def _wait_whole(self, allowed: int) -> None:
        """Wait until at most so many faults are not overcome."""
        while len(self._pending) > allowed:
            self._look_whole()
            time.sleep(0.1)
            for entry in [each for each in self._pending if time.time() > each.cleared_at + WHOLE_TIMEOUT_S]:
                self._pending.remove(entry)
                self._tell(entry)

    def _look_whole(self) -> None:
        """Note which faults are overcome: all workers consume, and what was published before is answered."""
        for seat in self._fleet.seats.values():
            seat.start_again()
        if not self._pending or not self._fleet.all_ready():
            return
        for entry in list(self._pending):
            if not self._load.unanswered(before=entry.cleared_at):
                entry.whole_at = time.time()
                self._pending.remove(entry)
                self._tell(entry)

    def _tell(self, entry: Injected) -> None:
        total = "" if self._plan.is_soak or self._plan.is_quick else f"/{self._plan.fault_count}"
        what = f"{entry.kind}, {entry.point}" if entry.point else entry.kind
        end = f"whole after {entry.recovery_s:.1f} s" if entry.whole_at else "NOT WHOLE AGAIN"
        self._say(f"{_clock()}  {entry.number:3}{total}  {what}  [{entry.seat or '-'}]  {end}")

    # -- counting -----------------------------------------------------------------------------------------------------

    def _end_round(self, *, is_last: bool = False) -> None:
        """Let all come to its end, count, and forget."""
        fleet, load = self._fleet, self._load
        self._wait_whole(0)
        load.pause()
        processes.wait_until(lambda: load.is_idle, timeout_s=DRAIN_TIMEOUT_S, what="the last confirms")
        ready, unacked = drain(fleet, load)
        wait_bills(fleet, load, self._store_log)
        session_ends = list(fleet.sightings.session_ends)
        exit_codes: list[int] = []
        if is_last:
            for seat in fleet.seats.values():
                seat.stop()
        for seat in fleet.seats.values():
            exit_codes += seat.exit_codes
            seat.exit_codes = []
        evidence = collect(
            fleet, load, self._store_log, faults=[*self._injected, *self._disturbances], ready=ready, unacked=unacked
        )
        evidence.session_ends, evidence.exit_codes = session_ends, exit_codes
        verdict = check(evidence)
        for sent in evidence.sent:
            self._published[int(sent.confirmed_at)] += 1
        for request_id, seen_at in {write.request_id: write.seen_at for write in reversed(evidence.writes)}.items():
            if request_id:
                self._answered[int(seen_at)] += 1
        self.outcome.verdict.merge(verdict)
        self.outcome.faults += self._injected
        self._injected, self._disturbances = [], []
        for problem in verdict.problems:
            self._say(f"{_clock()}  !!  {problem}")
        self._say(f"{_clock()}  counted: {len(evidence.sent)} requests, broken promises: {sum(verdict.bad.values())}")
        if not is_last:
            self._forget()
            load.resume()

    def _forget(self) -> None:
        """Keep nothing of a round but its counts, so that a run of hours needs no more memory than one of minutes."""
        stack = self._fleet.stack
        self._load.forget()
        self._store_log.forget()
        self._fleet.sightings.forget()
        self._fleet.model.ledger.forget()
        stack.croesus.forget()
        stack.metric_server.forget()
        with self._fleet.redis_server.client() as client:
            # the keys too, and what their writes left in the file
            client.flushdb()
            client.bgrewriteaof()

    def _watch_standstills(self) -> None:
        """Notice when this process, through which all bytes pass, did not run: a busy machine, a paused one."""
        while not self._stop_watching.is_set():
            begun_at, cpu_s = time.time(), time.process_time()
            self._stop_watching.wait(_LOOK_S)
            gap_s = time.time() - begun_at
            if gap_s > _STANDSTILL_S:
                what = f"for {gap_s:.1f} s, in which it had {time.process_time() - cpu_s:.1f} s of a core"
                effects = (Effect.SESSION_LOST, Effect.STORE_DOWN, Effect.MODEL_FAILED)
                entry = Injected(0, "the machine stood still", what, "", begun_at=begun_at, effects=effects)
                self._note_disturbance(entry)
                self.outcome.standstills.append(what)
                self._say(f"{_clock()}      -   {entry.kind} {what}")

    def _sample(self) -> None:
        while not self._stop_watching.wait(_SAMPLE_EVERY_S):
            for seat in self._fleet.seats.values():
                worker = seat.worker
                sample = look(seat.name, worker.pid) if worker is not None else None
                if sample is not None:
                    self.outcome.samples.append(sample)


def _clock() -> str:
    return time.strftime("%H:%M:%S")


# -- from the command line --------------------------------------------------------------------------------------------


def _document(plan: Plan, outcome: Outcome, *, broker_version: str, store_version: str) -> dict[str, Any]:
    """Everything about a run, for the report."""
    processes_seen = by_process(outcome.samples)
    longest = processes_seen[0] if plan.is_soak and processes_seen else []
    return {
        "plan": asdict(plan),
        "date": time.strftime("%Y-%m-%d", time.gmtime(outcome.begun_at)),
        "minutes": (outcome.ended_at - outcome.begun_at) / 60,
        "begun_at": outcome.begun_at,
        "versions": {"inference_worker": __version__, "RabbitMQ": broker_version, "Redis": store_version},
        "machine": machine_facts(),
        "settings": {name: str(value) for name, value in SETTINGS.items()},
        "bad": outcome.verdict.bad,
        "bad_meanings": BAD,
        "counts": outcome.verdict.counts,
        "repeated_calls": outcome.verdict.repeated_calls,
        "problems": outcome.verdict.problems,
        "not_injected": outcome.not_injected,
        "standstills": outcome.standstills,
        "faults": [
            {**asdict(fault), "effects": [effect.value for effect in fault.effects]} for fault in outcome.faults
        ],
        "throughput": outcome.throughput,
        # the process that lived longest comes first, and its samples are kept
        "growth": [asdict(found) for samples in processes_seen if (found := growth(samples))],
        "samples": to_rows(longest, begun_at=outcome.begun_at),
    }


def _tell_verdict(document: dict[str, Any], say: Say) -> None:
    say("")
    count, minutes = len(document["faults"]), document["minutes"]
    say(f"{count} faults in {minutes:.1f} minutes, {document['counts']['requests']} requests")
    for name, count in document["bad"].items():
        say(f"  {'ok ' if not count else 'BAD'}  {count:6}  {name}")
    for name, count in document["counts"].items():
        say(f"       {count:6}  {name}")
    for reason, count in sorted(document["repeated_calls"].items()):
        say(f"       {count:6}  calls again, since {reason}")
    if document["plan"]["is_soak"]:
        for grown in document["growth"]:
            levels_mb = [round(level, 1) for level in grown["rss_levels_mb"]]
            say(f"  {grown['seat']}, the last {grown['minutes']:.0f} minutes of a process, and each five of them:")
            say(f"       memory {grown['rss_mb_per_hour']:+.2f} MB/h, {levels_mb} MB")
            say(f"       threads {grown['thread_levels']}, max - min {grown['thread_range']}")
            say(f"       descriptors {grown['descriptor_levels']}, max - min {grown['descriptor_range']}")


def main() -> int:
    """Run as told."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--queue-type", choices=["classic", "quorum"], default="classic")
    parser.add_argument("--seed", type=int, help="of the random part (default: of the clock; it is printed)")
    parser.add_argument("--quick", action="store_true", help="each kind once at most, for two minutes")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="at random for so long, watching for growth")
    parser.add_argument("--per-second", type=float, default=PER_SECOND, help="requests (default: %(default)s)")
    parser.add_argument("--only", default="", help="kinds and points that hold this text")
    parser.add_argument("--report", action="store_true", help="write docs/reliability.md from the runs so far, and end")
    arguments = parser.parse_args()
    if arguments.report:
        report.write(RESULTS_FOLDER, PROJECT_FOLDER / "docs")
        return 0
    plan = Plan(
        name="soak" if arguments.soak else ("quick" if arguments.quick else "faults"),
        seed=arguments.seed if arguments.seed is not None else int(time.time()) % 1_000_000,
        queue_type=arguments.queue_type,
        fault_count=arguments.faults,
        seconds=arguments.soak * 60 if arguments.soak else (_QUICK_S if arguments.quick else 0.0),
        is_soak=bool(arguments.soak),
        is_quick=arguments.quick,
        per_second=arguments.per_second,
        only=arguments.only,
    )
    return carry_out(plan, say=lambda line: print(line, flush=True))


def carry_out(plan: Plan, *, say: Say) -> int:
    """Run a plan, write its numbers, return the exit code."""
    servers = provide_servers()
    say(f"seed {plan.seed}, {plan.queue_type} queue, {plan.per_second:g} requests/s")
    logs = kept_log_folder(RESULTS_FOLDER / "logs" / plan.name)
    with processes.signals_unwind(), Fleet(queue_type=plan.queue_type, log_folder=logs) as fleet:
        say(f"RabbitMQ {fleet.rabbitmq.version}, {len(fleet.seats)} workers; their logs will be in {logs}")
        run = Run(plan, fleet, say=say)
        outcome = run.run()
        document = _document(plan, outcome, broker_version=fleet.rabbitmq.version, store_version=redis_version(servers))
    names = {"soak": "soak", "quick": f"quick-{document['versions']['RabbitMQ']}-{plan.queue_type}"}
    name = names.get(plan.name, f"{document['versions']['RabbitMQ']}-{plan.queue_type}")
    path = RESULTS_FOLDER / f"{name}.json"
    path.write_text(json.dumps(document))
    _tell_verdict(document, say)
    say(f"numbers: {path.relative_to(PROJECT_FOLDER)}; make faults-report writes docs/reliability.md from them")
    is_whole = plan.is_soak or plan.is_quick or len(outcome.faults) >= plan.fault_count or bool(plan.only)
    return 0 if outcome.verdict.holds and is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
