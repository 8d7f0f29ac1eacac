"""Tests for :mod:`synapse_replication.pipeline.source.ranges`."""

from __future__ import annotations

import attrs
import psycopg2
from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.source.catalog import catalog_of
from synapse_replication.pipeline.source.completeness import find_available_queries
from synapse_replication.pipeline.source.connections import read_transaction
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.source.options import SourceOptions
from synapse_replication.pipeline.source.ranges import (
    AvailableQuery,
    Part,
    Selection,
    ids_sql,
    range_sql,
)
from synapse_replication.storage.queries import literal
from synapse_replication.testing.servers import shared_postgres
from tests.pipeline.histories import ORDERS, history_dsn
from tests.support.big_database import SHARES

#: A stream with negative ids, whose table has an index of these.
STREAM = catalog_of([ORDERS])["orders"]
(QUERY,) = STREAM.queries
BY_ID = AvailableQuery(QUERY, by_id=True)
SELECTION = Selection(STREAM, (BY_ID,), "")

WRITERS = ("a", "b", "o'hara", None)

ids = st.integers(0, 9)
offsets = st.builds(
    StreamOffset, ids, st.dictionaries(st.sampled_from(["a", "b"]), ids, max_size=2)
)


class SqlTests(SynchronousTestCase):
    """Tests for the SQL text, with a declared stream that has negative ids."""

    def ids(self, part: Part) -> str:
        sql = ids_sql(part, part.queries[0], 1)
        return sql[sql.index(" WHERE ") + 7 :]

    def test_literal(self) -> None:
        """A literal is quoted, whatever characters it contains."""
        self.assertEqual(literal("o'hara"), "'o''hara'")
        part = SELECTION.between(StreamOffset(), StreamOffset(5, {"o'hara": 9}))
        self.assertIn(""" WHEN 'o''hara' THEN 9 """, self.ids(part))

    def test_bounds_of_negative_ids(self) -> None:
        """
        The low bound is exclusive and the high bound inclusive; the ids have the
        opposite sign. A part that all writers have finished has no other condition.
        """
        part = SELECTION.between(StreamOffset(3), StreamOffset(9, {"a": 9}))
        self.assertRegex(self.ids(part), r"""^\S+"id" < -3 AND \S+"id" >= -9 ORDER""")

    def test_only_advanced_writers(self) -> None:
        """The bounds do not include the ids of writers that are idle."""
        start, end = (StreamOffset(2, {"a": 2, "b": n}) for n in (7, 9))
        part = SELECTION.between(start, end)
        self.assertEqual((part.low, part.high), (7, 9))
        self.assertEqual(SELECTION.between(start, start).size, 0)

    def test_order(self) -> None:
        """
        Tokens are in ascending order, or in descending order if the last ones are
        requested.
        """
        part = SELECTION.between(StreamOffset(), StreamOffset(9))
        for last, order in ((False, "DESC"), (True, "ASC")):
            sql = ids_sql(part, BY_ID, 2, last=last)
            self.assertRegex(sql, rf'\."id" {order} LIMIT 2\)$')

    def test_writers_are_looked_up(self) -> None:
        """For an index by writer and id, the conditions name the writers."""
        by_writer = AvailableQuery(QUERY, by_writer=True)
        walked = attrs.evolve(SELECTION, queries=(by_writer,))
        part = walked.between(StreamOffset(), StreamOffset(9, {"a": 9, "b": 9}))
        self.assertIn("= ANY(ARRAY['a', 'b']::text[])", range_sql(part))
        for name in "ab":
            self.assertRegex(
                self.ids(part), rf""""writer" = '{name}' ORDER BY \S+ DESC"""
            )

    def test_without_writers(self) -> None:
        """A table without writers is not read if the minimum has not advanced."""
        stream = catalog_of()["account_data"]
        selection = Selection(stream, tuple(map(AvailableQuery, stream.queries)), "")
        idle = selection.between(StreamOffset(3), StreamOffset(3, {"a": 9}))
        moved = selection.between(StreamOffset(3), StreamOffset(4, {"a": 9}))
        for part, nothing in ((idle, True), (moved, False)):
            part = attrs.evolve(part, names=frozenset())
            self.assertEqual("FALSE" in range_sql(part), nothing)

    def test_some_columns(self) -> None:
        """Further tables are only joined for the columns that are read."""
        stream = catalog_of()["events"]
        selection = Selection(stream, tuple(map(AvailableQuery, stream.queries)), "")
        part = selection.between(StreamOffset(), StreamOffset(10**6))
        for names, joined in (
            (frozenset({"room_id"}), set()),
            (frozenset({"room_id", "redacts"}), {"redactions"}),
            (None, {"redactions", "state_events", "rejections"}),
        ):
            chosen = attrs.evolve(part, names=names)
            sql = range_sql(chosen)
            tables = {"redactions", "state_events", "rejections"}
            found = {table for table in tables if f"FROM {table} " in sql}
            self.assertEqual(found, joined)
            self.assertEqual(chosen.joins_details, bool(joined))
            self.assertEqual('"room_id"' in sql, True)
            self.assertEqual('"type"' in sql, names is None)

    def test_no_time(self) -> None:
        """If the table does not record the time of writing, the column is null."""
        sql = range_sql(SELECTION.between(StreamOffset(), StreamOffset(9)))
        self.assertIn("NULL::bigint AS written_us", sql)


