"""Tests for :mod:`synapse_replication.pipeline.source.reading`."""

from __future__ import annotations

import json
import pickle

import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.schemas import RowForm
from synapse_replication.pipeline.source import ranges
from synapse_replication.pipeline.source.connections import read_transaction
from synapse_replication.pipeline.source.options import SourceOptions
from synapse_replication.pipeline.source.planning import Plan
from synapse_replication.pipeline.source.reading import read_parts
from synapse_replication.pipeline.source.source import RowsPartition, partitions_of
from tests.pipeline.histories import extract_dsn, history_dsn, plan


class PartitionTests(SynchronousTestCase):
    """Tests for the partitions that Spark sends to tasks."""

    def test_partitions(self) -> None:
        """A partition contains the parts of its task, also after pickling."""
        tasks = plan(extract_dsn(), numPartitions="3")
        made = Plan({"dbname": "x"}, {}, {}, [], tasks)
        partitions = pickle.loads(pickle.dumps(partitions_of(made)))
        self.assertEqual([partition.parts for partition in partitions], tasks)
        self.assertEqual(partitions[0].conninfo, {"dbname": "x"})
        self.assertGreater(len(tasks), 1)

    def test_nothing(self) -> None:
        """If there is nothing to read, there is one partition without parts."""
        (partition,) = partitions_of(Plan({}, {}, {}, [], []))
        self.assertEqual(partition.parts, ())
        self.assertEqual(list(read_parts({}, partition.parts)), [])

    def test_repr(self) -> None:
        """
        The ``repr`` of a partition contains streams and ids, and no other details.
        """
        (task,) = plan(extract_dsn(), streams="receipts")
        text = repr(RowsPartition({"password": "hush"}, task))
        self.assertIn("'receipts'", text)
        self.assertRegex(text, r"\('receipts', \d+, \d+\)")
        self.assertNotIn("sole_writer", text)
        self.assertNotIn("hush", text)


class ReadTests(SynchronousTestCase):
    """Tests for reading from a real database."""

    def test_one_after_the_other(self) -> None:
        """All parts of a task are read, one after the other."""
        conninfo = SourceOptions.parse({"dsn": extract_dsn()}).conninfo
        (task,) = plan(extract_dsn(), streams="receipts,events", numPartitions="1")
        self.assertEqual({part.stream.name for part in task}, {"receipts", "events"})
        streams = [
            row["stream"]
            for batch in read_parts(conninfo, task)
            for row in batch.to_pylist()
        ]
        order = list(dict.fromkeys(part.stream.name for part in task))
        self.assertEqual(list(dict.fromkeys(streams)), order)

    def test_forms(self) -> None:
        """A row is read as JSON, as typed columns, or without its content."""
        conninfo = SourceOptions.parse({"dsn": extract_dsn()}).conninfo
        (task,) = plan(extract_dsn(), streams="receipts")
        found = {
            form: next(
                row
                for batch in read_parts(conninfo, task, form.schema)
                for row in batch.to_pylist()
            )
            for form in RowForm
        }
        key = {
            "instance_name": "w",
            "stream_id": 2,
            "row_index": 0,
            "written_ts": None,
        }
        self.assertEqual(found[RowForm.NONE], {**key, "stream": "receipts"})
        row = json.loads(found[RowForm.JSON]["row"])
        self.assertEqual(row[2:5], ["@a:x", "$join", None])
        typed = found[RowForm.TYPED]
        self.assertEqual({name: typed[name] for name in key}, key)
        self.assertEqual(typed["user_id"], "@a:x")
        self.assertEqual(json.loads(typed["data"]), {"ts": 1795207381916})

    def test_looked_up_or_joined(self) -> None:
        """
        Details of events are the same whether they are looked up row by row or joined.
        """
        conninfo = SourceOptions.parse({"dsn": history_dsn()}).conninfo
        (task,) = plan(history_dsn(), streams="events")
        rows = []
        for least in (ranges.IDS_TO_JOIN, 1):
            self.patch(ranges, "IDS_TO_JOIN", least)
            self.assertEqual(task[0].joins_details, least == 1)
            batches = list(read_parts(conninfo, task))
            rows.append(pa.Table.from_batches(batches).to_pylist())
        self.assertGreater(len(rows[0]), 7000)
        self.assertEqual(rows[0], rows[1])

    def test_leaving_early(self) -> None:
        """Closing an iterator before its end cancels the query."""
        conninfo = SourceOptions.parse({"dsn": history_dsn()}).conninfo
        (task,) = plan(history_dsn(), streams="events")
        batches = read_parts(conninfo, task)
        next(batches)
        del batches
        with read_transaction(conninfo) as txn:
            txn.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' "
                "AND query LIKE 'COPY%' AND datname = current_database()"
            )
            self.assertEqual(txn.fetchall(), [(0,)])
