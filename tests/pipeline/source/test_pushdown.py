"""Tests for the conditions that the data source applies."""

from __future__ import annotations

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.source.catalog import catalog_of
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.source.options import SourceOptions
from synapse_replication.pipeline.source.ranges import EVERYTHING, Selection, Wanted
from synapse_replication.pipeline.source.source import PushdownReader


class PushFiltersTests(SynchronousTestCase):
    """Tests for filters that the data source applies itself."""

    def take(self, *filters: Filter) -> Wanted:
        """Return the result of pushing filters; check that all are accepted."""
        reader = PushdownReader(SourceOptions.parse({"dsn": ""}))
        self.assertEqual(list(reader.pushFilters(list(filters))), [])
        return reader.wanted

    def test_streams_and_writers(self) -> None:
        """Filters on names are accepted; several filters are intersected."""
        wanted = self.take(
            IsNotNull(("stream",)),
            In(("stream",), ("events", "caches", None)),
            EqualTo(("stream",), "events"),
            In(("instance_name",), ("a", "b")),
            EqualNullSafe(("instance_name",), "b"),
        )
        self.assertEqual(wanted.streams, {"events"})
        self.assertEqual(wanted.writers, {"b"})

    def test_ids(self) -> None:
        """
        Filters on ids are converted to an exclusive lower and an inclusive upper bound.
        """
        wanted = self.take(
            GreaterThan(("stream_id",), 5),
            GreaterThanOrEqual(("stream_id",), 8),
            LessThan(("stream_id",), 50),
            LessThanOrEqual(("stream_id",), 60),
        )
        self.assertEqual((wanted.low, wanted.high), (7, 49))
        self.assertEqual(self.take(EqualTo(("stream_id",), 9)), Wanted(low=8, high=9))

    def test_left_to_spark(self) -> None:
        """Unsupported filters are returned unchanged for Spark to apply."""
        filters: list[Filter] = [
            EqualTo(("row_index",), 0),
            Not(EqualTo(("stream",), "events")),
            EqualTo(("stream",), 5),
            EqualTo(("row", "stream"), "events"),
            IsNotNull(("written_ts",)),
        ]
        reader = PushdownReader(SourceOptions.parse({"dsn": ""}))
        left = list(reader.pushFilters(filters))
        self.assertEqual(reader.wanted, EVERYTHING)
        self.assertEqual([id(each) for each in left], [id(each) for each in filters])

    def test_of_part(self) -> None:
        """A part is restricted to the required rows."""
        selection = Selection(catalog_of()["receipts"], (), "")
        part = selection.between(StreamOffset(), StreamOffset(100))
        self.assertEqual(EVERYTHING.of(part), part)
        self.assertLessEqual(Wanted(low=100).of(part).size, 0)
        self.assertLessEqual(Wanted(high=0).of(part).size, 0)
        cut = Wanted(low=5, high=7, writers=frozenset({"a"})).of(part)
        self.assertEqual((cut.low, cut.high, cut.writers), (5, 7, {"a"}))