class RowsTests(SynchronousTestCase):
    """Tests of the selected rows, with a table that has a row of each writer and id."""

    @settings(derandomize=True, deadline=None, max_examples=200)
    @given(offsets, offsets, ids, ids, st.none() | st.sets(st.sampled_from(["a", "x"])))
    def test_between(
        self,
        start: StreamOffset,
        more: StreamOffset,
        low: int,
        high: int,
        wanted: set[str] | None,
    ) -> None:
        """
        A part has exactly the rows that its end covers and its start does not, between
        its ids, of its writers. Rows without a writer belong to the sole writer.
        """
        end = start.advance(more)
        whole = attrs.evolve(SELECTION, sole_writer="x").between(start, end)
        part = attrs.evolve(
            whole,
            low=max(whole.low, low),
            high=min(whole.high, high),
            writers=None if wanted is None else frozenset(wanted),
            names=frozenset(),
        )
        self.txn.execute(range_sql(part))
        found = [(writer, token) for token, writer, _ in self.txn.fetchall()]
        expected = [
            (writer or "x", token)
            for writer in WRITERS
            for token in range(low + 1, high + 1)
            if start.position(writer or "") < token <= end.position(writer or "")
            and (wanted is None or (writer or "x") in wanted)
        ]
        self.assertEqual(sorted(found), sorted(expected))

    def setUp(self) -> None:
        connection = psycopg2.connect(shared_postgres().new_database())
        self.addCleanup(connection.close)
        self.txn = connection.cursor()
        self.txn.execute("CREATE TABLE orders (id bigint, writer text, item text)")
        self.txn.execute(
            "INSERT INTO orders SELECT -id, writer, '' "
            "FROM generate_series(1, 9) AS id, unnest(%s) AS writer",
            (list(WRITERS),),
        )


class IndexTests(SynchronousTestCase):
    """Tests that queries use indexes instead of scanning tables."""

    def test_no_full_scan(self) -> None:
        """Reading a range, or searching for a bound, does not scan a large table."""
        catalog = catalog_of()
        conninfo = SourceOptions.parse({"dsn": history_dsn()}).conninfo
        end = StreamOffset(0, {"writer1": 50})
        with read_transaction(conninfo) as txn:
            available = find_available_queries(txn, catalog.values())
            for name in SHARES.keys() - {"account_data"}:
                stream = catalog[name]
                selection = Selection(stream, available[name], "")
                part = selection.between(StreamOffset(), end)
                queries = [range_sql(part)]
                for query in part.queries:
                    for last in (False, True):
                        queries.append(ids_sql(part, query, 1, last=last))
                for sql in queries:
                    txn.execute("EXPLAIN " + sql)
                    shown = "\n".join(line for (line,) in txn.fetchall())
                    self.assertNotIn("Seq Scan", shown)
                    # A scan of a whole index would be just as slow.
                    self.assertNotRegex(
                        shown, r"Index (Only )?Scan[^\n]*\n(?!\s+Index Cond)"
                    )
                    self.assertRegex(
                        shown, r"Index Cond: .*\b(stream_id|\w*stream_ordering) >"
                    )
