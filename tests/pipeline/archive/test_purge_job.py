"""Tests for :mod:`synapse_replication.pipeline.archive.purge_job` and for archive_purges."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.pipeline.purge import purge_command
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive import purges as archive_purges
from synapse_replication.pipeline.archive.driver import drive_archive
from synapse_replication.pipeline.archive.layout import open_archive
from synapse_replication.pipeline.archive.lock import lock_archive
from synapse_replication.pipeline.archive.purge_job import purge_archive
from synapse_replication.pipeline.archive.purges import (
    PurgedRange,
    read_purged_ranges,
)
from synapse_replication.pipeline.archive.writer import Point
from tests.pipeline.archives import (
    Killed,
    kill_at,
    make_batch,
    make_rows,
    rows_by_pyarrow,
)

SECOND_OF_JANUARY = datetime.date(2026, 1, 2)

#: Of rows 1 to 8: streams s0 and s1 in turn, and days in turn by pairs.
LATER = [("s0", 2), ("s0", 6), ("s1", 3), ("s1", 7)]


class PurgeTests(SynchronousTestCase):
    """An archive of eight rows, two streams and two days."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        with drive_archive(self.folder, create=True) as driver:
            driver.writers["rows"].write(make_rows(1, 8), make_batch(0))
        self.before = rows_by_pyarrow(self.folder)
        self.assertEqual(len(self.before), 8)

    def test_escaped_name(self) -> None:
        """A stream is on record by its name, however its folder has to be written."""
        rows = open_archive(self.folder).rows
        (rows / "stream=s0").rename(rows / "stream=a%2Fb")
        days = purge_archive(str(self.folder), SECOND_OF_JANUARY)
        self.assertEqual([day.stream for day in days], ["a/b", "s1"])
        ranges = read_purged_ranges(open_archive(self.folder))
        self.assertEqual([each.stream for each in ranges], ["a/b", "s1"])

    def test_purge(self) -> None:
        """Whole days go, the others stay; what went is on record, by day and writer."""
        days = purge_archive(str(self.folder), SECOND_OF_JANUARY)
        self.assertEqual(
            [(day.stream, day.rows) for day in days], [("s0", 2), ("s1", 2)]
        )
        self.assertEqual(rows_by_pyarrow(self.folder), LATER)
        first = datetime.date(2026, 1, 1)
        self.assertEqual(
            read_purged_ranges(open_archive(self.folder)),
            [
                PurgedRange("s0", "w1", first, 4, 8, 2),
                PurgedRange("s1", "w1", first, 1, 5, 2),
            ],
        )
        self.assertEqual(purge_archive(str(self.folder), SECOND_OF_JANUARY), [])

    def test_archive_goes_on(self) -> None:
        """After a purge a batch that is given again is known, and the next is written."""
        purge_archive(str(self.folder), SECOND_OF_JANUARY)
        with drive_archive(self.folder) as driver:
            driver.recover()
            writer = driver.writers["rows"]
            self.assertTrue(writer.write(make_rows(1, 8), make_batch(0)).again)
            self.assertFalse(writer.write(make_rows(9, 9), make_batch(1)).again)
        self.assertEqual(rows_by_pyarrow(self.folder), sorted([*LATER, ("s1", 9)]))

    def test_cut_off(self) -> None:
        """A crash between two days loses no other day; purging again ends the work.

        No record is lost of what the first attempt removed.
        """
        removed: list[Path] = []

        def crash(folder: Path) -> None:
            removed.append(folder)
            raise Killed

        self.patch(archive_purges, "remove_tree", crash)
        self.assertRaises(Killed, purge_archive, str(self.folder), SECOND_OF_JANUARY)
        self.assertEqual(len(rows_by_pyarrow(self.folder)), 6)
        self.assertEqual(len(list(removed[0].glob("*.parquet"))), 1)
        self.patch(archive_purges, "remove_tree", lambda folder: None)
        purge_archive(str(self.folder), SECOND_OF_JANUARY)
        self.assertEqual(rows_by_pyarrow(self.folder), LATER)
        self.assertFalse(removed[0].exists())
        ranges = read_purged_ranges(open_archive(self.folder))
        self.assertEqual({each.stream for each in ranges}, {"s0", "s1"})

    def test_batch_not_published(self) -> None:
        """Old rows of a batch that a crash left unpublished go, and do not come later."""
        with drive_archive(self.folder, watch=kill_at(Point.COMMITTED)) as driver:
            self.assertRaises(
                Killed, driver.writers["rows"].write, make_rows(9, 16), make_batch(1)
            )
        purge_archive(str(self.folder), SECOND_OF_JANUARY)
        with drive_archive(self.folder) as driver:
            driver.recover()
        tokens = [token for _, token in rows_by_pyarrow(self.folder)]
        self.assertEqual(sorted(tokens), [2, 3, 6, 7, 10, 11, 14, 15])

    def test_dry_run(self) -> None:
        """A dry run tells what would go, also beside a driver, and changes nothing."""
        with lock_archive(open_archive(self.folder)):
            result = CliRunner().invoke(
                purge_command,
                ["--archive", str(self.folder), "--before", "2026-01-02", "--dry-run"],
                catch_exceptions=False,
            )
        self.assertIn("2026-01-01  s0: 2 rows", result.output)
        self.assertIn("would be removed: 2 folders with 4 rows", result.output)
        self.assertEqual(rows_by_pyarrow(self.folder), self.before)
        self.assertEqual(read_purged_ranges(open_archive(self.folder)), [])

    def test_command(self) -> None:
        """The command removes, and says as JSON what."""
        result = CliRunner().invoke(
            purge_command,
            ["--archive", str(self.folder), "--before", "2026-01-03", "--json"],
            catch_exceptions=False,
        )
        told = json.loads(result.stdout)
        self.assertTrue(told["purged"])
        self.assertEqual(sum(day["rows"] for day in told["days"]), 8)
        self.assertEqual(list((self.folder / "rows").rglob("*.parquet")), [])

    def test_other_driver(self) -> None:
        """While another driver is at work nothing is purged."""
        with lock_archive(open_archive(self.folder)):
            error = self.assertRaises(
                PipelineError, purge_archive, str(self.folder), SECOND_OF_JANUARY
            )
        self.assertIn("one driver at a time", str(error))

    def test_strange_folder(self) -> None:
        """What is no day's folder is named, before anything is removed."""
        (self.folder / "rows" / "stream=s0" / "day=monday").mkdir()
        error = self.assertRaises(
            PipelineError, purge_archive, str(self.folder), SECOND_OF_JANUARY
        )
        self.assertIn("day=monday is no day's folder", str(error))
        self.assertEqual(rows_by_pyarrow(self.folder), self.before)
