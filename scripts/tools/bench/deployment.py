"""Measures the cost of replication in a real homeserver, under load and idle.

Both sides are the same deployment of a main process and four workers, started anew for
each round. They run at the same time, and perform the same client operations in
alternating blocks; while one side performs a block, the other is idle. The user and
system time of each process is measured during the blocks of its own side.

When idle, both sides do nothing at the same time; the CPU time and the memory of each
process are measured.

Whole rounds of one side after the other differ by more than the sides do, because the
load of a shared machine changes, and with it the share of the processors' caches.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import psycopg2

from scripts.tools.bench.runner import BenchError
from scripts.tools.bench.tasks import Result, Task, Unit
from scripts.tools.faults.synapse.cluster import make_deployment
from scripts.tools.faults.synapse.deployments import (
    DEPLOYMENTS,
    PROCESSES,
    READER,
)
from scripts.tools.faults.synapse.expectations import Expectations
from scripts.tools.faults.synapse.traffic import WEIGHTS, Room
from scripts.tools.proc import processor_seconds, proportional_mebibytes
from synapse_replication.testing.servers import PrivatePostgres, PrivateRedis
from tests.support.client_api import ClientApi
from tests.support.synapse_peer import SynapseDeployment

#: The name for ``--only``.
NAME = "deployment"

#: The name for ``--only`` of the measurement without load.
IDLE_NAME = "idle deployment"

OPERATIONS, QUICK_OPERATIONS = 1500, 300
WARM_UP = 150
#: The number of rooms, half of them for each persister, and the maximum number of rooms
#: that are created to obtain them.
ROOMS, MOST_ROOMS = 4, 30
#: The number of operations between two ``/sync`` requests.
SYNC_EACH = 5
#: The number of operations of one side before the other side continues.
BLOCK = 50
#: The time in s after a block in which its rows are replicated. It is fixed, so that
#: both sides are measured for the same idle time.
SETTLE = 0.5
#: The time in s after the warm-up of both sides in which their start-up work ends.
SETTLE_AT_FIRST = 3.0

#: The time in s for which both sides are idle, and that before it.
IDLE_FOR, QUICK_IDLE_FOR = 60.0, 20.0
SETTLE_BEFORE_IDLE = 10.0

SIDES = ("ours", "stock")


def make_plan(count: int) -> list[tuple[int, str]]:
    """Return a fixed sequence of operations, each with a room's number and a stream."""
    chance = random.Random(1)
    kinds = chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    return [(chance.randrange(ROOMS), kind) for kind in kinds]


@attrs.frozen
class _Listeners:
    deployment: SynapseDeployment

    def api(self, name: str) -> ClientApi:
        return self.deployment.processes[name].api


@attrs.define
class _Side:
    """A running deployment.

    :ivar spent: the CPU time in s of each process in the blocks measured so far.
    :ivar since: the token of the last ``/sync`` of each room's watching user.
    """

    deployment: SynapseDeployment
    rooms: list[Room]
    spent: dict[str, float] = attrs.Factory(lambda: dict.fromkeys(PROCESSES, 0.0))
    since: dict[int, str] = attrs.Factory(dict)

    def operate(self, operations: list[tuple[int, str]]) -> None:
        for number, (room, kind) in enumerate(operations):
            self.rooms[room].write(kind)
            if number % SYNC_EACH == 0:
                answer = self.rooms[room].bob.sync(self.since.get(room))
                self.since[room] = answer["next_batch"]

    def measure(self, operations: list[tuple[int, str]]) -> None:
        before = self.processor_seconds()
        self.operate(operations)
        time.sleep(SETTLE)
        for name, seconds in self.processor_seconds().items():
            self.spent[name] += seconds - before[name]

    def processor_seconds(self) -> dict[str, float]:
        return {
            name: processor_seconds(
                Path(f"/proc/{process.pid}/stat").read_text("utf-8")
            )
            for name, process in self.deployment.processes.items()
        }


def measure_deployment(
    rounds: int, quick: bool, print_line: Callable[[str], object]
) -> list[Result]:
    """Measure both sides in alternating blocks of operations.

    The processes are started by the interpreter that
    :func:`tests.support.synapse_process.interpreter` names.

    :return: a result for each process, and one for their sum.
    """
    count = QUICK_OPERATIONS if quick else OPERATIONS
    found: dict[str, dict[str, list[float]]] = {
        name: {side: [] for side in SIDES} for name in (*PROCESSES, "all")
    }
    for number in range(rounds):
        totals = {}
        for side, spent in _measure_round(make_plan(count)).items():
            totals[side] = sum(spent.values())
            for name, seconds in (*spent.items(), ("all", totals[side])):
                found[name][side].append(seconds)
        print_line(f"{NAME}: round {number + 1} of {rounds}: {_compare(totals)}")
    totals = {side: sum(values) for side, values in found["all"].items()}
    print_line(f"{NAME}: all rounds: {_compare(totals)}")
    return [
        Result(
            Task(
                name=f"{NAME}, {name}",
                group=NAME,
                measure=NAME,
                count=count,
                quick_count=QUICK_OPERATIONS,
            ),
            Unit.CPU_SECONDS,
            values["ours"],
            values["stock"],
        )
        for name, values in found.items()
    ]


