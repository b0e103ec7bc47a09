"""Small runs that end with a verdict: one worker or two, one fault. For the tests of the checker."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from devstack import processes
from devstack.behaviour import Fault as ModelFault
from devstack.rabbitmq import RabbitMq

from .checker import Verdict, check
from .collect import collect, drain, wait_bills
from .faults import Arena, find_kind
from .fleet import Fleet, Seat, now
from .journal import Effect, Expected, Injected
from .load import Draft, Load, draft
from .points import Point, Reached
from .store_log import StoreLog

_PER_SECOND = 10.0
_LINGER_S = 1.0
#: seconds for what should happen at once
_TIMEOUT_S = 30.0
#: a call that outlasts what is done meanwhile, and what then is waited for
_SLOW_S = 20.0


@dataclass(frozen=True)
class Scenario:
    """What a run of its own needs, and what is done in it: returns the faults that were injected."""

    play: Callable[[Arena], list[Injected]]
    seat_count: int = 1
    settings: dict[str, object] | None = None


def play(scenario: Scenario, *, rabbitmq: RabbitMq, launcher: str | None, folder: Path) -> Verdict:
    """Play a scenario with a worker, and count."""
    with Fleet(
        seat_count=scenario.seat_count,
        settings=scenario.settings,
        launcher=launcher,
        rabbitmq=rabbitmq,
        log_folder=folder / "logs",
    ) as fleet:
        next(iter(fleet.seats.values())).start()
        processes.wait_until(next(iter(fleet.seats.values())).ready, timeout_s=_TIMEOUT_S, what="the worker consumes")
        store_log = StoreLog(fleet.append_only_folder()).start()
        load = Load(fleet, store_log, per_second=_PER_SECOND, seed=1)
        try:
            arena = Arena(fleet, load, random.Random(1), mortal=tuple(fleet.seats), linger_s=_LINGER_S)
            faults = scenario.play(arena)
            load.close()
            ready, unacked = drain(fleet, load)
            wait_bills(fleet, load, store_log)
            for fault in faults:
                fault.whole_at = now()
            return check(collect(fleet, load, store_log, faults=faults, ready=ready, unacked=unacked))
        finally:
            load.close()
            store_log.close()


def under_load(name: str, point: Point | None = None) -> Callable[[Arena], list[Injected]]:
    """Return a play: some load, one fault of the table, some more load."""
    kind = find_kind(name, point)

    def play_it(arena: Arena) -> list[Injected]:
        arena.load.start()
        time.sleep(1.0)
        entry = Injected(1, kind.name, point.value if point else "", "", effects=kind.effects)
        kind.inject(arena, entry)
        time.sleep(2.0)
        return [entry]

    return play_it


def tag_of_another_session(arena: Arena) -> list[Injected]:
    """Have a request of a session end in the next one, whose first delivery is another request; then kill.

    The first worker's answer to x is held on its way to Redis, and its link is cut until the second worker has x, and
    another request, and so no slot for more. The first one comes back, is given y in its other slot, and ends x, which
    is of the session before. It is killed. Nothing here depends on how long anything takes.
    """
    fleet, load = arena.fleet, arena.load
    first, second = fleet.seats.values()
    is_held, may_go_on = threading.Event(), threading.Event()

    def hold(_: Reached) -> bool:
        is_held.set()
        return may_go_on.wait(4 * _TIMEOUT_S)

    fleet.traps.set(Point.ANSWERED, [first.name], hold)
    load.add(_request(arena, "slow-x"))
    processes.wait_until(is_held.is_set, timeout_s=_TIMEOUT_S, what="the first worker has an answer")
    for name in ("slow_x", "slow_y", "slow_z"):
        fleet.model.behave(match=name, times=1, delay_s=_SLOW_S)
    second.start()
    processes.wait_until(second.ready, timeout_s=_TIMEOUT_S, what="the second worker consumes")
    cut = Injected(1, "cut", "", "", first.name, begun_at=now(), effects=(Effect.SESSION_LOST,))
    first.amqp.refuse()
    load.add(_request(arena, "slow-z"))
    _wait_calls(arena, "slow-x", 2)
    _wait_calls(arena, "slow-z", 1)
    first.amqp.start()
    cut.cleared_at = now()
    load.add(_request(arena, "slow-y"))
    _wait_calls(arena, "slow-y", 1)
    acks: list[str] = []
    trap = fleet.traps.set(Point.ACKING, [first.name], lambda reached: acks.append(reached.request_id) or True)
    may_go_on.set()
    # a worker that keeps the law says nothing to the broker about the call of before, but to its log
    processes.wait_until(
        lambda: acks or _has_settled(first, "slow-x"), timeout_s=_TIMEOUT_S, what="the call of before is settled"
    )
    fleet.traps.remove(trap)
    kill = Injected(2, "kill", "", "", first.name, begun_at=now(), effects=(Effect.PROCESS_ENDED,))
    first.kill()
    kill.cleared_at = now()
    first.start()
    fleet.good_behaviour()
    return [cut, kill]


def _request(arena: Arena, request_id: str) -> Draft:
    return draft(request_id, Expected.COMPLETED, model=arena.fleet.stack.model_name)


def _has_settled(seat: Seat, request_id: str) -> bool:
    lines = seat.worker.log().splitlines() if seat.worker is not None else []
    return any('"request_settled"' in line and f'"{request_id}"' in line for line in lines)


def _wait_calls(arena: Arena, request_id: str, count: int) -> None:
    def called() -> bool:
        return sum(each.request_id == request_id for each in arena.fleet.sightings.called) >= count

    processes.wait_until(called, timeout_s=_TIMEOUT_S, what=f"call {count} of {request_id}")


def without_an_answer(arena: Arena) -> list[Injected]:
    """Have the model fail a request until its retries are used up, and refuse another."""
    fleet = arena.fleet
    fleet.model.behave(match="no_answer", fault=ModelFault.RESET_BODY.value)
    arena.load.add(draft("no-answer", Expected.UNANSWERABLE, model=fleet.stack.model_name))
    arena.load.add(draft("refused", Expected.REFUSED, model=fleet.stack.model_name))
    arena.load.add(draft("malformed", Expected.MALFORMED, model=fleet.stack.model_name))
    arena.load.add(draft("well", Expected.COMPLETED, model=fleet.stack.model_name))
    return []
