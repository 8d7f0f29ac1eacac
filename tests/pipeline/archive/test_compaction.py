"""Tests for synapse_replication.pipeline.archive.compaction."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive import compaction as archive_compaction
from synapse_replication.pipeline.archive.compaction import (
    Compaction,
    Compactor,
    exchange_folders,
)
from synapse_replication.pipeline.archive.layout import open_archive
from synapse_replication.pipeline.archive.writer import ArchiveWriter, Point, Watch
from tests.pipeline.archives import (
    Killed,
    kill_at,
    make_batch,
    make_rows,
    rows_by_pyarrow,
    rows_by_spark,
)
from tests.pipeline.shared_session import shared_session


def _never(one: Path, other: Path) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class CompactorTests(SynchronousTestCase):
    """Tests for making one file of many."""

    def setUp(self) -> None:
        self.layout = open_archive(self.mktemp(), create=True)
        self.writer = ArchiveWriter(self.layout, "rows")
        for number in range(3):
            self.writer.write(
                make_rows(number * 10 + 1, number * 10 + 10), make_batch(number)
            )
        self.all = rows_by_pyarrow(self.layout.folder)
        self.assertEqual(len(self.all), 30)

    def compactor(
        self, watch: Watch = lambda point: None, **settings: object
    ) -> Compactor:
        """Start anew, as after a crash."""
        compactor = Compactor(
            self.layout,
            "rows",
            watch,
            **{"enough_files": 3, **settings},  # type: ignore[arg-type]
        )
        compactor.recover()
        return compactor

    def count(self) -> int:
        return len(list(self.layout.rows.rglob("*.parquet")))

    def test_small_files(self) -> None:
        """Each folder's small files become one; the rows stay."""
        self.assertEqual(self.count(), 12)
        done = self.compactor().compact(shared_session())
        self.assertEqual(done, Compaction(4, 12, 4))
        self.assertEqual(self.count(), 4)
        self.assertEqual(rows_by_pyarrow(self.layout.folder), self.all)
        self.assertEqual(rows_by_spark(self.layout.folder), self.all)
        self.assertEqual(list(self.layout.staging.rglob("*.parquet")), [])
        # And on it goes.
        self.writer.write(make_rows(31, 40), make_batch(3))
        self.assertEqual(len(rows_by_spark(self.layout.folder)), 40)

    def test_too_few(self) -> None:
        """Folders with few files are left alone."""
        done = self.compactor(enough_files=4).compact(shared_session())
        self.assertEqual(done, Compaction(0, 0, 0))
        self.assertEqual(self.count(), 12)

    def test_large_files_are_kept(self) -> None:
        """A large file is not written again, and not lost."""
        self.writer.write(make_rows(1001, 9000, streams=1, days=1), make_batch(3))
        (large,) = self.layout.rows.rglob("batch-000000000003-*")
        self.all = rows_by_pyarrow(self.layout.folder)
        done = self.compactor(small_bytes=large.stat().st_size).compact(
            shared_session()
        )
        self.assertEqual((done.before, done.after), (12, 4))
        self.assertTrue(large.exists())
        self.assertEqual(rows_by_pyarrow(self.layout.folder), self.all)

    def test_killed_at_each_point(self) -> None:
        """Wherever compaction is cut off, at each moment all rows are there once."""
        for point, nth in (
            (Point.COMPACTION_STAGED, 1),
            (Point.COMPACTION_LINKED, 1),
            (Point.SWAPPED, 1),
            (Point.COMPACTION_LINKED, 2),
            (Point.COMPACTED, 1),
        ):
            with self.assertRaises(Killed):
                self.compactor(kill_at(point, nth)).compact(shared_session())
            self.assertEqual(rows_by_pyarrow(self.layout.folder), self.all, point)
            self.compactor()
            self.assertEqual(rows_by_pyarrow(self.layout.folder), self.all, point)
            self.assertEqual(list(self.layout.staging.rglob("*.parquet")), [])
        self.assertEqual(self.count(), 4)

    def test_killed_without_exchange(self) -> None:
        """Where folders cannot be exchanged, the next start brings back what was
        away; at no moment is a row there twice."""
        for point, nth in (
            (Point.SWAP_WRITTEN, 1),
            (Point.SWAP_OLD_AWAY, 1),
            (Point.SWAPPED, 1),
            (Point.SWAP_OLD_AWAY, 2),
        ):
            with self.assertRaises(Killed):
                self.compactor(kill_at(point, nth), exchange=_never).compact(
                    shared_session()
                )
            seen = rows_by_pyarrow(self.layout.folder)
            self.assertLessEqual(set(seen), set(self.all), point)
            self.assertEqual(len(seen), len(set(seen)))
            self.compactor()
            self.assertEqual(rows_by_pyarrow(self.layout.folder), self.all, point)
        self.compactor(exchange=_never).compact(shared_session())
        self.assertEqual(rows_by_pyarrow(self.layout.folder), self.all)
        self.assertEqual(self.count(), 4)

    def test_rows_are_counted(self) -> None:
        """A folder is not exchanged for one with another number of rows."""
        self.patch(archive_compaction, "count_rows", lambda path: len(path.name))
        error = self.assertRaises(
            PipelineError, self.compactor().compact, shared_session()
        )
        self.assertIn("nothing was changed", str(error))
        self.assertEqual(rows_by_pyarrow(self.layout.folder), self.all)

    def test_damaged_note(self) -> None:
        """A note of an exchange that cannot be read is named."""
        path = self.layout.meta / "rows-swap.json"
        path.write_text("{}")
        error = self.assertRaises(PipelineError, self.compactor)
        self.assertIn(str(path), str(error))

    def test_failing_exchange(self) -> None:
        """An error that is no lack of the file system is not worked around."""

        def full(one: Path, other: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with self.assertRaises(OSError):
            self.compactor(exchange=full).compact(shared_session())
        self.assertEqual(rows_by_pyarrow(self.layout.folder), self.all)


class ExchangeTests(SynchronousTestCase):
    """Tests for the exchange of two folders."""

    def test_exchange(self) -> None:
        """Each is where the other was."""
        one, other = Path(self.mktemp()), Path(self.mktemp())
        (one / "a").mkdir(parents=True)
        (other / "b").mkdir(parents=True)
        exchange_folders(one, other)
        self.assertTrue((one / "b").exists())
        self.assertTrue((other / "a").exists())

    def test_missing(self) -> None:
        """A folder that is missing is an error, and named."""
        path = Path(self.mktemp())
        error = self.assertRaises(OSError, exchange_folders, path, path)
        self.assertEqual(error.errno, errno.ENOENT)
        self.assertIn(str(path), str(error))

    def test_unknown_to_the_system(self) -> None:
        """A C library without it cannot."""

        class Library:
            def __init__(self, name: None, use_errno: bool) -> None:
                """Have nothing."""

        self.patch(ctypes, "CDLL", Library)
        archive_compaction._renameat2.cache_clear()
        self.addCleanup(archive_compaction._renameat2.cache_clear)
        error = self.assertRaises(OSError, exchange_folders, Path("a"), Path("b"))
        self.assertEqual(error.errno, errno.ENOSYS)
