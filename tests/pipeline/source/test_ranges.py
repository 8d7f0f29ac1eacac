"""Tests for :mod:`synapse_replication.pipeline.source.ranges`."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.source.catalog import catalog_of
from synapse_replication.pipeline.source.completeness import find_present
from synapse_replication.pipeline.source.connections import PLAN_TIMEOUT, reading
from synapse_replication.pipeline.source.offsets import Span
from synapse_replication.pipeline.source.options import SourceOptions
from synapse_replication.pipeline.source.ranges import (
    Present,
    ids_sql,
    range_sql,
)
from synapse_replication.storage.queries import literal
from tests.pipeline.histories import ORDERS, history_dsn
from tests.support.big_database import SHARES

#: A span of writer a, where a and b are known.
SPAN = Span(3, 9, ("a",), False, False, ("a", "b"))


class SqlTests(SynchronousTestCase):
    """Tests for the SQL text, with a declared stream that has negative ids."""

    def setUp(self) -> None:
        self.stream = catalog_of([ORDERS])["orders"]
        (self.query,) = self.stream.queries
        every = frozenset(["orders"])
        self.present = Present(every, frozenset(), every, frozenset())

    def ids(self, span: Span, present: Present | None = None) -> str:
        sql = ids_sql(self.query, span, present or self.present)
        assert sql is not None
        return sql[sql.index(" WHERE ") + 7 :]

    def test_literal(self) -> None:
        """A literal is quoted, whatever characters it contains."""
        self.assertEqual(literal("o'hara"), "'o''hara'")
        span = attrs.evolve(SPAN, writers=("o'hara",))
        self.assertIn("""."writer" IN ('o''hara'))""", self.ids(span))

    def test_bounds_of_negative_ids(self) -> None:
        """
        The low bound is exclusive and the high bound inclusive; the ids have the
        opposite sign.
        """
        sql = self.ids(SPAN)
        self.assertIn('."id" < -3 AND ', sql)
        self.assertIn('."id" >= -9 AND ', sql)

    def test_order(self) -> None:
        """
        Tokens are in ascending order, or in descending order if the last ones are
        requested.
        """
        for last, order in ((False, "DESC"), (True, "ASC")):
            sql = ids_sql(self.query, SPAN, self.present, limit=2, last=last)
            assert sql is not None
            self.assertRegex(sql, rf'\."id" {order} LIMIT 2$')

    def test_other_writers(self) -> None:
        """
        A span of other writers excludes the known writers, and rows without a writer
        unless they are requested.
        """
        others = attrs.evolve(SPAN, others=True)
        self.assertIn("NOT ", self.ids(others))
        self.assertIn("IN ('b')", self.ids(others))
        of_all = attrs.evolve(others, writers=("a", "b"))
        self.assertIn("IS NOT NULL", self.ids(of_all))
        nameless = attrs.evolve(of_all, nameless=True)
        self.assertNotIn("writer", self.ids(nameless))

    def test_writers_are_looked_up(self) -> None:
        """For an index by writer and id, the condition lists the writers."""
        walked = Present(
            frozenset(["orders"]), frozenset(), frozenset(), frozenset(["orders"])
        )
        others = attrs.evolve(SPAN, others=True)
        self.assertIn("IN ('a')", self.ids(others, walked))
        self.assertNotIn("NOT", self.ids(others, walked))

    def test_empty_result(self) -> None:
        """
        The query for a span without writers, or for a missing table, returns no rows,
        with the same columns.
        """
        no_writers = attrs.evolve(SPAN, writers=())
        self.assertIsNone(ids_sql(self.query, no_writers, self.present))
        sql = range_sql(self.stream, no_writers, self.present, "")
        self.assertIn("WHERE FALSE", sql)
        missing = Present(frozenset(), frozenset(), frozenset(), frozenset())
        self.assertEqual(range_sql(self.stream, SPAN, missing, ""), sql)

    def test_no_time(self) -> None:
        """If the table does not record the time of writing, the column is null."""
        sql = range_sql(self.stream, SPAN, self.present, "")
        self.assertIn("NULL::bigint AS written_us", sql)


class IndexTests(SynchronousTestCase):
    """Tests that queries use indexes instead of scanning tables."""

    def test_no_full_scan(self) -> None:
        """Reading a range, or searching for a bound, does not scan a large table."""
        catalog = catalog_of()
        conninfo = SourceOptions.parse({"dsn": history_dsn()}).conninfo
        span = Span(0, 50, ("writer1",), False, False, ("writer1", "writer2"))
        with reading(conninfo, PLAN_TIMEOUT) as txn:
            present = find_present(txn, catalog.values())
            for name in SHARES.keys() - {"account_data"}:
                stream = catalog[name]
                queries = [range_sql(stream, span, present[name], "")]
                for query in stream.queries:
                    if query.range.table in present[name].tables:
                        for last in (False, True):
                            sql = ids_sql(
                                query, span, present[name], limit=1, last=last
                            )
                            assert sql is not None
                            queries.append(sql)
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
