"""Tests for :mod:`synapse_replication.pipeline.source.source`, on PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from types import SimpleNamespace

import attrs
import psycopg2
from pyspark.sql import DataFrame
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.schemas import ROWS_SCHEMA, standard_tables
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source import completeness
from synapse_replication.pipeline.source.options import SourceOptions
from synapse_replication.pipeline.source.source import RowsStreamReader, latest_token
from synapse_replication.testing.servers import shared_postgres
from tests.pipeline.shared_session import shared_session

SCHEMA = """
CREATE TABLE receipts_linearized (
    stream_id bigint NOT NULL, room_id text NOT NULL, receipt_type text NOT NULL,
    user_id text NOT NULL, event_id text NOT NULL, data text NOT NULL,
    instance_name text, thread_id text);
CREATE INDEX receipts_linearized_id ON receipts_linearized (stream_id);
CREATE SEQUENCE receipts_sequence;
CREATE TABLE cache_invalidation_stream_by_instance (
    stream_id bigint NOT NULL UNIQUE, instance_name text NOT NULL,
    cache_func text NOT NULL, keys text[], invalidation_ts bigint);
CREATE SEQUENCE cache_invalidation_stream_seq;
CREATE TABLE stream_positions (
    stream_name text NOT NULL, instance_name text NOT NULL, stream_id bigint NOT NULL,
    UNIQUE (stream_name, instance_name));
SELECT setval('receipts_sequence', 1000);
"""


class Database:
    """A database with receipts and caches, and the operations of their writers."""

    def __init__(self) -> None:
        self.dsn = shared_postgres().new_database()
        self.sql(SCHEMA)

    def sql(self, *statements: str) -> None:
        """Run statements in one transaction."""
        with (
            closing(psycopg2.connect(self.dsn)) as connection,
            connection,
            connection.cursor() as cursor,
        ):
            for statement in statements:
                cursor.execute(statement)

    def insert(self, writer: str | None, first: int, last: int) -> None:
        """Insert receipts without advancing the writer's position."""
        name = "NULL" if writer is None else f"'{writer}'"
        self.sql(
            "INSERT INTO receipts_linearized SELECT id, '!r', 'm.read', '@u:x', "
            f"'$e', '{{}}', {name}, NULL FROM generate_series({first}, {last}) id",
        )

    def write(self, writer: str, first: int, last: int) -> None:
        """Insert receipts, then advance the writer's position."""
        self.insert(writer, first, last)
        self.store(writer, last)

    def store(self, writer: str, position: int) -> None:
        """Store the position of a writer."""
        self.sql(
            f"INSERT INTO stream_positions VALUES ('receipts', '{writer}', {position}) "
            "ON CONFLICT (stream_name, instance_name) "
            "DO UPDATE SET stream_id = EXCLUDED.stream_id"
        )


class Follower:
    """Calls the stream reader like Spark, but without Spark."""

    def __init__(
        self,
        database: Database,
        declared: Mapping[str, Sequence[str]] | None = None,
        **options: str,
    ) -> None:
        given = {"dsn": database.dsn, "streams": "receipts", **options}
        self.options = attrs.evolve(
            SourceOptions.parse(given), declared_writers=declared or {}
        )
        self.reader = RowsStreamReader(self.options)
        self.offset = self.reader.initialOffset()

    def restart(self) -> None:
        """Continue with a new reader, from the checkpoint."""
        self.reader = RowsStreamReader(self.options)
        self.offset = json.loads(json.dumps(self.offset))

    def read(self, limit: ReadLimit | None = None) -> list[tuple[str, int]]:
        """Read one batch; return ``(writer, id)`` of each row, sorted."""
        limit = limit or self.reader.getDefaultReadLimit()
        end = self.reader.latestOffset(self.offset, limit)
        if json.dumps(end) == json.dumps(self.offset):
            return []
        rows = [
            (row["instance_name"], row["stream_id"])
            for partition in self.reader.partitions(self.offset, end)
            for batch in self.reader.read(partition)
            for row in batch.to_pylist()
        ]
        self.offset = end
        return sorted(rows)


