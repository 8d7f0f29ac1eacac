"""Tests for :mod:`synapse_replication.pipeline.archive.driver`."""

from __future__ import annotations

import json
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.compaction import Compaction
from synapse_replication.pipeline.archive.driver import drive_archive
from synapse_replication.pipeline.archive.writer import Point
from tests.pipeline.archives import (
    Killed,
    kill_at,
    make_batch,
    make_rows,
    rows_by_pyarrow,
)
from tests.pipeline.shared_session import shared_session


class DriverTests(SynchronousTestCase):
    """Changing an archive."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()

    def test_made_if_told_so(self) -> None:
        """A folder that is missing is made only if that was asked for."""
        with self.assertRaises(PipelineError), drive_archive(self.folder):
            pass
        self.assertFalse(self.folder.exists())
        with drive_archive(self.folder, create=True) as driver:
            self.assertEqual(set(driver.writers), {"rows", "wire"})
            self.assertEqual(set(driver.compactors), {"rows", "wire"})
        with drive_archive(self.folder):
            pass

    def test_alone(self) -> None:
        """A second driver is refused, and let in when the first is gone."""
        with (
            drive_archive(self.folder, create=True),
            self.assertRaisesRegex(PipelineError, "one driver at a time"),
            drive_archive(self.folder),
        ):
            pass
        with drive_archive(self.folder):
            pass

    def test_recover(self) -> None:
        """A batch that was committed and cut off is finished by the next driver."""
        rows = make_rows(1, 4)
        with (
            self.assertRaises(Killed),
            drive_archive(
                self.folder, create=True, watch=kill_at(Point.COMMITTED)
            ) as driver,
        ):
            driver.writers["rows"].write(rows, make_batch(0))
        self.assertFalse(any((self.folder / "rows").rglob("*.parquet")))
        with drive_archive(self.folder) as driver:
            driver.recover()
        self.assertEqual(
            rows_by_pyarrow(self.folder),
            [("s0", 2), ("s0", 4), ("s1", 1), ("s1", 3)],
        )

    def test_recover_both(self) -> None:
        """A folder that compaction had away is back before a batch is put into it."""
        with drive_archive(self.folder, create=True) as driver:
            driver.writers["rows"].write(make_rows(1, 2, days=1), make_batch(0))
        with (
            self.assertRaises(Killed),
            drive_archive(self.folder, watch=kill_at(Point.COMMITTED)) as driver,
        ):
            driver.writers["rows"].write(make_rows(3, 4, days=1), make_batch(1))
        partition = "stream=s0/day=2026-01-01"
        away = driver.layout.staging / "rows-compaction" / "new"
        away.parent.mkdir(parents=True)
        (driver.layout.rows / partition).rename(away)
        swap = {"partition": partition, "new": "new"}
        (driver.layout.meta / "rows-swap.json").write_text(json.dumps(swap))
        with drive_archive(self.folder) as driver:
            driver.recover()
        self.assertEqual(
            rows_by_pyarrow(self.folder),
            [("s0", 2), ("s0", 4), ("s1", 1), ("s1", 3)],
        )

    def test_compactors(self) -> None:
        """As many small files as are said are enough, and its points are watched."""
        with drive_archive(self.folder, create=True) as driver:
            for number in (0, 1):
                rows = make_rows(2 * number, 2 * number, days=1)
                driver.writers["rows"].write(rows, make_batch(number))
        seen: list[Point] = []
        for enough, done in ((3, Compaction(0, 0, 0)), (2, Compaction(1, 2, 1))):
            with drive_archive(
                self.folder, enough_files=enough, watch=seen.append
            ) as driver:
                compacted = driver.compactors["rows"].compact(shared_session())
            self.assertEqual(compacted, done)
        self.assertIn(Point.COMPACTED, seen)
