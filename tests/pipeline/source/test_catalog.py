"""Tests for :mod:`synapse_replication.pipeline.source.catalog`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.catalog import catalog_of, select_streams
from synapse_replication.pipeline.source.options import SourceOptions, reader_options
from synapse_replication.storage.row_queries import STANDARD_QUERIES
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
    """Tests for the catalog of readable streams."""

    def test_standard_and_declared(self) -> None:
        """
        The catalog contains all standard streams with tables, and the declared streams.
        """
        catalog = catalog_of([ORDERS])
        self.assertEqual(set(catalog), {*STANDARD_QUERIES, "orders"})
        self.assertIsNone(catalog["caches"].positions_name)
        self.assertTrue(catalog["backfill"].negative)
        orders = catalog["orders"]
        self.assertEqual(orders.sequence, "orders_seq")
        self.assertTrue(orders.negative)
        self.assertEqual(orders.positions_name, "orders_stream")
        self.assertEqual([q.ids.table for q in orders.queries], ["orders"])

    def test_several_rows_for_one(self) -> None:
        """
        A query that may return several rows for one row of the stream is marked as
        distinct.
        """
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
        """Declared streams are read back unchanged from the options of a reader."""
        settings = PipelineSettings(
            {"dbname": "synapse"}, {"orders": ("a",)}, (ORDERS,)
        )
        options = SourceOptions.parse(reader_options(settings))
        self.assertEqual(options.catalog, catalog_of([ORDERS]))
        self.assertEqual(options.declared_writers, {"orders": ("a",)})


class SelectTests(SynchronousTestCase):
    """Tests for selecting streams by name."""

    def test_order(self) -> None:
        """Streams are returned in the requested order, each once."""
        found = select_streams(catalog_of(), ["receipts", "events", "receipts"])
        self.assertEqual([stream.name for stream in found], ["receipts", "events"])

    def test_never_in_a_table(self) -> None:
        """For a stream held in memory, the error suggests recording the wire."""
        error = self.assertRaises(
            PipelineError, select_streams, catalog_of(), ["typing"]
        )
        self.assertIn("synapse-replication record", str(error))

    def test_unknown(self) -> None:
        """For an unknown name, the error lists the known streams."""
        error = self.assertRaises(
            PipelineError, select_streams, catalog_of(), ["event"]
        )
        self.assertIn("stream event is unknown;", str(error))
        self.assertIn("account_data, backfill,", str(error))