def of(writer: str, *tokens: int) -> list[tuple[str, int]]:
    """Return ``(writer, token)`` for each token."""
    return [(writer, token) for token in tokens]


class OffsetTests(SynchronousTestCase):
    """Tests for the rows that a reader returns or waits for."""

    def setUp(self) -> None:
        self.database = Database()

    def test_row_committed_late(self) -> None:
        """
        A row is read even if it is committed after another writer's position is beyond
        it.
        """
        self.database.write("slow", 1, 1)
        self.database.write("quick", 2, 4)
        follower = Follower(self.database)
        self.assertEqual(follower.read(), of("quick", 2, 3, 4) + of("slow", 1))
        # The writer slow allocated id 5 before the others wrote.
        self.database.write("quick", 6, 7)
        self.assertEqual(follower.read(), of("quick", 6, 7))
        follower.restart()
        self.database.write("slow", 5, 5)
        self.assertEqual(follower.read(), of("slow", 5))
        self.assertEqual(follower.read(), [])

    def test_row_above_its_writers_position(self) -> None:
        """A committed row beyond its writer's position is not read yet."""
        self.database.write("a", 1, 1)
        self.database.insert("a", 3, 3)
        follower = Follower(self.database)
        self.assertEqual(follower.read(), of("a", 1))
        self.database.write("a", 2, 2)
        self.database.store("a", 3)
        self.assertEqual(follower.read(), of("a", 2, 3))

    def test_declared_writer_without_position(self) -> None:
        """The reader waits for a declared writer that has no position yet."""
        self.database.write("a", 2, 9)
        follower = Follower(self.database, {"receipts": ["a", "new"]})
        self.assertEqual(len(follower.read()), 8)
        follower.restart()
        self.database.write("new", 1, 1)
        self.assertEqual(follower.read(), of("new", 1))

    def test_row_of_a_declared_writer_without_position(self) -> None:
        """
        A row without a writer is not skipped if it may be of a declared writer that has
        no position yet.
        """
        self.database.write("a", 2, 3)
        follower = Follower(self.database, {"receipts": ["a", "new"]})
        self.assertEqual(follower.read(), of("a", 2, 3))
        # Its writer allocated the id before those above.
        self.database.insert(None, 1, 1)
        self.database.store("new", 3)
        self.assertEqual(follower.read(), of("", 1))

    def test_unknown_writer(self) -> None:
        """
        Rows of removed writers, and rows without a writer, are read once all positions
        are beyond them.
        """
        self.database.insert("removed", 1, 2)
        self.database.insert(None, 3, 3)
        self.database.write("a", 4, 5)
        follower = Follower(self.database)
        # A row without a writer belongs to the only writer.
        self.assertEqual(follower.read(), of("a", 3, 4, 5) + of("removed", 1, 2))

    def test_row_without_writer(self) -> None:
        """
        A row without a writer is read once the positions of all writers are beyond it.
        """
        self.database.write("slow", 1, 1)
        self.database.write("quick", 2, 4)
        self.database.insert(None, 5, 5)
        self.database.write("quick", 6, 6)
        follower = Follower(self.database)
        self.assertEqual(follower.read(), of("quick", 2, 3, 4, 6) + of("slow", 1))
        # The row may be from slow, whose position is not beyond it yet.
        self.database.insert(None, 3, 3)
        self.database.write("slow", 7, 7)
        self.assertEqual(follower.read(), of("", 3, 5) + of("slow", 7))

    def test_writer_is_removed(self) -> None:
        """
        Rows of a removed writer are read once the positions of the other writers are
        beyond them.
        """
        self.database.write("a", 1, 1)
        self.database.write("b", 2, 2)
        follower = Follower(self.database)
        self.assertEqual(len(follower.read()), 2)
        self.database.write("b", 3, 3)
        self.database.sql("DELETE FROM stream_positions WHERE instance_name = 'b'")
        self.assertEqual(follower.read(), [])
        self.database.write("a", 4, 4)
        self.assertEqual(follower.read(), of("a", 4) + of("b", 3))

    def test_positions_decrease(self) -> None:
        """If positions decrease, no row is read again."""
        self.database.write("a", 1, 3)
        follower = Follower(self.database)
        self.assertEqual(len(follower.read()), 3)
        self.database.store("a", 1)
        self.assertEqual(follower.read(), [])

    def test_without_positions(self) -> None:
        """
        A continuous read of rows without stored positions fails; one of an empty stream
        does not.
        """
        follower = Follower(self.database)
        self.assertEqual(follower.read(), [])
        self.database.insert("a", 1, 3)
        error = self.assertRaises(PipelineError, follower.read)
        self.assertIn("synapse-replication pipeline bootstrap", str(error))

    def test_limit(self) -> None:
        """A batch has at most the requested number of rows, and no row is lost."""
        self.database.write("a", 1, 4)
        self.database.write("b", 5, 9)
        follower = Follower(self.database, maxRowsPerTrigger="4")
        sizes = [len(follower.read()) for _ in range(4)]
        self.assertEqual(sizes, [4, 4, 1, 0])

    def test_token_of_many_rows(self) -> None:
        """A token with more rows than the limit is read completely."""
        for _ in range(5):
            self.database.insert("a", 1, 1)
        self.database.write("a", 2, 2)
        follower = Follower(self.database, maxRowsPerTrigger="2")
        self.assertEqual(follower.read(), of("a", *[1] * 5))
        self.assertEqual(follower.read(), of("a", 2))

    def test_available_now(self) -> None:
        """
        A run with availableNow does not read rows that are added during the run; the
        next run does.
        """
        self.database.write("a", 1, 3)
        follower = Follower(self.database)
        follower.reader.prepareForTriggerAvailableNow()
        self.database.write("a", 4, 5)
        self.assertEqual(follower.read(ReadMaxRows(2)), of("a", 1, 2))
        self.assertEqual(follower.read(ReadMaxRows(2)), of("a", 3))
        self.assertEqual(follower.read(ReadMaxRows(2)), [])
        newest = follower.reader.reportLatestOffset()
        assert newest is not None
        self.assertEqual(newest["receipts"]["minimum"], 5)

    def test_starting_and_ending_token(self) -> None:
        """A query reads the rows after its starting token, up to its ending token."""
        self.database.write("a", 1, 9)
        follower = Follower(self.database, startingToken="2", endingToken="5")
        self.assertEqual(follower.read(), of("a", 3, 4, 5))
        self.assertEqual(follower.read(), [])
        latest = Follower(self.database, startingToken="latest")
        self.database.write("a", 10, 10)
        self.assertEqual(latest.read(), of("a", 10))

    def test_backfill_then_follow(self) -> None:
        """A backfill to the latest token and a query from there read each row once."""
        self.database.write("slow", 1, 1)
        self.database.write("quick", 2, 5)
        self.database.insert("quick", 7, 7)
        settings = PipelineSettings.of_dsn(self.database.dsn)
        token = latest_token(settings, streams="receipts")
        backfill = Follower(self.database, endingToken=token)
        self.assertEqual(backfill.read(), of("quick", 2, 3, 4, 5) + of("slow", 1))
        self.database.store("quick", 7)
        self.database.write("slow", 6, 6)
        follower = Follower(self.database, startingToken=token)
        self.assertEqual(follower.read(), of("quick", 7) + of("slow", 6))

    def test_checkpoint_of_the_future(self) -> None:
        """A checkpoint that is ahead of the database is rejected."""
        self.database.write("a", 1, 9)
        follower = Follower(self.database)
        follower.offset = {"receipts": {"minimum": 5000, "writers": {}}}
        error = self.assertRaises(PipelineError, follower.read)
        for part in ("receipts", "5000", "1000", "restored from an older backup"):
            self.assertIn(part, str(error))

    def test_more_streams_later(self) -> None:
        """A stream that is added to a query is read from its beginning."""
        self.database.write("a", 1, 1)
        follower = Follower(self.database)
        follower.read()
        follower.options = attrs.evolve(
            follower.options, streams=("caches", "receipts")
        )
        follower.restart()
        self.database.sql(
            "INSERT INTO cache_invalidation_stream_by_instance VALUES "
            "(nextval('cache_invalidation_stream_seq'), 'b', 'f', NULL, NULL)"
        )
        self.assertEqual(follower.read(), of("b", 1))

    def test_initial_is_explicit(self) -> None:
        """The initial offset names each stream, so that offsets can be compared."""
        follower = Follower(self.database)
        self.assertEqual(follower.offset, {"receipts": {"minimum": 0, "writers": {}}})


