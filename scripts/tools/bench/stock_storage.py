"""Measures of stock Synapse on PostgreSQL: ``stock_storage.py MEASURE PARAMETERS``.

See ``stock_host.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any
from unittest.mock import MagicMock

from psycopg2.extensions import parse_dsn
from side import Counting, main, run
from stock_host import CountingDataHandler, homeserver
from synapse.config.database import DatabaseConnectionConfig
from synapse.logging.context import (
    LoggingContext,
    make_deferred_yieldable,
    run_in_background,
)
from synapse.replication.tcp.streams import EventsStream
from synapse.storage.database import DatabasePool, make_conn
from synapse.storage.databases.main.events_worker import EventsWorkerStore
from synapse.storage.engines import create_engine
from synapse.storage.util.id_generators import MultiWriterIdGenerator
from tables import make_generator_tables
from traffic import READER, SERVER_NAME, STREAM, WRITER
from twisted.internet.defer import gatherResults


def _run(work: Callable[[Any], Coroutine[Any, Any, Any]]) -> dict[str, float]:
    """Run work in a log context, like a request.

    Outside a log context, Synapse logs each use of the database.
    """

    async def in_context(reactor: Any) -> Any:
        with LoggingContext(name="bench", server_name=SERVER_NAME):
            return await work(reactor)

    result: dict[str, float] = run(in_context)
    return result


class Storage:
    """A pool of connections, and an initial connection."""

    def __init__(self, reactor: Any, dsn: str, instance_name: str) -> None:
        arguments = {**parse_dsn(dsn), "cp_min": 5, "cp_max": 10}
        options = {"name": "psycopg2", "args": arguments}
        self.hs = homeserver(reactor, instance_name, CountingDataHandler(Counting(0)))
        config = DatabaseConnectionConfig("master", options)
        engine = create_engine(options)
        self.pool = DatabasePool(self.hs, config, engine)
        self.connection = make_conn(
            db_config=config,
            engine=engine,
            default_txn_name="bench",
            server_name=SERVER_NAME,
        )

    def id_generator(self, instance_name: str) -> Any:
        """Create the id generator of a process."""
        return MultiWriterIdGenerator(
            db_conn=self.connection,
            db=self.pool,
            notifier=MagicMock(),
            stream_name=STREAM,
            server_name=SERVER_NAME,
            instance_name=instance_name,
            tables=[("events", "instance_name", "stream_ordering")],
            sequence_name="events_stream_seq",
            writers=[WRITER],
        )


def get_next(dsn: str, blocks: int, callers: int) -> dict[str, float]:
    """Allocate and finish ids with concurrent callers, and persist positions."""
    make_generator_tables(dsn)

    async def allocate(reactor: Any) -> dict[str, float]:
        generator = Storage(reactor, dsn, WRITER).id_generator(WRITER)

        async def call(count: int) -> None:
            for _ in range(count):
                async with generator.get_next():
                    pass

        started = time.perf_counter()
        await make_deferred_yieldable(
            gatherResults(
                [run_in_background(call, blocks // callers) for _ in range(callers)]
            )
        )
        return {"seconds": time.perf_counter() - started}

    return _run(allocate)


def catch_up(dsn: str, rows: int) -> dict[str, float]:
    """Fetch all rows of a writer, and decode them into typed rows."""

    async def fetch(reactor: Any) -> dict[str, float]:
        storage = Storage(reactor, dsn, READER)
        store = MagicMock()
        store.db_pool = storage.pool
        for name in (
            "get_all_new_forward_event_rows",
            "get_ex_outlier_stream_rows",
            "get_all_updated_current_state_deltas",
        ):
            setattr(store, name, partial(getattr(EventsWorkerStore, name), store))
        storage.hs.get_datastores.return_value.main = store
        stream = EventsStream(storage.hs)
        token = count = 0
        started = time.perf_counter()
        while token < rows:
            updates, token, _ = await stream.get_updates_since(WRITER, token, rows)
            count += len([stream.parse_row(row) for _, row in updates])
        assert count == rows
        return {"seconds": time.perf_counter() - started}

    return _run(fetch)


def start_up(dsn: str, rows: int) -> dict[str, float]:
    """Connect, and create the id generator of a process on filled tables."""

    async def start(reactor: Any) -> dict[str, float]:
        started = time.perf_counter()
        generator = Storage(reactor, dsn, WRITER).id_generator(WRITER)
        seconds = time.perf_counter() - started
        assert generator.get_current_token() == rows
        return {"milliseconds": 1000 * seconds}

    return _run(start)


MEASURES: dict[str, Any] = {
    "get_next": get_next,
    "catch_up": catch_up,
    "start_up": start_up,
}


if __name__ == "__main__":
    main(MEASURES)
