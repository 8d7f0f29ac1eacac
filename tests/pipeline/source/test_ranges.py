"""Tests for :mod:`synapse_replication.pipeline.source.ranges`."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.source.catalog import catalog_of
from synapse_replication.pipeline.source.completeness import find_present
from synapse_replication.pipeline.source.database import PLAN_TIMEOUT, reading
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

#: Of writers a and b, those of a.
SPAN = Span(3, 9, ("a",), False, False, ("a", "b"))


class SqlTests(SynchronousTestCase):
    """The text, for a stream of one's own that counts down."""

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
        """A name is quoted, whatever it holds."""
        self.assertEqual(literal("o'hara"), "'o''hara'")
        span = attrs.evolve(SPAN, writers=("o'hara",))
        self.assertIn("""."writer" IN ('o''hara'))""", self.ids(span))

    def test_bounds_of_negative_ids(self) -> None:
        """Above the low token and up to the high one; ids have the other sign."""
        sql = self.ids(SPAN)
        self.assertIn('."id" < -3 AND ', sql)
        self.assertIn('."id" >= -9 AND ', sql)

    def test_order(self) -> None:
        """Tokens come in order, the greatest first if the last are asked for."""
        for last, order in ((False, "DESC"), (True, "ASC")):
            sql = ids_sql(self.query, SPAN, self.present, limit=2, last=last)
            assert sql is not None
            self.assertRegex(sql, rf'\."id" {order} LIMIT 2$')

    def test_others(self) -> None:
        """Of all writers but some: these are left out, and rows without a writer."""
        others = attrs.evolve(SPAN, others=True)
        self.assertIn("NOT ", self.ids(others))
        self.assertIn("IN ('b')", self.ids(others))
        of_all = attrs.evolve(others, writers=("a", "b"))
        self.assertIn("IS NOT NULL", self.ids(of_all))
        nameless = attrs.evolve(of_all, nameless=True)
        self.assertNotIn("writer", self.ids(nameless))

    def test_writers_are_looked_up(self) -> None:
        """Where the index begins with the writer, each is named."""
        walked = Present(
            frozenset(["orders"]), frozenset(), frozenset(), frozenset(["orders"])
        )
        others = attrs.evolve(SPAN, others=True)
        self.assertIn("IN ('a')", self.ids(others, walked))
        self.assertNotIn("NOT", self.ids(others, walked))

    def test_nothing_can_be_there(self) -> None:
        """Of nobody there is nothing; the columns are the same all the same."""
        nobody = attrs.evolve(SPAN, writers=())
        self.assertIsNone(ids_sql(self.query, nobody, self.present))
        sql = range_sql(self.stream, nobody, self.present, "")
        self.assertIn("WHERE FALSE", sql)
        missing = Present(frozenset(), frozenset(), frozenset(), frozenset())
        self.assertEqual(range_sql(self.stream, SPAN, missing, ""), sql)

    def test_no_time(self) -> None:
        """Where the table does not tell when, there is no time."""
        sql = range_sql(self.stream, SPAN, self.present, "")
        self.assertIn("NULL::bigint AS written_us", sql)


class IndexTests(SynchronousTestCase):
    """Tests that indexes are walked, and no table is scanned."""

    def test_no_full_scan(self) -> None:
        """Reading a range, or looking for where to cut, scans no big table."""
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
                    # An index that is read from end to end is no better.
                    self.assertNotRegex(
                        shown, r"Index (Only )?Scan[^\n]*\n(?!\s+Index Cond)"
                    )
                    self.assertRegex(
                        shown, r"Index Cond: .*\b(stream_id|\w*stream_ordering) >"
                    )