_INVALIDATE = """
    INSERT INTO cache_invalidation_stream_by_instance VALUES
    (nextval('cache_invalidation_stream_seq'), '{}', 'f', NULL, NULL)
"""


class UndeclaredWritersTests(SynchronousTestCase):
    """Tests for ``caches``, which has no stored positions."""

    def setUp(self) -> None:
        self.database = Database()
        self.open = psycopg2.connect(self.database.dsn)
        self.addCleanup(self.open.close)

    def follow(self, sleep: Callable[[float], None]) -> Follower:
        """Follow ``caches``; call this function instead of sleeping."""
        now = iter(range(1000))
        time = SimpleNamespace(monotonic=lambda: next(now), sleep=sleep)
        self.patch(completeness, "time", time)
        return Follower(self.database, streams="caches")

    def test_waits_for_open_transaction(self) -> None:
        """The id of an open transaction is not skipped."""
        with self.open.cursor() as txn:
            txn.execute(_INVALIDATE.format("slow"))
        self.database.sql(_INVALIDATE.format("quick"))

        def commit(_: float) -> None:
            # A newer transaction allocates a greater id, and does not block the reader.
            self.open.commit()
            with self.open.cursor() as txn:
                txn.execute(_INVALIDATE.format("newer"))

        follower = self.follow(commit)
        self.assertEqual(follower.read(), of("quick", 2) + of("slow", 1))
        follower = self.follow(lambda _: self.open.commit())
        self.assertEqual(follower.read()[0], ("newer", 3))

    def test_transaction_that_does_not_end(self) -> None:
        """
        If a transaction blocks the stream for too long, the reader fails with an error.
        """
        with self.open.cursor() as txn:
            txn.execute(_INVALIDATE.format("slow"))
        follower = self.follow(lambda _: None)
        error = self.assertRaises(PipelineError, follower.read)
        self.assertIn("sequence cache_invalidation_stream_seq", str(error))

    def test_rolled_back_transaction(self) -> None:
        """The id of a transaction that was rolled back does not block the reader."""
        with self.open.cursor() as txn:
            txn.execute(_INVALIDATE.format("slow"))
        self.open.rollback()
        self.database.sql(_INVALIDATE.format("quick"))
        self.assertEqual(self.follow(lambda _: None).read(), of("quick", 2))


