"""Tests for :mod:`synapse_replication.pipeline.archive.frames`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.archive import frames
from synapse_replication.pipeline.archive.damage import ArchivedFile
from synapse_replication.pipeline.archive.frames import read_archive
from tests.pipeline.archives import add_rows_to, make_archive, receipts
from tests.pipeline.shared_session import shared_session


def _summed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the sum of the ids, and the number of users, of each batch."""
    for batch in batches:
        (stream,) = set(batch.column("stream").to_pylist())
        users = batch.column("user_id")
        yield pa.RecordBatch.from_pydict(
            {
                "stream": [stream],
                "ids": [sum(batch.column("stream_id").to_pylist())],
                "users": [len(users) - users.null_count],
            }
        )


class MapRowsTests(SynchronousTestCase):
    """Tests for reading an archive without passing its rows through Spark."""

    def setUp(self) -> None:
        self.folder = make_archive(Path(self.mktemp()).absolute())
        add_rows_to(self.folder, "receipts", receipts(9, 9))

    def test_rows(self) -> None:
        """
        Each row of each stream is read once, in this process if there are few rows, and
        in tasks otherwise; a column that a stream lacks is null.
        """
        self.check_rows()
        self.patch(frames, "FEW_IDS", 0)
        self.check_rows()

    def check_rows(self) -> None:
        """Check the totals of the rows that are read."""
        archive = read_archive(shared_session(), self.folder)

        found = archive.map_rows(
            _summed, "stream string, ids long, users long", "stream_id", "user_id"
        )

        totals = {
            row["stream"]: (row["sum(ids)"], row["sum(users)"])
            for row in found.groupBy("stream").sum("ids", "users").collect()
        }
        self.assertEqual(
            totals, {"receipts": (1 + 2 + 3 + 4 + 9, 5), "to_device": (10, 0)}
        )

    def test_id_bounds(self) -> None:
        """The bounds of each stream are the least and the greatest token in its log."""
        archive = read_archive(shared_session(), self.folder)
        self.assertEqual(archive.id_bounds(), {"receipts": (1, 9), "to_device": (1, 4)})

    def test_without_statistics(self) -> None:
        """
        The bounds of a file whose log entry has no statistics include every token.
        """
        known = ArchivedFile("uri", "receipts", "path", 1, 1, "2026-01-01", (4, 7))
        unknown = attrs.evolve(known, tokens=None)
        self.assertEqual(frames.bounds_of([known]), (4, 7))
        self.assertEqual(frames.bounds_of([known, unknown]), (-(2**63 - 1), 2**63 - 1))
