"""Tests for :mod:`synapse_replication.pipeline.source.completeness`, on PostgreSQL.

The effects on a reader are tested in ``test_streaming``.
"""

from __future__ import annotations

from typing import Any

import attrs
import psycopg2
from psycopg2.extensions import cursor
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.source.catalog import catalog_of
from synapse_replication.pipeline.source.completeness import (
    CompletenessReader,
    find_available_queries,
    find_writers,
    last_allocated_id,
    stored_tokens,
)
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.source.planning import cut_by_rows
from synapse_replication.pipeline.source.ranges import (
    AvailableQuery,
    Selection,
    range_sql,
)
from synapse_replication.streams.table import TableStream
from synapse_replication.testing.servers import shared_postgres

_SCHEMA = """
CREATE TABLE orders (id bigint NOT NULL, writer text, item text, at bigint);
CREATE SEQUENCE orders_seq;
CREATE TABLE stream_positions (
    stream_name text NOT NULL, instance_name text NOT NULL, stream_id bigint NOT NULL);
"""


class Racing(cursor):
    """A cursor that lets another session allocate an id after querying the locks."""

    other_session: cursor

    def execute(self, query: Any, values: Any = None) -> None:
        super().execute(query, values)
        if "pg_locks" in query:
            self.other_session.execute(
                "SELECT nextval('cache_invalidation_stream_seq')"
            )


