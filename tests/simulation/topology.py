"""The processes and streams of simulated deployments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import attrs

from synapse_replication.streams.memory import InMemory
from synapse_replication.streams.stream import StreamDescription
from synapse_replication.streams.table import TableStream
from tests.simulation.invariants import SimulatedRow

#: The name of a stream that is held in its writer's memory.
MEMORY_STREAM = "typing"
#: An idempotent stream in a table; a writer announces only its own rows' positions.
CACHES = "caches"

#: The processes by name, and whether each saves the rows that are delivered to it,
#: together with its positions. If the processes simulate those of a homeserver, none
#: does.
PROCESSES: Mapping[str, bool] = {
    "main": False,
    "writer1": False,
    "writer2": False,
    "reader1": True,
    "reader2": True,
}


@attrs.frozen
class Links:
    """The links of a cluster.

    :ivar has_redis: whether the processes are connected to Redis.
    :ivar peers: the processes to which each process connects directly, over TCP.
    :ivar page_rows: the number of rows of a page of a catch-up.
    """

    has_redis: bool
    peers: Mapping[str, Sequence[str]]
    page_rows: int

    @property
    def roles(self) -> list[str]:
        """The roles of connections, see ``Connection`` in ``network.py``."""
        roles = ["redis", "redis_out"] if self.has_redis else []
        return [*roles, "tcp"] if any(self.peers.values()) else roles


def choose_links(random: Random) -> Links:
    """Return the links of a cluster.

    Most clusters use only Redis. In a mesh, each pair of processes has a direct link,
    or two, since processes that read each other list each other.
    """
    kind = random.choices(
        ["Redis", "one link", "two links", "Redis and two links"], [5, 1, 2, 2]
    )[0]
    names = list(PROCESSES)
    peers: dict[str, list[str]] = {name: [] for name in names}
    if kind == "one link":
        peers = {name: names[:index] for index, name in enumerate(names)}
    elif kind != "Redis":
        peers = {name: [each for each in names if each != name] for name in names}
    page_rows = 3 if kind == "Redis" else random.choice([1, 2, 3, 10, 100])
    return Links("Redis" in kind, peers, page_rows)


#: The processes that may be configured as writers.
WRITERS = ("main", "writer1", "writer2")


def _table(name: str, *writers: str) -> TableStream:
    return TableStream(
        name=name,
        table=name,
        id_column="stream_id",
        writer_column="instance_name",
        columns={"row_id": int, "key": str},
        sequence=f"{name}_seq",
        writers=writers,
        row_type=SimulatedRow,
    )


TABLES: Sequence[TableStream] = (
    _table("events", "writer1", "writer2"),
    _table("receipts", "main", "writer1", "writer2"),
    _table(CACHES, "main", "writer1"),
)


#: The stream that is held in its writer's memory.
IN_MEMORY = InMemory(
    name=MEMORY_STREAM,
    row_type=SimulatedRow,
    writers=("main",),
    key=lambda row: row.key,
    max_rows=10,
)


def describe(table: TableStream) -> StreamDescription:
    """Return the description of a stream in a table."""
    if table.name != CACHES:
        return table.description
    return attrs.evolve(
        table.description,
        idempotent=True,
        resettable=True,
        announce_own_moves_only=True,
    )


@attrs.frozen
class SavedState:
    """The state that a process saves across crashes, by (stream, writer).

    :ivar positions: the saved positions.
    :ivar epochs: the epochs of the saved positions, for streams in memory.
    """

    positions: dict[tuple[str, str], int] = attrs.Factory(dict)
    epochs: dict[tuple[str, str], str] = attrs.Factory(dict)
