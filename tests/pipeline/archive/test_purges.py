"""Tests for :mod:`synapse_replication.pipeline.archive.purges`."""

from __future__ import annotations

import datetime
import fcntl
import json
from pathlib import Path

import pyarrow
from pyarrow import parquet
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.driver import drive_archive
from synapse_replication.pipeline.archive.layout import open_archive
from synapse_replication.pipeline.archive.purges import (
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

    def test_several_files(self) -> None:
        """What the files of a day hold is put together, whatever their order."""
        with drive_archive(self.folder) as driver:
            for number, first in ((1, 17), (2, 9)):
                rows = make_rows(first, first + 7)
                driver.writers["rows"].write(rows, make_batch(number))
        layout = open_archive(self.folder)
        days = find_old_days(layout, SECOND_OF_JANUARY)
        self.assertEqual([day.rows for day in days], [6, 6])
        # The names of files tell nothing of what is in them.
        (file,) = days[0].folder.glob("batch-000000000000-*")
        file.rename(file.with_name("x" + file.name))
        (file,) = days[1].folder.glob("batch-000000000001-*")
        file.rename(file.with_name("x" + file.name))
        purge_days(layout, days)
        day = datetime.date(2026, 1, 1)
        self.assertEqual(
            read_purged_ranges(layout),
            [
                PurgedRange("s0", "w1", day, 4, 24, 6),
                PurgedRange("s1", "w1", day, 1, 21, 6),
            ],
        )

    def test_wire(self) -> None:
        """Days of the wire go, too; of them the number of commands is on record."""
        layout = open_archive(self.folder)
        for name in ("day=2026-01-01", "day=2026-01-02"):
            (layout.wire / name).mkdir(parents=True)
            table = pyarrow.table({"line": ["PING 1", "PING 2", "PING 3"]})
            parquet.write_table(table, layout.wire / name / "a.parquet")
        days = find_old_days(layout, SECOND_OF_JANUARY)
        (wire,) = (day for day in days if day.kind == "wire")
        self.assertEqual((wire.stream, wire.rows), (None, 3))
        purge_days(layout, [wire])
        self.assertEqual(
            [each.name for each in layout.wire.iterdir()], ["day=2026-01-02"]
        )
        (path,) = (layout.meta / "purges").iterdir()
        record = json.loads(path.read_bytes())
        self.assertEqual(record["wire"], [{"day": "2026-01-01", "commands": 3}])
        self.assertEqual(read_purged_ranges(layout), [])

    def test_escaped_name(self) -> None:
        """The name of a stream is told as it is, not as its folder is written."""
        layout = open_archive(self.folder)
        (layout.rows / "stream=s0").rename(layout.rows / "stream=a%2Fb")
        found = find_old_days(layout, SECOND_OF_JANUARY)
        self.assertEqual([day.stream for day in found], ["a/b", "s1"])

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
