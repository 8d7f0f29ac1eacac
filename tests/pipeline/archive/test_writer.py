"""Tests for synapse_replication.pipeline.archive.writer."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive import writer as archive_writer
from synapse_replication.pipeline.archive.layout import ArchiveLayout, open_archive
from synapse_replication.pipeline.archive.writer import ArchiveWriter, Manifest, Point
from tests.pipeline.archives import (
    Killed,
    kill_at,
    make_batch,
    make_rows,
    rows_by_pyarrow,
    rows_by_spark,
)

#: Of a batch of two streams and two days.
_POINTS = [
    (Point.BEGUN, 1),
    (Point.STAGED, 1),
    (Point.COMMITTED, 1),
    (Point.FILE_PUBLISHED, 1),
    (Point.FILE_PUBLISHED, 4),
    (Point.PUBLISHED, 1),
    (Point.SETTLED, 1),
    (Point.CLEANED, 1),
]


def _expected(last: int) -> list[tuple[str, int]]:
    return sorted((f"s{number % 2}", number) for number in range(1, last + 1))


class ArchiveWriterTests(SynchronousTestCase):
    """Tests for the states that a batch goes through."""

    def setUp(self) -> None:
        self.layout: ArchiveLayout = open_archive(self.mktemp(), create=True)

    def writer(self) -> ArchiveWriter:
        """Start anew, as after a crash."""
        writer = ArchiveWriter(self.layout, "rows")
        writer.recover()
        return writer

    def files(self) -> list[Path]:
        return sorted(self.layout.rows.rglob("*.parquet"))

    def test_batches(self) -> None:
        """Batches are archived by stream and day, and counted."""
        synced: list[Path] = []
        self.patch(archive_writer, "sync_folder", synced.append)
        writer = self.writer()
        first = writer.write(make_rows(1, 40), make_batch(0))
        # Also the names of the folders above staged files: the manifest counts on them.
        staging = self.layout.staging / "rows"
        for folder in ("", first.attempt, f"{first.attempt}/stream=s0"):
            self.assertIn(staging / folder, synced)
        second = writer.write(make_rows(41, 60), make_batch(1))
        self.assertEqual((first.rows, second.rows), (40, 20))
        self.assertEqual(rows_by_spark(self.layout.folder), _expected(60))
        self.assertEqual(rows_by_pyarrow(self.layout.folder), _expected(60))
        self.assertEqual(
            sorted(
                {
                    str(path.parent.relative_to(self.layout.rows))
                    for path in self.files()
                }
            ),
            [f"stream=s{s}/day=2026-01-0{day}" for s in (0, 1) for day in (1, 2)],
        )
        self.assertEqual(list(self.layout.staging.rglob("*.parquet")), [])

    def test_killed_at_each_point(self) -> None:
        """Wherever the writing is cut off, and at each moment: no row is doubled, none
        of an earlier batch is missing; after another start, none at all."""
        self.writer().write(make_rows(1, 10), make_batch(0))
        for index, (point, nth) in enumerate(_POINTS):
            number, first = index + 1, index * 10 + 11
            rows, batch = make_rows(first, first + 9), make_batch(number)
            writer = ArchiveWriter(self.layout, "rows", kill_at(point, nth))
            with self.assertRaises(Killed):
                writer.write(rows, batch)
            seen = rows_by_pyarrow(self.layout.folder)
            self.assertEqual(len(seen), len(set(seen)))
            self.assertLessEqual(set(_expected(first - 1)), set(seen))
            manifest = self.writer().write(rows, batch)
            self.assertEqual(manifest.rows, 10)
            written_before = point not in (Point.BEGUN, Point.STAGED)
            self.assertEqual(manifest.again, written_before, point)
            self.assertEqual(rows_by_pyarrow(self.layout.folder), _expected(first + 9))
        self.assertEqual(
            rows_by_spark(self.layout.folder), rows_by_pyarrow(self.layout.folder)
        )

    def test_killed_while_recovering(self) -> None:
        """A start that is cut off itself is made up for by the next."""
        with self.assertRaises(Killed):
            ArchiveWriter(self.layout, "rows", kill_at(Point.COMMITTED)).write(
                make_rows(1, 20), make_batch(0)
            )
        for nth in (1, 2, 3):
            with self.assertRaises(Killed):
                ArchiveWriter(
                    self.layout, "rows", kill_at(Point.FILE_PUBLISHED, nth)
                ).recover()
        self.writer()
        self.assertEqual(rows_by_pyarrow(self.layout.folder), _expected(20))

    def test_other_offsets(self) -> None:
        """A batch of a known number with other offsets is refused: its rows would be
        lost."""
        self.writer().write(make_rows(1, 4), make_batch(0))
        error = self.assertRaises(
            PipelineError,
            self.writer().write,
            make_rows(1, 9),
            make_batch(0, inputs="further"),
        )
        self.assertIn("has other offsets", str(error))
        self.assertIn("from the same backup", str(error))

    def test_other_checkpoint(self) -> None:
        """Batches of a new checkpoint are refused: its rows would be doubled."""
        self.writer().write(make_rows(1, 4), make_batch(0))
        for number in (0, 1):
            error = self.assertRaises(
                PipelineError,
                self.writer().write,
                make_rows(1, 4),
                make_batch(number, origin="other"),
            )
            self.assertIn("another checkpoint", str(error))

    def test_batch_too_far(self) -> None:
        """A batch that leaves one out is refused: the archive is older than its
        checkpoint."""
        error = self.assertRaises(
            PipelineError, self.writer().write, make_rows(1, 4), make_batch(3)
        )
        self.assertIn("it has no batch yet", str(error))
        self.writer().write(make_rows(1, 4), make_batch(0))
        error = self.assertRaises(
            PipelineError, self.writer().write, make_rows(1, 4), make_batch(2)
        )
        self.assertIn("its last is 0", str(error))

    def test_empty_batch(self) -> None:
        """A batch without rows is a batch."""
        self.assertEqual(self.writer().write(make_rows(1, 0), make_batch(0)).rows, 0)
        self.writer().write(make_rows(1, 4), make_batch(1))
        self.assertEqual(rows_by_spark(self.layout.folder), _expected(4))

    def test_old_manifests_are_forgotten(self) -> None:
        """Manifests of rows do not grow in number for ever; those of recordings are
        what tells which are there."""
        self.patch(archive_writer, "KEPT_MANIFESTS", 2)
        writer = self.writer()
        for number in range(4):
            writer.write(make_rows(number + 1, number + 1), make_batch(number))
        self.assertEqual([m.batch.number for m in writer.batches()], [2, 3])
        self.assertEqual([m.batch.number for m in self.writer().batches()], [2, 3])
        error = self.assertRaises(
            PipelineError, writer.write, make_rows(1, 1), make_batch(1)
        )
        self.assertIn("its last is 3", str(error))

    def test_staged_file_is_missing(self) -> None:
        """A committed batch whose file is gone is no archive to go on with."""
        with self.assertRaises(Killed):
            ArchiveWriter(self.layout, "rows", kill_at(Point.COMMITTED)).write(
                make_rows(1, 4), make_batch(0)
            )
        next(self.layout.staging.rglob("*.parquet")).unlink()
        error = self.assertRaises(PipelineError, self.writer)
        self.assertIn("restore the archive", str(error))

    def test_damaged_manifest(self) -> None:
        """A manifest that cannot be read is named."""
        self.writer().write(make_rows(1, 4), make_batch(0))
        path = self.layout.manifests("rows") / "000000000000.json"
        for content in (b"{}", b"no JSON"):
            path.write_bytes(content)
            error = self.assertRaises(PipelineError, self.writer().newest)
            self.assertIn(str(path), str(error))

    def test_what_cannot_be_removed(self) -> None:
        """What an executor of a killed driver still writes does not stop the next."""
        stuck = self.layout.staging / "rows" / "file"
        stuck.parent.mkdir(parents=True)
        stuck.write_bytes(b"")
        with self.assertLogs("synapse_replication", "WARNING") as logs:
            self.writer()
        self.assertIn("cannot be removed", logs.output[0])


class ManifestTests(SynchronousTestCase):
    """Tests for the manifest itself."""

    def test_both_ways(self) -> None:
        """What was written is read."""
        manifest = Manifest(
            make_batch(7),
            "a" * 32,
            1,
            (archive_writer.StagedFile("stream=a/day=b", "c", "d", 5, 100),),
        )
        self.assertEqual(Manifest.from_json(manifest.to_json()), manifest)
