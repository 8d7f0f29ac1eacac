"""Measures the cost of replication in a real homeserver: CPU time of five processes.

Both sides are the same deployment of a main process and four workers, started anew for
each round, and perform the same client operations one after another. The processor time
of each process, user and system, is measured from the end of a warm-up to the end of
the operations.
"""

from __future__ import annotations

import contextlib
import os
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
from synapse_replication.testing.servers import PrivatePostgres, PrivateRedis
from tests.support.client_api import ClientApi
from tests.support.synapse_peer import SynapseDeployment

__all__ = ["NAME", "make_plan", "measure_deployment", "processor_seconds"]

#: The name for ``--only``.
NAME = "deployment"

OPERATIONS, QUICK_OPERATIONS = 1500, 300
WARM_UP = 150
#: The number of rooms, half of them for each persister, and the maximum number of rooms
#: that are created to obtain them.
ROOMS, MOST_ROOMS = 4, 30
#: The number of operations between two ``/sync`` requests.
SYNC_EACH = 5
#: The time in s to wait after the last operation, until its rows are replicated.
SETTLE = 3.0


def make_plan(count: int) -> list[tuple[int, str]]:
    """Return a fixed sequence of operations, each with a room's number and a stream."""
    chance = random.Random(1)
    kinds = chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    return [(chance.randrange(ROOMS), kind) for kind in kinds]


def processor_seconds(stat: str) -> float:
    """Return the user and system time of a process, in s.

    :param stat: the content of its ``/proc/PID/stat``.
    """
    # The process's name, in parentheses, may contain spaces.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@attrs.frozen
class _Listeners:
    deployment: SynapseDeployment

    def api(self, name: str) -> ClientApi:
        return self.deployment.processes[name].api


def measure_deployment(
    rounds: int, quick: bool, say: Callable[[str], object]
) -> list[Result]:
    """Measure both sides alternately.

    The processes are started by the interpreter that
    :func:`tests.support.synapse_process.interpreter` names.

    :return: a result for each process, and one for their sum.
    """
    count = QUICK_OPERATIONS if quick else OPERATIONS
    found: dict[str, tuple[list[float], list[float]]] = {
        name: ([], []) for name in (*PROCESSES, "all")
    }
    for number in range(rounds):
        # Alternate the order, because the load of a shared machine changes.
        sides = ("stock", "ours") if number % 2 else ("ours", "stock")
        for side in sides:
            spent = _measure(side, make_plan(count))
            total = sum(spent.values())
            say(f"{NAME}: round {number + 1} of {rounds}, {side}: {total:.1f} s")
            for name, seconds in (*spent.items(), ("all", total)):
                found[name][side == "stock"].append(seconds)
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
            *values,
        )
        for name, values in found.items()
    ]


def _measure(side: str, plan: list[tuple[int, str]]) -> Mapping[str, float]:
    with PrivatePostgres() as postgres, PrivateRedis() as redis:
        deployment = make_deployment(
            postgres.new_database(),
            dict.fromkeys(PROCESSES, redis.port),
            DEPLOYMENTS[side],
        )
        with deployment:
            rooms = _make_rooms(deployment)
            _operate(rooms, plan[:WARM_UP])
            before = _spent(deployment)
            _operate(rooms, plan)
            time.sleep(SETTLE)
            after = _spent(deployment)
    return {name: after[name] - before[name] for name in PROCESSES}


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


def _operate(rooms: list[Room], plan: list[tuple[int, str]]) -> None:
    since: dict[int, str] = {}
    for number, (room, kind) in enumerate(plan):
        rooms[room].write(kind)
        if number % SYNC_EACH == 0:
            answer = rooms[room].bob.sync(since.get(room))
            since[room] = answer["next_batch"]


def _spent(deployment: SynapseDeployment) -> dict[str, float]:
    return {
        name: processor_seconds(Path(f"/proc/{process.pid}/stat").read_text("utf-8"))
        for name, process in deployment.processes.items()
    }
