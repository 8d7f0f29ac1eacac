"""Tests for synapse_replication.pipeline.archive.offsets."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.layout import ArchiveLayout
from synapse_replication.pipeline.archive.offsets import (
    archived_offsets,
    lag_of,
    noted_offsets,
    query_id,
)
from synapse_replication.pipeline.archive.writer import Batch, Manifest
from synapse_replication.pipeline.source.offsets import StreamOffset


class NotedTests(SynchronousTestCase):
    """Tests for what Spark noted."""

    def setUp(self) -> None:
        self.layout = ArchiveLayout(Path(self.mktemp()).absolute())
        self.path = self.layout.checkpoint / "offsets" / "3"
        self.path.parent.mkdir(parents=True)

    def test_offsets(self) -> None:
        """The offsets are read; what else is noted does not count."""
        self.path.write_text('v1\n{"batchTimestampMs": 7}\n{"events": 5}')
        noted = noted_offsets(self.layout, 3)
        self.assertEqual(noted, [{"events": 5}])
        manifest = Manifest(Batch(3, "q", noted), "x", 1, ())
        self.assertEqual(archived_offsets(manifest), {"events": StreamOffset(5)})

    def test_unknown(self) -> None:
        """A note of another version of Spark is not guessed at."""
        for content in ("v2\n{}\n{}", "", "v1\n{}\nno JSON"):
            self.path.write_text(content)
            error = self.assertRaises(PipelineError, noted_offsets, self.layout, 3)
            self.assertIn(str(self.path), str(error))
        self.assertRaises(PipelineError, noted_offsets, self.layout, 4)

    def test_query(self) -> None:
        """The id of the query is read, if there is one; damage is named."""
        self.assertIsNone(query_id(self.layout))
        path = self.layout.checkpoint / "metadata"
        path.write_text('{"id":"a-b"}')
        self.assertEqual(query_id(self.layout), "a-b")
        path.write_text("{}")
        error = self.assertRaises(PipelineError, query_id, self.layout)
        self.assertIn(str(path), str(error))


class LagTests(SynchronousTestCase):
    """Tests for how far behind."""

    def test_lag(self) -> None:
        """Each writer is behind by its own ids; nobody is ahead."""
        archived = {"events": StreamOffset(2, {"w1": 5}), "caches": StreamOffset(4)}
        database = {
            "events": StreamOffset(0, {"w1": 9, "w2": 3, "w3": 1}),
            "caches": StreamOffset(10),
            "receipts": StreamOffset(0, {"w1": 6}),
        }
        self.assertEqual(
            lag_of(archived, database),
            {
                ("events", "w1"): 4,
                ("events", "w2"): 1,
                ("events", "w3"): 0,
                ("caches", ""): 6,
                ("receipts", "w1"): 6,
            },
        )