def measure_idle(
    rounds: int, quick: bool, print_line: Callable[[str], object]
) -> list[Result]:
    """Measure both sides while no client does anything.

    :return: for each process and for their sum, the CPU time and the memory.
    """
    seconds = QUICK_IDLE_FOR if quick else IDLE_FOR
    units = (Unit.CPU_SECONDS, Unit.MEBIBYTES)
    found: dict[tuple[str, Unit], dict[str, list[float]]] = {
        (name, unit): {side: [] for side in SIDES}
        for unit in units
        for name in (*PROCESSES, "all")
    }
    for number in range(rounds):
        for (side, unit), values in _measure_idle_round(seconds).items():
            for name, value in (*values.items(), ("all", sum(values.values()))):
                found[name, unit][side].append(value)
        shown = ", ".join(
            f"{unit.shown} {_ratio(found['all', unit], number)}" for unit in units
        )
        print_line(f"{IDLE_NAME}: round {number + 1} of {rounds}: {shown}")
    return [
        Result(
            Task(
                name=f"{IDLE_NAME}, {name}",
                group=NAME,
                measure=IDLE_NAME,
                count=int(seconds),
                quick_count=int(QUICK_IDLE_FOR),
                count_name="s",
            ),
            unit,
            values["ours"],
            values["stock"],
        )
        for (name, unit), values in found.items()
    ]


def _ratio(values: Mapping[str, list[float]], number: int) -> str:
    ours, stock = values["ours"][number], values["stock"][number]
    return f"ours {ours:.2f}, stock {stock:.2f}, ours/stock {ours / stock:.3f}"


def _measure_idle_round(
    seconds: float,
) -> Mapping[tuple[str, Unit], Mapping[str, float]]:
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(PrivatePostgres())
        sides = {name: _start(stack, name, postgres) for name in SIDES}
        for side in sides.values():
            side.operate(make_plan(WARM_UP))
        time.sleep(SETTLE_BEFORE_IDLE)
        before = {name: side.processor_seconds() for name, side in sides.items()}
        time.sleep(seconds)
        result: dict[tuple[str, Unit], Mapping[str, float]] = {}
        for name, side in sides.items():
            result[name, Unit.CPU_SECONDS] = {
                process: spent - before[name][process]
                for process, spent in side.processor_seconds().items()
            }
            result[name, Unit.MEBIBYTES] = {
                each: proportional_mebibytes(process.pid)
                for each, process in side.deployment.processes.items()
            }
        return result


def _compare(totals: Mapping[str, float]) -> str:
    ours, stock = totals["ours"], totals["stock"]
    return f"ours {ours:.2f} s, stock {stock:.2f} s, ours/stock {ours / stock:.3f}"


def _measure_round(plan: list[tuple[int, str]]) -> Mapping[str, Mapping[str, float]]:
    """Perform a plan on both sides.

    :return: for each side, the CPU time in s of each process.
    """
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(PrivatePostgres())
        sides = {name: _start(stack, name, postgres) for name in SIDES}
        for side in sides.values():
            side.operate(make_plan(WARM_UP))
        time.sleep(SETTLE_AT_FIRST)
        order = list(sides.values())
        for start in range(0, len(plan), BLOCK):
            for side in order:
                side.measure(plan[start : start + BLOCK])
            # Alternate the order, because the load of a shared machine changes.
            order.reverse()
        return {name: side.spent for name, side in sides.items()}


def _start(stack: contextlib.ExitStack, name: str, postgres: PrivatePostgres) -> _Side:
    redis = stack.enter_context(PrivateRedis())
    deployment = stack.enter_context(
        make_deployment(
            postgres.new_database(),
            dict.fromkeys(PROCESSES, redis.port),
            DEPLOYMENTS[name],
        )
    )
    return _Side(deployment, _make_rooms(deployment))


def _make_rooms(deployment: SynapseDeployment) -> list[Room]:
    """Create rooms until each persister has as many as the other.

    The random id of a room determines its persister.

    :raises BenchError: if all rooms belong to one persister.
    """
    by_persister: dict[str, list[Room]] = {}
    for number in range(MOST_ROOMS):
        room = _make_room(deployment, number)
        connection = psycopg2.connect(**deployment.database)
        with contextlib.closing(connection), connection.cursor() as cursor:
            cursor.execute(
                "SELECT instance_name FROM events WHERE room_id = %s LIMIT 1",
                (room.room_id,),
            )
            ((persister,),) = cursor.fetchall()
        by_persister.setdefault(persister, []).append(room)
        shares = [rooms[: ROOMS // 2] for rooms in by_persister.values()]
        if [len(share) for share in shares] == [ROOMS // 2] * 2:
            return [room for share in shares for room in share]
    raise BenchError(f"all of {MOST_ROOMS} rooms belong to one persister")


def _make_room(deployment: SynapseDeployment, number: int) -> Room:
    alice = deployment.register(f"alice{number}")
    bob = deployment.register(f"bob{number}")
    room_id = alice.create_room(bob)
    bob.join(room_id)
    bob = bob.at(deployment.processes[READER].api)
    listeners = _Listeners(deployment)
    return Room(number, alice, bob, room_id, listeners, Expectations())
