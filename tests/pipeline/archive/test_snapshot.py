"""Tests for :mod:`synapse_replication.pipeline.archive.snapshot`."""

from __future__ import annotations

from pathlib import Path

import attrs
import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.archive.files import ArchivedFile
from synapse_replication.pipeline.archive.snapshot import bounds_of, open_snapshot
from tests.pipeline.archives import add_rows_to, make_archive, receipts
from tests.pipeline.scans import read_here
from tests.pipeline.shared_session import shared_session


class SnapshotTests(SynchronousTestCase):
    """Tests for reading one version of an archive."""

    def setUp(self) -> None:
        self.folder = make_archive(Path(self.mktemp()).absolute())
        add_rows_to(self.folder, "receipts", receipts(9, 9))

    def test_rows(self) -> None:
        """
        Each row of each stream is read once, in this process or in tasks; a column that
        a stream lacks is null.
        """
        scan = open_snapshot(self.folder).rows("stream_id", "user_id", "day")
        here = pa.Table.from_batches(read_here(scan), scan.schema).to_pylist()
        there = scan.frame(shared_session()).collect()
        self.assertEqual(
            sorted((row["stream"], row["stream_id"], row["user_id"]) for row in here),
            [
                *(("receipts", token, f"@user{token}") for token in (1, 2, 3, 4, 9)),
                *(("to_device", token, None) for token in (1, 2, 3, 4)),
            ],
        )
        self.assertCountEqual(
            [tuple(row) for row in there], [tuple(row.values()) for row in here]
        )

    def test_lists(self) -> None:
        """A column of lists is converted to text; the table has lists."""
        values: list[list[str | None] | None] = [["@a", None], [], None]
        rows = [
            {"stream_id": token, "row_index": 0, "instance_name": "w1", "keys": keys}
            for token, keys in enumerate(values)
        ]
        add_rows_to(self.folder, "caches", rows)
        archive = open_snapshot(self.folder)
        for scan, found in (
            (archive.rows("stream_id", "keys"), ["[@a, null]", "[]", None]),
            (archive.typed_rows("caches"), values),
        ):
            table = pa.Table.from_batches(read_here(scan), scan.schema)
            self.assertEqual(table.column("keys").to_pylist()[:3], found)

    def test_json_rows(self) -> None:
        """Rows as on the wire are read by their tokens, from the files with these."""
        ids = {"receipts": {2, 3, 4, 10**6}}
        scan = open_snapshot(self.folder).json_rows(ids, ids)
        rows = pa.Table.from_batches(read_here(scan), scan.schema).to_pylist()
        self.assertEqual(sorted(row["stream_id"] for row in rows), [2, 3, 4])
        self.assertIn('["!room","m.read","@user2"', rows[0]["row"] + rows[1]["row"])

    def test_id_bounds(self) -> None:
        """The bounds of each stream are the least and the greatest token in its log."""
        archive = open_snapshot(self.folder)
        self.assertEqual(archive.id_bounds(), {"receipts": (1, 9), "to_device": (1, 4)})

    def test_without_statistics(self) -> None:
        """
        The bounds of a file whose log entry has no statistics include every token.
        """
        known = ArchivedFile("uri", "receipts", "path", 1, 1, "2026-01-01", (4, 7))
        unknown = attrs.evolve(known, token_range=None)
        self.assertEqual(bounds_of([known]), (4, 7))
        self.assertEqual(bounds_of([known, unknown]), (-(2**63 - 1), 2**63 - 1))