class CompletenessReaderTests(SynchronousTestCase):
    """Tests with a custom stream that has negative ids."""

    def setUp(self) -> None:
        self.dsn = shared_postgres().new_database()
        connection = psycopg2.connect(self.dsn)
        self.addCleanup(connection.close)
        self.txn = connection.cursor()
        self.txn.execute(_SCHEMA)
        declared = TableStream(
            name="orders",
            table="orders",
            id_column="id",
            writer_column="writer",
            columns=["item"],
            sequence="orders_seq",
            writers=["a", "b"],
            negative=True,
        )
        self.stream = catalog_of([declared])["orders"]

    def survey(self, *, continuous: bool) -> StreamOffset:
        reader = CompletenessReader({"orders": ("a", "b")}, continuous)
        available = find_available_queries(self.txn, [self.stream])["orders"]
        selection = Selection(self.stream, available, "")
        return reader.survey(self.txn, selection, StreamOffset())

    def test_position_beyond_the_ids(self) -> None:
        """
        A stored position that is neither allocated nor used is limited, so that rows
        are read once it is corrected; one of a row beyond the sequence is not.
        """
        self.txn.execute(
            "SELECT setval('orders_seq', 5); INSERT INTO stream_positions VALUES "
            "('orders', 'a', -9223372036854775807), ('orders', 'b', -4)"
        )
        for rows, limit in ((0, 5), (3, 5), (8, 8)):
            self.txn.execute("INSERT INTO orders VALUES (%s, 'a')", (-rows,))
            found = self.survey(continuous=True)
            self.assertEqual(found, StreamOffset(4, {"a": limit, "b": 4}), rows)

    def test_available_indexes(self) -> None:
        """An index is found by its first column; a partial index does not count."""
        events = catalog_of()["events"]
        self.txn.execute("CREATE INDEX few ON orders (id) WHERE item IS NOT NULL")
        found = find_available_queries(self.txn, [self.stream, events])
        self.assertEqual(found["events"], ())
        (query,) = self.stream.queries
        self.assertEqual(found["orders"], (AvailableQuery(query, joinable=True),))
        self.txn.execute("CREATE INDEX by_writer ON orders (writer, id)")
        found = find_available_queries(self.txn, [self.stream])
        self.assertTrue(found["orders"][0].by_writer)
        self.txn.execute("CREATE INDEX ids ON orders (id)")
        found = find_available_queries(self.txn, [self.stream])
        self.assertTrue(found["orders"][0].by_id)
        self.assertFalse(found["orders"][0].by_writer)

    def test_indexes_of_other_columns(self) -> None:
        """
        An index by an expression is no index by writer, nor is one by the columns of
        another stream in the same table: each stream without a writer is read.
        """
        self.txn.execute(
            "INSERT INTO orders VALUES (-1, 'b', 'x', 5); "
            "CREATE INDEX by_writer ON orders (writer, id); "
            "CREATE INDEX by_item ON orders (lower(item), at)"
        )
        times = TableStream(
            name="times",
            table="orders",
            id_column="at",
            columns=["item"],
            sequence="orders_seq",
            writers=["a"],
        )
        streams = [self.stream, catalog_of([times])["times"]]
        found = find_available_queries(self.txn, streams)
        self.assertTrue(found["orders"][0].by_writer)
        self.assertFalse(found["times"][0].by_writer)
        selection = Selection(streams[1], found["times"], "a")
        part = selection.between(StreamOffset(), StreamOffset(9))
        self.txn.execute(range_sql(attrs.evolve(part, names=frozenset())))
        self.assertEqual(self.txn.fetchall(), [(5, "a", None)])

    def test_positions(self) -> None:
        """Positions are absolute values; the initial position 1 is returned as zero."""
        self.assertEqual(stored_tokens(self.txn, self.stream), {})
        self.txn.execute(
            "INSERT INTO stream_positions VALUES ('orders', 'a', -7), "
            "('orders', 'b', 1), ('receipts', 'c', 9)"
        )
        self.assertEqual(stored_tokens(self.txn, self.stream), {"a": 7, "b": 0})
        self.txn.execute("DROP TABLE stream_positions")
        self.assertEqual(stored_tokens(self.txn, self.stream), {})

    def test_sequence(self) -> None:
        """
        The last allocated id is 0 if the sequence has allocated none, and None if the
        sequence does not exist.
        """
        self.assertEqual(last_allocated_id(self.txn, self.stream), 0)
        self.txn.execute("SELECT nextval('orders_seq'), nextval('orders_seq')")
        self.assertEqual(last_allocated_id(self.txn, self.stream), 2)
        self.txn.execute("DROP SEQUENCE orders_seq")
        self.assertIsNone(last_allocated_id(self.txn, self.stream))

    def test_writers(self) -> None:
        """All writers are found through the index that begins with the writer."""
        self.txn.execute(
            "INSERT INTO orders VALUES (-1, 'b'), (-2, 'a'), (-3, 'b'), (-4, NULL)"
        )
        self.txn.execute("CREATE INDEX by_writer ON orders (writer, id)")
        available = find_available_queries(self.txn, [self.stream])["orders"]
        self.assertEqual(
            find_writers(self.txn, Selection(self.stream, available, "")), {"a", "b"}
        )

    def test_rows_without_a_writer(self) -> None:
        """
        Rows without a writer are read and counted if the only index begins with the
        writer, whose column may be null. Each condition uses the index.
        """
        self.txn.execute(
            "INSERT INTO orders VALUES (-1, 'b'), (-2, NULL), (-3, 'a'), (-4, NULL); "
            "CREATE INDEX by_writer ON orders (writer, id); "
            "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off"
        )
        for nullable in (True, False):
            available = find_available_queries(self.txn, [self.stream])["orders"]
            selection = Selection(self.stream, available, "a")
            end = StreamOffset(3, {"a": 3, "b": 3})
            part = selection.between(StreamOffset(), end)
            sql = range_sql(attrs.evolve(part, names=frozenset()))
            self.txn.execute(sql)
            found = [(token, writer) for token, writer, _ in self.txn.fetchall()]
            rows = [(1, "b"), (2, "a"), (3, "a")] if nullable else [(1, "b"), (3, "a")]
            self.assertEqual(found, rows)
            start = {"orders": StreamOffset()}
            cut = cut_by_rows(self.txn, [selection], start, {"orders": end}, 2)
            self.assertEqual(cut["orders"].furthest, 2 if nullable else 3)
            self.txn.execute("EXPLAIN " + sql)
            shown = "\n".join(line for (line,) in self.txn.fetchall())
            self.assertEqual(shown.count("Index Cond: "), 2 if nullable else 1)
            self.assertEqual(shown.count("writer IS NULL"), nullable)
            self.txn.execute(
                "DELETE FROM orders WHERE writer IS NULL; "
                "ALTER TABLE orders ALTER writer SET NOT NULL"
            )

    def test_limit_with_unknown_writers(self) -> None:
        """
        The limit of a batch counts rows of writers that the offset does not name, if
        the only index begins with the writer.
        """
        self.txn.execute(
            "INSERT INTO orders VALUES (-1, 'gone'), (-2, 'gone'), (-3, 'gone'), "
            "(-4, 'a'); CREATE INDEX by_writer ON orders (writer, id)"
        )
        available = find_available_queries(self.txn, [self.stream])["orders"]
        selection = Selection(self.stream, available, "")
        start, end = StreamOffset(), StreamOffset(4, {"a": 4})
        cut = cut_by_rows(self.txn, [selection], {"orders": start}, {"orders": end}, 2)
        self.assertEqual(cut["orders"].furthest, 2)

    def test_survey(self) -> None:
        """A continuous reader waits for a declared writer that has no position yet."""
        self.txn.execute(
            "SELECT setval('orders_seq', 7); "
            "INSERT INTO stream_positions VALUES ('orders', 'a', -7)"
        )
        self.assertEqual(self.survey(continuous=False).position("b"), 7)
        self.assertEqual(self.survey(continuous=True).position("b"), 0)
        self.assertEqual(self.survey(continuous=True).position("a"), 7)
        # A row without a writer may be of the one that is waited for.
        self.assertEqual(self.survey(continuous=True).minimum, 0)
        self.txn.execute("INSERT INTO stream_positions VALUES ('orders', 'c', -4)")
        found = self.survey(continuous=False)
        self.assertEqual(found, StreamOffset(4, {"a": 7, "c": 4}))

    def test_without_positions(self) -> None:
        """
        Rows without any stored position can be read by a batch query, but not
        continuously.
        """
        self.assertEqual(self.survey(continuous=True), StreamOffset(0))
        # Backfilled rows have the other sign.
        self.txn.execute("INSERT INTO orders VALUES (8, 'a')")
        self.assertEqual(self.survey(continuous=True), StreamOffset(0))
        self.txn.execute("INSERT INTO orders VALUES (-3, 'a'), (-5, 'a'), (-4, 'a')")
        self.assertEqual(self.survey(continuous=False), StreamOffset(5))
        with self.assertRaisesRegex(PipelineError, "rows up to 5, but nothing in"):
            self.survey(continuous=True)

    def test_id_taken_after_lock_query(self) -> None:
        """
        An id that is allocated after the query of the locks is not part of the offset.
        """
        caches = catalog_of()["caches"]
        self.txn.execute("CREATE SEQUENCE cache_invalidation_stream_seq")
        self.txn.execute("SELECT nextval('cache_invalidation_stream_seq')")
        self.txn.connection.commit()
        other = psycopg2.connect(self.dsn)
        self.addCleanup(other.close)
        racing = self.txn.connection.cursor(cursor_factory=Racing)
        racing.other_session = other.cursor()
        reader = CompletenessReader({}, continuous=True)
        available = find_available_queries(self.txn, [caches])["caches"]
        found = reader.survey(racing, Selection(caches, available, ""), StreamOffset())
        self.assertEqual(found, StreamOffset(1))
        self.assertEqual(last_allocated_id(self.txn, caches), 2)
