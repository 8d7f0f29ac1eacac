"""Tests for :mod:`synapse_replication.pipeline.archive_purges`."""

from __future__ import annotations

import datetime
import fcntl
from pathlib import Path

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive_driver import drive_archive
from synapse_replication.pipeline.archive_layout import open_archive
from synapse_replication.pipeline.archive_purges import (
    PurgedRange,
    find_old_days,
    purge_days,
    read_purged_ranges,
    wait_for_java,
)
from tests.pipeline.archives import (
    make_batch,
    make_rows,
)

SECOND_OF_JANUARY = datetime.date(2026, 1, 2)


class RecordTests(SynchronousTestCase):
    """What goes, and what is kept of it."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        with drive_archive(self.folder, create=True) as driver:
            driver.writers["rows"].write(make_rows(1, 8), make_batch(0))

    def test_old_days(self) -> None:
        """Days before the date are found, with what they hold."""
        layout = open_archive(self.folder)
        self.assertEqual(find_old_days(layout, datetime.date(2026, 1, 1)), [])
        self.assertEqual(
            [
                (day.kind, day.stream, day.day, day.rows)
                for day in find_old_days(layout, SECOND_OF_JANUARY)
            ],
            [
                ("rows", "s0", datetime.date(2026, 1, 1), 2),
                ("rows", "s1", datetime.date(2026, 1, 1), 2),
            ],
        )

    def test_nothing_to_purge(self) -> None:
        """Where nothing goes, nothing is noted."""
        layout = open_archive(self.folder)
        purge_days(layout, [])
        self.assertFalse((layout.meta / "purges").exists())

    def test_on_record(self) -> None:
        """What went is told by writer, day and token, over several purges."""
        layout = open_archive(self.folder)
        first, second = find_old_days(layout, SECOND_OF_JANUARY)
        purge_days(layout, [first])
        purge_days(layout, [second])
        self.assertEqual(find_old_days(layout, SECOND_OF_JANUARY), [])
        day = datetime.date(2026, 1, 1)
        self.assertEqual(
            read_purged_ranges(layout),
            [
                PurgedRange("s0", "w1", day, 4, 8, 2),
                PurgedRange("s1", "w1", day, 1, 5, 2),
            ],
        )

    def test_damaged_record(self) -> None:
        """A record that cannot be read is named."""
        layout = open_archive(self.folder)
        (layout.meta / "purges").mkdir()
        (layout.meta / "purges" / "000001.json").write_text('{"rows": [{}]}')
        error = self.assertRaises(PipelineError, read_purged_ranges, layout)
        self.assertIn("000001.json is damaged", str(error))


class WaitForJavaTests(SynchronousTestCase):
    def test_waits(self) -> None:
        """Java that outlived its driver is waited for, and told of if it stays."""
        folder = Path(self.mktemp()).absolute()
        layout = open_archive(folder, create=True)
        wait_for_java(layout)
        layout.jvm_lock.touch()
        wait_for_java(layout)
        clock = Clock()

        def refuse(file: object, how: int) -> None:
            raise BlockingIOError

        self.patch(fcntl, "lockf", refuse)
        error = self.assertRaises(
            PipelineError,
            wait_for_java,
            layout,
            patience=5,
            now=clock.seconds,
            sleep=clock.advance,
        )
        self.assertIn("still holds", str(error))
        self.assertGreaterEqual(clock.seconds(), 5)
