"""What simulated deployments are made of: processes, streams, and classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from synapse_replication.dropin.streams import HostStream
from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.handlers.receiving.receiver import StreamReceiver
from synapse_replication.handlers.sending.streamer import ReplicationStreamer
from synapse_replication.redis.subscriber import RedisSubscriber
from synapse_replication.storage.postgres_stream import PostgresStream
from synapse_replication.streams.positions import WriterPositions
from synapse_replication.streams.stream import StreamDescription
from synapse_replication.streams.table import TableStream
from synapse_replication.testing.simulation.invariants import SimulatedRow

__all__ = [
    "CACHES",
    "MEMORY_STREAM",
    "PROCESSES",
    "TABLES",
    "WRITERS",
    "Kept",
    "Parts",
    "describe",
]

#: Fetched from its writer's memory.
MEMORY_STREAM = "typing"
#: Anybody writes it; kept in a table, idempotent.
CACHES = "caches"

#: Every process, and whether it keeps what it was handed, with its positions.
PROCESSES: Mapping[str, bool] = {
    "main": False,
    "writer1": False,
    "writer2": False,
    "reader1": True,
    "reader2": True,
}


#: Those that may write a stream.
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


def describe(table: TableStream) -> StreamDescription:
    """Return the facts about a stream that is kept in a table."""
    if table.name != CACHES:
        return table.description
    return attrs.evolve(
        table.description,
        idempotent=True,
        resettable=True,
        announce_own_moves_only=True,
    )


@attrs.frozen
class Parts:
    """The classes that processes are made of; a subclass puts a bug in."""

    handler: type[ReplicationCommandHandler] = ReplicationCommandHandler
    streamer: type[ReplicationStreamer] = ReplicationStreamer
    receiver: type[StreamReceiver] = StreamReceiver
    subscriber: type[RedisSubscriber] = RedisSubscriber
    positions: type[WriterPositions] = WriterPositions
    stream: type[PostgresStream] = PostgresStream
    host_stream: type[HostStream] = HostStream


@attrs.frozen
class Kept:
    """What a process keeps over its crashes, by (stream, writer).

    :ivar positions: how far it got.
    :ivar epochs: of which lives of writers in memory that is.
    """

    positions: dict[tuple[str, str], int] = attrs.Factory(dict)
    epochs: dict[tuple[str, str], str] = attrs.Factory(dict)