class SparkTests(SynchronousTestCase):
    """Tests for streaming queries in Spark."""

    def run_once(self, database: Database, **options: str) -> list[int]:
        """Read all available rows; return the number of rows of each batch."""
        sizes: list[int] = []

        def record(batch: DataFrame, batch_id: int) -> None:
            sizes.append(batch.count())
            self.columns = batch.columns

        given = {"dsn": database.dsn, "streams": "receipts", **options}
        source = shared_session().readStream.format("synapse_replication")
        query = (
            source.options(**given)
            .load()
            .writeStream.option("checkpointLocation", f"{self.checkpoint}")
            .trigger(availableNow=True)
            .foreachBatch(record)
            .start()
        )
        query.awaitTermination()
        return sizes

    def test_runs(self) -> None:
        """
        Each run reads the rows added since the previous run, in batches of at most the
        limit, with typed columns on request.
        """
        self.checkpoint = self.mktemp()
        database = Database()
        database.write("a", 1, 10)
        database.write("b", 11, 25)
        sizes = self.run_once(database, maxRowsPerTrigger="10")
        self.assertEqual(sizes, [10, 10, 5])
        self.assertEqual(self.columns, ROWS_SCHEMA.names)
        database.write("a", 26, 26)
        self.assertEqual(sum(self.run_once(database, rows="typed")), 1)
        self.assertEqual(self.columns, standard_tables()["receipts"].arrow_schema.names)
        self.assertEqual(sum(self.run_once(database)), 0)
