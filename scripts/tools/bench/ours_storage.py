"""Measures of this package on PostgreSQL: ``ours_storage.py MEASURE PARAMETERS``."""

from __future__ import annotations

import time
from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from scripts.tools.bench.ours_host import CountingSink, Process
from scripts.tools.bench.side import Counting, main, run
from scripts.tools.bench.tables import make_generator_tables
from scripts.tools.bench.traffic import READER, STREAM, WRITER
from synapse_replication.app.reader_ids import ReaderIds
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_generators import (
    MultiWriterIdGenerator,
    load_id_generator,
)
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.postgres_stream import PostgresStream
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.testing.doubles import MemoryConnection
from synapse_replication.wire.rdata import read_lines


async def _load(
    database: Database, reactor: Any, instance_name: str
) -> MultiWriterIdGenerator:
    stream = IdStream(
        stream_name=STREAM,
        sequence="events_stream_seq",
        tables=(IdColumn("events", "stream_ordering", "instance_name"),),
        writers=(WRITER,),
    )
    return await load_id_generator(
        database, stream, instance_name, reactor, ReactorClock(reactor)
    )


def get_next(dsn: str, blocks: int, callers: int) -> dict[str, float]:
    """Allocate and finish ids with concurrent callers, and persist positions."""
    make_generator_tables(dsn)

    async def allocate(reactor: Any) -> dict[str, float]:
        # Use as many connections as the other side.
        database = Database(dsn, reactor, max_connections=10)
        generator = await _load(database, reactor, WRITER)

        async def call(count: int) -> None:
            for _ in range(count):
                async with generator.get_next():
                    pass

        started = time.perf_counter()
        await gatherResults(
            [Deferred.fromCoroutine(call(blocks // callers)) for _ in range(callers)]
        )
        seconds = time.perf_counter() - started
        await database.close()
        return {"seconds": seconds}

    result: dict[str, float] = run(allocate)
    return result


def catch_up(dsn: str, rows: int) -> dict[str, float]:
    """Catch up with a writer from 0: fetch its rows, decode them and deliver them."""

    async def fetch(reactor: Any) -> dict[str, float]:
        database = Database(dsn, reactor, max_connections=10)
        stream: Any = PostgresStream(
            STANDARD_STREAMS[STREAM],
            database,
            ReaderIds(STREAM, READER, {}, 0, None),
            instance_name=READER,
        )
        counting = Counting(rows)
        process = Process(reactor, READER, CountingSink(counting), sources=[stream])
        connection = MemoryConnection()
        process.handler.new_connection(connection)
        line = f"POSITION {STREAM} {WRITER} {rows} {rows}"
        started = time.monotonic()
        process.handler.received(connection, read_lines([line.encode()]))
        await counting.done
        await process.handler.wait_until_idle()
        await database.close()
        return {"seconds": counting.finished - started}

    result: dict[str, float] = run(fetch)
    return result


def start_up(dsn: str, rows: int) -> dict[str, float]:
    """Connect, and create the id generator of a process on filled tables."""

    async def start(reactor: Any) -> dict[str, float]:
        started = time.perf_counter()
        database = Database(dsn, reactor, max_connections=10)
        generator = await _load(database, reactor, WRITER)
        seconds = time.perf_counter() - started
        assert generator.get_current_token() == rows
        await database.close()
        return {"milliseconds": 1000 * seconds}

    result: dict[str, float] = run(start)
    return result


MEASURES: dict[str, Any] = {
    "get_next": get_next,
    "catch_up": catch_up,
    "start_up": start_up,
}


if __name__ == "__main__":
    main(MEASURES)
