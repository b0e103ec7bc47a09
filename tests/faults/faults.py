"""The table of faults: what strikes, at which point, how it ends, and what it can be a reason for.

An injection returns when its cause is gone, with the times written into its `Injected`; whether all recovers is for the
run to see. Runs on the run's thread; what a trap does runs on a wire's thread.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from devstack import processes
from devstack.behaviour import Fault as ModelFault

from .fleet import Fleet, Seat, now
from .journal import Effect, Injected
from .load import Load
from .points import OF_A_RETRY, Action, Point, Reached

LINGER_S = 0.15
_TRAP_TIMEOUT_S = 30.0
#: how soon the model is told to fail again when no failing call led to the point
_PROVOKE_AGAIN_S = 2.0
#: a dead letter that is rejected sooner after a declare is not preceded by another one
_DECLARED_LATELY_S = 2.0
_DEAD_LETTER_TIMEOUT_S = 30.0
_BEGIN_TIMEOUT_S = 30.0
#: in every payload
_ANY_REQUEST = '"role"'


class NotInjected(Exception):
    """A fault did not come about: nothing reached its point. Raised by injections, reported by the run."""


@dataclass(frozen=True)
class Arena:
    """What injections work on."""

    fleet: Fleet
    load: Load
    random: random.Random
    #: seats whose worker may be ended
    mortal: tuple[str, ...]
    #: what was held stays held for so long before the harm is done: a worker that acks too early has the time to
    linger_s: float = LINGER_S

    @property
    def seats(self) -> tuple[str, ...]:
        return tuple(self.fleet.seats)


@dataclass(frozen=True)
class Kind:
    """One row of the table."""

    name: str
    inject: Callable[[Arena, Injected], None]
    point: Point | None = None
    effects: tuple[Effect, ...] = ()
    #: this many of a row's share in a run, of 1
    weight: float = 1.0


# -- at a point of a request's way ------------------------------------------------------------------------------------


def _strike(arena: Arena, entry: Injected, point: Point, seats: Sequence[str], action: Action) -> Seat:
    """Have the action done to the next request that reaches the point; return the seat that it struck."""
    trap = arena.fleet.traps.set(point, seats, action)
    give_up_at = time.monotonic() + _TRAP_TIMEOUT_S
    try:
        reached = None
        while reached is None and time.monotonic() < give_up_at:
            if point in OF_A_RETRY:
                arena.fleet.model.behave(
                    match=_ANY_REQUEST, times=2, fault=ModelFault.RESET_BODY.value, token_delay_s=0.01
                )
            reached = trap.wait(_PROVOKE_AGAIN_S)
    finally:
        arena.fleet.traps.remove(trap)
    if reached is None:
        raise NotInjected(f"no request reached this point: {point.value}")
    entry.seat, entry.request_id, entry.begun_at = reached.seat, reached.request_id, reached.at
    return arena.fleet.seats[reached.seat]


def _kill_at(point: Point) -> Kind:
    def inject(arena: Arena, entry: Injected) -> None:
        def kill(reached: Reached) -> bool:
            time.sleep(arena.linger_s)
            arena.fleet.seats[reached.seat].kill()
            return False

        seat = _strike(arena, entry, point, arena.mortal, kill)
        entry.cleared_at = now()
        seat.start()

    return Kind("worker: SIGKILL", inject, point, (Effect.PROCESS_ENDED,))


def _cut_at(point: Point) -> Kind:
    def inject(arena: Arena, entry: Injected) -> None:
        def cut(reached: Reached) -> bool:
            time.sleep(arena.linger_s)
            arena.fleet.seats[reached.seat].amqp.cut()
            # what is held on the link to the broker went with it; Redis and the model are not concerned
            return point in (Point.RECEIVED, Point.ANSWERED, Point.STORED)

        _strike(arena, entry, point, arena.seats, cut)
        entry.cleared_at = now()

    return Kind("worker's AMQP link: cut", inject, point, (Effect.SESSION_LOST,))


def _stall_at(point: Point) -> Kind:
    def inject(arena: Arena, entry: Injected) -> None:
        def stall(reached: Reached) -> bool:
            arena.fleet.seats[reached.seat].amqp.stall()
            return True

        seat = _strike(arena, entry, point, arena.seats, stall)
        try:
            # shorter than the heartbeat's patience, about as long, and longer than it
            time.sleep(arena.random.choice((2.0, 6.0, 16.0)))
        finally:
            seat.amqp.resume()
        entry.cleared_at = now()

    return Kind("worker's AMQP link: stalled for 2, 6 or 16 s", inject, point, (Effect.SESSION_LOST,))


def _redis_cut_at(point: Point) -> Kind:
    def inject(arena: Arena, entry: Injected) -> None:
        def cut(reached: Reached) -> bool:
            arena.fleet.seats[reached.seat].redis.cut()
            return False

        _strike(arena, entry, point, arena.seats, cut)
        entry.cleared_at = now()

    return Kind("worker's Redis link: cut", inject, point, (Effect.STORE_DOWN,))


def _redis_down(arena: Arena, entry: Injected) -> None:
    def refuse(reached: Reached) -> bool:
        arena.fleet.seats[reached.seat].redis.refuse()
        return False

    seat = _strike(arena, entry, Point.ANSWERED, arena.seats, refuse)
    try:
        time.sleep(arena.random.uniform(1.0, 4.0))
    finally:
        seat.redis.start()
    entry.cleared_at = now()


def _redis_stall_at(point: Point) -> Kind:
    def inject(arena: Arena, entry: Injected) -> None:
        def stall(reached: Reached) -> bool:
            arena.fleet.seats[reached.seat].redis.stall()
            return True

        seat = _strike(arena, entry, point, arena.seats, stall)
        try:
            time.sleep(arena.random.choice((1.0, 5.0)))
        finally:
            seat.redis.resume()
        entry.cleared_at = now()

    return Kind("worker's Redis link: stalled for 1 or 5 s", inject, point, (Effect.STORE_DOWN,))


# -- the worker -------------------------------------------------------------------------------------------------------


def _stop_worker(arena: Arena, entry: Injected) -> None:
    seat = arena.fleet.seats[arena.random.choice(arena.mortal)]
    # another fault may have started it a moment ago: before Python runs its first line SIGTERM ends it with -15
    processes.wait_until(seat.has_begun, timeout_s=_BEGIN_TIMEOUT_S, what="the worker has logged its first line")
    entry.seat, entry.begun_at, entry.ends_session = seat.name, now(), True
    seat.stop()
    entry.cleared_at = now()
    seat.start()


def _freeze_worker(arena: Arena, entry: Injected) -> None:
    seat = arena.fleet.seats[arena.random.choice(arena.seats)]
    worker = seat.worker
    if worker is None:
        raise NotInjected(f"{seat.name} has no worker")
    entry.seat, entry.begun_at = seat.name, now()
    worker.signal(signal.SIGSTOP)
    try:
        time.sleep(arena.random.choice((2.0, 8.0)))
    finally:
        worker.signal(signal.SIGCONT)
    entry.cleared_at = now()


# -- the broker -------------------------------------------------------------------------------------------------------


def _kill_broker(arena: Arena, entry: Injected) -> None:
    entry.begun_at = now()
    arena.fleet.rabbitmq.kill()
    arena.fleet.rabbitmq.start()
    entry.cleared_at = now()


def _restart_broker(arena: Arena, entry: Injected) -> None:
    entry.begun_at = now()
    arena.fleet.rabbitmq.restart()
    entry.cleared_at = now()


def _close_connections(arena: Arena, entry: Injected) -> None:
    entry.begun_at = now()
    arena.fleet.rabbitmq.ctl("close_all_connections", "a fault that was put in")
    entry.cleared_at = now()


def _memory_alarm(arena: Arena, entry: Injected) -> None:
    entry.begun_at = now()
    arena.fleet.rabbitmq.ctl("set_vm_memory_high_watermark", "0")
    try:
        arena.fleet.model.behave(match=_ANY_REQUEST, times=3, fault=ModelFault.RESET_BODY.value)
        time.sleep(2.0)
    finally:
        arena.fleet.rabbitmq.ctl("set_vm_memory_high_watermark", "0.4")
    entry.cleared_at = now()


def _delete_dead_letters(arena: Arena, entry: Injected) -> None:
    """Delete the queue, and have a dead letter made as soon as a worker has to declare it again for that.

    Until then nothing is published that would be dead-lettered: a message that is rejected within a second of a declare
    goes where its queue went, which is known and told in the documents.
    """
    arena.load.spares_dead_letters.set()
    try:
        time.sleep(1.0)
        processes.wait_until(
            lambda: not arena.load.unanswered(before=now() - 1.0), timeout_s=60.0, what="no dead letter is on its way"
        )
        arena.load.keep_dead_letters(arena.fleet.take_dead_letters())
        entry.begun_at = now()
        arena.fleet.delete_dead_letter_queue()
        time.sleep(_DECLARED_LATELY_S)
    finally:
        arena.load.spares_dead_letters.clear()
    entry.cleared_at = now()


# -- Redis ------------------------------------------------------------------------------------------------------------


def _kill_redis(arena: Arena, entry: Injected) -> None:
    entry.begun_at = now()
    arena.fleet.redis_server.kill()
    time.sleep(arena.random.uniform(0.0, 2.0))
    arena.fleet.redis_server.start()
    entry.cleared_at = now()


def _freeze_redis(arena: Arena, entry: Injected) -> None:
    entry.begun_at = now()
    arena.fleet.redis_server.freeze()
    try:
        time.sleep(arena.random.choice((1.0, 4.0)))
    finally:
        arena.fleet.redis_server.thaw()
    entry.cleared_at = now()


def _redis_setting(name: str, on: Callable[[Arena], None], off: Callable[[Arena], None]) -> Kind:
    def inject(arena: Arena, entry: Injected) -> None:
        entry.begun_at = now()
        on(arena)
        try:
            time.sleep(arena.random.uniform(1.0, 4.0))
        finally:
            off(arena)
        entry.cleared_at = now()

    return Kind(name, inject, effects=(Effect.STORE_DOWN,))


def _tell_redis(arena: Arena, *commands: tuple[str, ...]) -> None:
    with arena.fleet.redis_server.client() as client:
        for command in commands:
            client.execute_command(*command)


def _demote_redis(arena: Arena) -> None:
    _tell_redis(arena, ("REPLICAOF", processes.LOOPBACK, str(processes.free_port())))


def _fail_snapshots(arena: Arena) -> None:
    # a folder in the place of the snapshot's file
    path = arena.fleet.append_only_folder().parent / "dump.rdb"
    path.unlink(missing_ok=True)
    path.mkdir()
    _tell_redis(arena, ("CONFIG", "SET", "save", "3600 100000000"), ("BGSAVE",))


def _mend_snapshots(arena: Arena) -> None:
    (arena.fleet.append_only_folder().parent / "dump.rdb").rmdir()

    def saved() -> bool:
        with arena.fleet.redis_server.client() as client:
            state = client.info("persistence")
            if state["rdb_bgsave_in_progress"]:
                return False
            if state["rdb_last_bgsave_status"] == "ok":
                return True
            client.execute_command("BGSAVE")
            return False

    processes.wait_until(saved, timeout_s=30.0, what="a snapshot", every_s=0.2)
    _tell_redis(arena, ("CONFIG", "SET", "save", ""))


def _change_password(arena: Arena) -> None:
    _tell_redis(arena, ("CONFIG", "SET", "requirepass", "changed"), ("CLIENT", "KILL", "TYPE", "normal"))


def _change_password_back(arena: Arena) -> None:
    arena.fleet.redis_server.password = "changed"
    try:
        _tell_redis(arena, ("CONFIG", "SET", "requirepass", ""))
    finally:
        arena.fleet.redis_server.password = ""


# -- the model and the sinks ------------------------------------------------------------------------------------------


def _kill_model(arena: Arena, entry: Injected) -> None:
    entry.begun_at = now()
    arena.fleet.model.refuse()
    try:
        time.sleep(arena.random.uniform(1.0, 4.0))
    finally:
        arena.fleet.model.start()
    entry.cleared_at = now()


def _model_behaves(name: str, seconds: float, **behaviour: object) -> Kind:
    def inject(arena: Arena, entry: Injected) -> None:
        entry.begun_at = now()
        arena.fleet.model.behave(**behaviour)
        try:
            time.sleep(seconds)
        finally:
            arena.fleet.good_behaviour()
        entry.cleared_at = now()

    return Kind(name, inject, effects=(Effect.MODEL_FAILED,))


def _bills_kept_over_a_kill(arena: Arena, entry: Injected) -> None:
    """Croesus is away while a worker is killed: the bills of what it has answered are in its file alone."""
    arena.fleet.stack.croesus.refuse()
    try:
        time.sleep(2.0)
        seat = arena.fleet.seats[arena.random.choice(arena.mortal)]
        entry.seat, entry.begun_at = seat.name, now()
        seat.kill()
    finally:
        arena.fleet.stack.croesus.start()
    entry.cleared_at = now()
    seat.start()


KINDS: tuple[Kind, ...] = (
    *(_kill_at(point) for point in Point),
    *(_cut_at(point) for point in Point),
    *(_stall_at(point) for point in Point),
    _redis_cut_at(Point.ANSWERED),
    _redis_cut_at(Point.STORED),
    Kind("worker's Redis link: refused for 1 to 4 s", _redis_down, Point.ANSWERED, (Effect.STORE_DOWN,)),
    _redis_stall_at(Point.ANSWERED),
    _redis_stall_at(Point.STORED),
    Kind("worker: SIGTERM, and a new one", _stop_worker),
    Kind(
        "worker: SIGSTOP for 2 or 8 s",
        _freeze_worker,
        effects=(Effect.SESSION_LOST, Effect.STORE_DOWN, Effect.MODEL_FAILED),
    ),
    Kind("broker: kill -9 and restart", _kill_broker, effects=(Effect.SESSION_LOST, Effect.BROKER_KILLED)),
    Kind("broker: clean restart", _restart_broker, effects=(Effect.SESSION_LOST,)),
    Kind("broker: close_all_connections", _close_connections, effects=(Effect.SESSION_LOST,)),
    Kind("broker: memory alarm while calls fail", _memory_alarm, effects=(Effect.MODEL_FAILED,)),
    Kind("broker: dead-letter queue deleted", _delete_dead_letters, weight=0.3),
    Kind("Redis: kill -9 and restart", _kill_redis, effects=(Effect.STORE_DOWN,)),
    Kind("Redis: SIGSTOP for 1 or 4 s", _freeze_redis, effects=(Effect.STORE_DOWN,)),
    _redis_setting(
        "Redis: read-only for 1 to 4 s", _demote_redis, lambda arena: _tell_redis(arena, ("REPLICAOF", "NO", "ONE"))
    ),
    _redis_setting(
        "Redis: out of memory for 1 to 4 s",
        lambda arena: _tell_redis(arena, ("CONFIG", "SET", "maxmemory", "1")),
        lambda arena: _tell_redis(arena, ("CONFIG", "SET", "maxmemory", "0")),
    ),
    _redis_setting("Redis: MISCONF for 1 to 4 s", _fail_snapshots, _mend_snapshots),
    _redis_setting("Redis: wrong password for 1 to 4 s", _change_password, _change_password_back),
    Kind("model: refuses connections for 1 to 4 s", _kill_model, effects=(Effect.MODEL_FAILED,)),
    _model_behaves("model: hangs for 1.5 s, calls end at their timeout", 1.5, delay_s=3600.0),
    _model_behaves("model: resets in the body for 1 s", 1.0, fault=ModelFault.RESET_BODY.value, token_delay_s=0.01),
    Kind("Croesus away, then a SIGKILL of a worker", _bills_kept_over_a_kill, effects=(Effect.PROCESS_ENDED,)),
)


def find_kind(name: str, point: Point | None = None) -> Kind:
    """Return the row of the table with a name and a point."""
    return next(kind for kind in KINDS if (kind.name, kind.point) == (name, point))
