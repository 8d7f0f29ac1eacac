"""Tests for :mod:`synapse_replication.pipeline.source.catalog`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.source.catalog import (
    catalog_of,
    declared_from_json,
    declared_to_json,
    select_streams,
)
from synapse_replication.storage.synapse_tables import STANDARD_QUERIES
from synapse_replication.streams.table import TableStream

ORDERS = TableStream(
    name="orders",
    table="orders",
    id_column="id",
    writer_column="writer",
    columns=["item"],
    sequence="orders_seq",
    positions_name="orders_stream",
    writers=["a"],
    negative=True,
)


class CatalogTests(SynchronousTestCase):
    """What streams there are to read."""

    def test_standard_and_declared(self) -> None:
        """All streams with tables are there, and those of the user's own."""
        catalog = catalog_of([ORDERS])
        self.assertEqual(set(catalog), {*STANDARD_QUERIES, "orders"})
        self.assertIsNone(catalog["caches"].positions_name)
        self.assertTrue(catalog["backfill"].negative)
        orders = catalog["orders"]
        self.assertEqual(orders.sequence, "orders_seq")
        self.assertTrue(orders.negative)
        self.assertEqual(orders.positions_name, "orders_stream")
        self.assertEqual([q.range.table for q in orders.queries], ["orders"])

    def test_several_rows_for_one(self) -> None:
        """Each query is told apart that finds several rows for one of the stream."""
        catalog = catalog_of()
        self.assertEqual([q.distinct for q in catalog["pushers"].queries], [False] * 2)
        self.assertEqual([q.distinct for q in catalog["to_device"].queries], [True] * 2)
        for name, queries in STANDARD_QUERIES.items():
            self.assertEqual(
                [q.distinct for q in catalog[name].queries],
                [q.distinct for q in queries],
                name,
            )

    def test_for_a_process_without_the_configuration(self) -> None:
        """Declared streams that were written down are read as they were."""
        read = declared_from_json(declared_to_json([ORDERS]))
        self.assertEqual(read, [catalog_of([ORDERS])["orders"]])
        self.assertEqual(catalog_of(read), catalog_of([ORDERS]))


class SelectTests(SynchronousTestCase):
    """Streams that are asked for by name."""

    def test_order(self) -> None:
        """They come in the order in which they were asked for, each once."""
        found = select_streams(catalog_of(), ["receipts", "events", "receipts"])
        self.assertEqual([stream.name for stream in found], ["receipts", "events"])

    def test_never_in_a_table(self) -> None:
        """A stream that is held in memory has another way, which is told."""
        error = self.assertRaises(
            PipelineError, select_streams, catalog_of(), ["typing"]
        )
        self.assertIn("record the wire", str(error))

    def test_unknown(self) -> None:
        """A name that is none is named, with those that are."""
        error = self.assertRaises(
            PipelineError, select_streams, catalog_of(), ["event"]
        )
        self.assertIn("no stream event;", str(error))
        self.assertIn("account_data, backfill,", str(error))
