"""Tests for :mod:`synapse_replication.pipeline.source.source`, in Spark.

The rows and partitions are tested without Spark in ``test_planning``.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.schemas import ROWS_SCHEMA
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.planning import scan_rows
from synapse_replication.pipeline.spark.session import spark_errors_shortened
from tests.pipeline.extracts import by_writer, extract_dsn, read, server
from tests.pipeline.scans import read_here
from tests.pipeline.shared_session import shared_session
from tests.storage.synapse_extract import ON_THE_WIRE


class SourceTests(SynchronousTestCase):
    """Tests for the data source through Spark's own API."""

    def test_rows_are_as_on_the_wire(self) -> None:
        """
        The rows of each stream are those that its writers sent, in the same order.
        """
        frame = read(extract_dsn())
        self.assertEqual(frame.schema, from_arrow_schema(ROWS_SCHEMA))
        found = by_writer(frame)
        for key, rows in ON_THE_WIRE.items():
            if key[0] != "account_data":
                self.assertEqual(found.get(key), rows, key)

    def test_typed_columns(self) -> None:
        """
        With ``rows=typed``, a row has the typed columns of the stream; with
        ``rows=none``, it has no content.
        """
        frame = read(extract_dsn(), streams="receipts", rows="typed")
        (row, *_) = frame.where("user_id = '@a:x'").collect()
        self.assertEqual((row.room_id, row.thread_id), ("!r", None))
        self.assertEqual(dict(frame.dtypes)["written_ts"], "timestamp")
        events = read(extract_dsn(), streams="events", rows="typed")
        kinds = {row.kind for row in events.select("kind").collect()}
        self.assertEqual(kinds, {"ev", "state"})
        keys = read(extract_dsn(), rows="none")
        self.assertEqual(keys.count(), read(extract_dsn()).count())
        self.assertNotIn("row", keys.columns)

    def test_conditions_are_pushed_down(self) -> None:
        """
        Spark applies only the filters that the data source does not. No plan contains
        the password.
        """
        frame = read(extract_dsn(), filterPushdown="true").where(
            "stream = 'events' AND instance_name IN ('p1', 'x') AND stream_id >= 5 "
            "AND stream_id < 8 AND row_index = 0"
        )
        self.assertEqual(sorted(row.stream_id for row in frame.collect()), [5, 6, 7])
        plan = frame._jdf.queryExecution().toString()
        (physical,) = plan.split("== Physical Plan ==")[1:]
        self.assertIn("row_index", physical.split("Filter")[1])
        self.assertNotIn("stream_id", physical.split("Filter")[1].split("\n")[0])
        self.assertNotIn(server().password, plan)
        self.assertNotIn(server().password, str(frame))

    def test_a_frame_serves_many_queries(self) -> None:
        """The filters of one query do not affect other queries of the same frame."""
        frame = read(extract_dsn())
        everything = frame.count()
        caches = frame.where("stream = 'caches'")
        events = frame.where("stream = 'events'")
        counts = caches.count(), events.count()
        self.assertEqual(frame.count(), everything)
        self.assertEqual(caches.union(events).count(), sum(counts))

    def test_scanned_rows(self) -> None:
        """A scan has the same rows in this process and in tasks."""
        settings = PipelineSettings.of_dsn(extract_dsn())
        columns = ("stream_id", "row", "room_id")
        scan = scan_rows(settings, *columns, numPartitions="3")
        here = pa.Table.from_batches(read_here(scan), scan.schema).to_pylist()
        there = scan.frame(shared_session()).collect()
        rows = read(extract_dsn()).select("stream", "stream_id", "row").collect()
        keys = sorted(tuple(row.values()) for row in here if row.pop("room_id") or True)
        self.assertEqual(keys, sorted(map(tuple, rows)))
        self.assertEqual(sorted(tuple(row)[:3] for row in there), keys)
        self.assertIn("!r", {row["room_id"] for row in there})

    def test_nothing_to_read(self) -> None:
        """A query that matches no stream returns no rows."""
        self.assertEqual(read(extract_dsn()).where("stream = 'none'").collect(), [])

    def test_failure_is_short(self) -> None:
        """
        An error of the data source is shortened to one sentence, without the password.
        """

        def fail() -> None:
            with spark_errors_shortened():
                read("host=127.0.0.1 port=1 dbname=x password=hush").collect()

        error = self.assertRaises(PipelineError, fail)
        self.assertIn("host=127.0.0.1 port=1 dbname=x", str(error))
        self.assertLess(len(str(error)), 400)
        self.assertNotIn("hush", str(error))
