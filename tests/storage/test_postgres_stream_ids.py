"""
Tests for streams in PostgreSQL with the ids of standard streams or real generators.
"""

from __future__ import annotations

from typing import Any

import psycopg2
from twisted.internet import defer
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase

from synapse_replication.errors import StreamConfigurationError
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_generators import load_id_generator
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.postgres_stream import (
    PostgresStream,
)
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.testing.servers import shared_postgres
from tests.storage.postgres_stream_case import (
    ORDERS,
    SCHEMA,
    CountingIds,
    ImmediateDatabase,
)


class StandardStreamTests(SynchronousTestCase):
    """Tests for Synapse's own streams, which this process only reads."""

    def make(self, name: str) -> PostgresStream:
        connection = psycopg2.connect(shared_postgres().dsn())
        self.addCleanup(connection.close)
        return PostgresStream(
            STANDARD_STREAMS[name],
            ImmediateDatabase(connection),
            CountingIds(-1 if STANDARD_STREAMS[name].negative else 1),
            instance_name="w1",
        )

    def test_positions_of_a_server_that_never_backfilled(self) -> None:
        """Tokens of an unused ``backfill`` are positive on the wire."""
        stream = self.make("backfill")

        self.assertEqual(stream.minimal_local_current_token(), 1)
        self.assertEqual(stream.current_token("w2"), 1)

    def test_streams_in_memory_have_no_tables(self) -> None:
        """A stream held in memory is rejected with a hint to use MemoryStream."""
        error = self.assertRaises(StreamConfigurationError, self.make, "typing")

        self.assertIn("MemoryStream", str(error))

    def test_token_without_declared_writers(self) -> None:
        """Without configured writers, there is no token, and the error says so."""
        stream = self.make("push_rules")

        error = self.assertRaises(StreamConfigurationError, stream.current_stream_token)

        self.assertIn("push_rules has no combined token", str(error))

    def test_standard_rows_cannot_be_written(self) -> None:
        """
        Rows of standard streams cannot be written: not every column is on the wire.
        """
        row = STANDARD_STREAMS["push_rules"].description.codec.from_json(["@a:x"])
        result = defer.ensureDeferred(self.make("push_rules").write([row]))

        self.failureResultOf(result, StreamConfigurationError)


class CachesTests(SynchronousTestCase):
    """Tests for ``caches``, which every process may write."""

    def test_written(self) -> None:
        """The rows that a process writes are in the table, and are read again."""
        connection = psycopg2.connect(shared_postgres().new_database())
        self.addCleanup(connection.close)
        with connection, connection.cursor() as cursor:
            cursor.execute(
                "CREATE TABLE cache_invalidation_stream_by_instance (stream_id bigint, "
                "instance_name text, cache_func text, keys text[], "
                "invalidation_ts bigint)"
            )
        stream = PostgresStream(
            STANDARD_STREAMS["caches"],
            ImmediateDatabase(connection),
            CountingIds(),
            instance_name="w1",
            writers=(),
        )
        row_type = STANDARD_STREAMS["caches"].description.codec.row_type
        rows = [row_type("get_user", ["@a:x"], 5), row_type("get_room", None, 6)]

        token = self.successResultOf(defer.ensureDeferred(stream.write(rows)))

        with connection, connection.cursor() as cursor:
            cursor.execute("SELECT * FROM cache_invalidation_stream_by_instance")
            self.assertEqual(
                cursor.fetchall(),
                [
                    (token, "w1", "get_user", ["@a:x"], 5),
                    (token, "w1", "get_room", None, 6),
                ],
            )


class RealIdsTests(TestCase):
    """Tests for a declared stream with a real id generator, in threads."""

    async def make(self, dsn: str, instance_name: str) -> PostgresStream:
        database = Database(dsn, self.reactor, max_connections=4)
        self.addCleanup(database.close)
        ids = await load_id_generator(
            database,
            IdStream(
                stream_name=ORDERS.positions_name,
                sequence=ORDERS.sequence,
                tables=ORDERS.id_columns,
                writers=ORDERS.writers,
            ),
            instance_name,
            self.reactor,
            ReactorClock(self.reactor),
        )
        return PostgresStream(ORDERS, database, ids, instance_name=instance_name)

    @property
    def reactor(self) -> Any:
        from twisted.internet import reactor  # noqa: TID251

        return reactor

    def test_two_writers_at_once(self) -> Deferred[None]:
        """
        When two processes write simultaneously, each announcement covers its writer's
        rows, and each process fetches all rows of the other.
        """
        dsn = shared_postgres().new_database()
        connection = psycopg2.connect(dsn)
        with connection, connection.cursor() as cursor:
            cursor.execute(SCHEMA)
            cursor.execute("SELECT setval('orders_seq', 1)")
        connection.close()

        async def run() -> None:
            streams = [await self.make(dsn, name) for name in ORDERS.writers]
            written = await defer.gatherResults(
                [
                    defer.ensureDeferred(
                        streams[n % 2].write([ORDERS.row_type("item", n)] * (1 + n % 3))
                    )
                    for n in range(40)
                ]
            )
            self.assertEqual(sorted(written), list(range(2, 42)))
            for number, (name, stream) in enumerate(
                zip(ORDERS.writers, streams, strict=True)
            ):
                other = streams[1 - number]
                upto = stream.minimal_local_current_token()
                self.assertTrue(stream.has_local_updates(1, upto))
                page = await other.get_updates_since(name, 1, upto)
                self.assertEqual(
                    list(page.updates),
                    sorted(
                        (written[n], ["item", n])
                        for n in range(number, 40, 2)
                        for _ in range(1 + n % 3)
                    ),
                )
                other.advance(name, upto)
                self.assertGreaterEqual(other.current_token(name), upto)

        return defer.ensureDeferred(run())
