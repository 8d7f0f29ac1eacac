"""Tests for :mod:`synapse_replication.pipeline.archive.purges`."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from deltalake import DeltaTable
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.pipeline.archives import purge_command
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive import purges
from synapse_replication.pipeline.archive.log import PurgedRange, read_purged_ranges
from synapse_replication.pipeline.archive.store import ArchiveStore
from synapse_replication.pipeline.source.offsets import StreamOffset
from tests.pipeline.archives import (
    Killed,
    add_rows_to,
    keys_of,
    make_archive,
    open_table,
    purge,
    receipts,
)

SECOND_OF_JANUARY = datetime.date(2026, 1, 2)

LATER = [
    ("receipts", "w1", 3),
    ("receipts", "w1", 4),
    ("to_device", "w1", 3),
    ("to_device", "w1", 4),
]


class PurgeTests(SynchronousTestCase):
    """Tests with an archive of eight rows, two streams and two days."""

    def setUp(self) -> None:
        self.folder = make_archive(Path(self.mktemp()).absolute())
        self.before = keys_of(self.folder)
        self.assertEqual(len(self.before), 8)

    def table(self, stream: str = "receipts") -> DeltaTable:
        return DeltaTable(ArchiveStore.at(self.folder).stream_uri(stream))

    def test_purge(self) -> None:
        """
        Days before the date are removed. The purge is recorded, also in the table's
        history, and the archive resumes from its old offset.
        """
        days = purge(str(self.folder), SECOND_OF_JANUARY)
        self.assertEqual(
            [(day.stream, str(day.day), day.rows) for day in days],
            [("receipts", "2026-01-01", 2), ("to_device", "2026-01-01", 2)],
        )
        self.assertEqual(keys_of(self.folder), LATER)
        for stream in ("receipts", "to_device"):
            self.assertEqual(
                read_purged_ranges(self.table(stream), stream),
                [PurgedRange(stream, "w1", 1, 2)],
            )
        (commit,) = self.table().history(1)
        self.assertEqual(commit["operation"], "DELETE")
        self.assertIn("2026-01-02", json.dumps(commit["operationParameters"]))
        self.assertEqual(purge(str(self.folder), SECOND_OF_JANUARY), [])
        self.assertEqual(open_table(self.folder).state.offset, StreamOffset(4))
        add_rows_to(self.folder, "receipts", receipts(5, 5))
        self.assertEqual(keys_of(self.folder), sorted([*LATER, ("receipts", "w1", 5)]))

    def test_time_travel(self) -> None:
        """The previous version of the table still has the purged rows."""
        version = self.table().version()
        purge(str(self.folder), SECOND_OF_JANUARY)
        table = DeltaTable(ArchiveStore.at(self.folder).stream_uri("receipts"), version)
        self.assertEqual(table.to_pyarrow_table().num_rows, 4)

    def test_cut_off(self) -> None:
        """
        A crash before the commit loses nothing. The next purge completes the work, and
        the recorded range covers both attempts.
        """

        def crash(*args: Any, **kwargs: Any) -> None:
            raise Killed

        patch = self.patch(DeltaTable, "delete", crash)
        self.assertRaises(Killed, purge, str(self.folder), SECOND_OF_JANUARY)
        self.assertEqual(keys_of(self.folder), self.before)
        patch.restore()
        purge(str(self.folder), datetime.date(2026, 1, 3))
        self.assertEqual(keys_of(self.folder), [])
        self.assertEqual(
            read_purged_ranges(self.table(), "receipts"),
            [PurgedRange("receipts", "w1", 1, 4)],
        )

    def test_beside_a_driver(self) -> None:
        """
        A purge that conflicts with a driver's commit is repeated, and both succeed.
        """
        driver = open_table(self.folder)
        real, left = purges._Purge._ranges, [1]

        def overtaken(*args: Any) -> Any:
            if left[0]:
                left[0] -= 1
                add_rows_to(
                    self.folder, "receipts", receipts(5, 5, day=1), table=driver
                )
            return real(*args)

        self.patch(purges._Purge, "_ranges", overtaken)
        purge(str(self.folder), SECOND_OF_JANUARY)
        self.assertEqual(keys_of(self.folder), LATER)
        self.assertEqual(
            read_purged_ranges(self.table(), "receipts"),
            [PurgedRange("receipts", "w1", 1, 5)],
        )
        self.assertEqual(open_table(self.folder).state.offset, StreamOffset(5))

    def test_between_batches_of_a_driver(self) -> None:
        """A driver commits its next batch to a table that was purged meanwhile."""
        driver = open_table(self.folder)
        purge(str(self.folder), SECOND_OF_JANUARY)
        add_rows_to(self.folder, "receipts", receipts(5, 5), table=driver)
        self.assertEqual(keys_of(self.folder), sorted([*LATER, ("receipts", "w1", 5)]))
        self.assertEqual(open_table(self.folder).state.offset, StreamOffset(5))
        self.assertEqual(
            read_purged_ranges(self.table(), "receipts"),
            [PurgedRange("receipts", "w1", 1, 2)],
        )

    def test_damaged_file(self) -> None:
        """If a file of an old day is damaged, the purge fails, and names the table."""
        for file in Path(self.folder).rglob("*.parquet"):
            file.write_bytes(b"no parquet")
        error = self.assertRaises(
            PipelineError, purge, str(self.folder), SECOND_OF_JANUARY
        )
        self.assertIn("cannot purge", str(error))
        self.assertIn("receipts", str(error))

    def test_append_only(self) -> None:
        """A commit that is rejected each time is an error with its cause."""
        self.table().alter.set_table_properties({"delta.appendOnly": "true"})
        error = self.assertRaises(
            PipelineError, purge, str(self.folder), SECOND_OF_JANUARY
        )
        self.assertIn("Delta table is append-only", str(error))
        self.assertEqual(keys_of(self.folder), self.before)

    def test_always_overtaken(self) -> None:
        """If old days change during each attempt, the purge fails; nothing is lost."""
        keys = keys_of(self.folder)
        self.patch(purges._Purge, "record", lambda *args: False)
        error = self.assertRaises(
            PipelineError, purge, str(self.folder), SECOND_OF_JANUARY
        )
        self.assertIn("its old days changed during each attempt", str(error))
        self.assertEqual(keys_of(self.folder), keys)

    def test_commands(self) -> None:
        """
        A dry run reports the days and changes nothing; ``--json`` reports the removed
        days.
        """
        arguments = ["--archive", str(self.folder), "--before", "2026-01-02"]
        result = CliRunner().invoke(
            purge_command, [*arguments, "--dry-run"], catch_exceptions=False
        )
        self.assertIn("2026-01-01  receipts: 2 rows", result.output)
        self.assertIn("would be removed: 2 daily partitions with 4 rows", result.output)
        self.assertEqual(keys_of(self.folder), self.before)
        self.assertEqual(read_purged_ranges(self.table(), "receipts"), [])
        result = CliRunner().invoke(
            purge_command, [*arguments, "--json"], catch_exceptions=False
        )
        output = json.loads(result.stdout)
        self.assertTrue(output["purged"])
        self.assertEqual(sum(day["rows"] for day in output["days"]), 4)
        shown = [line.split(" s  ") for line in result.stderr.splitlines()]
        self.assertEqual(
            [step for _, step in shown],
            [
                "step 1 of 1: open the archive",
                "step 2 of 3: receipts",
                "step 3 of 3: to_device",
            ],
        )
        # The step is shown as soon as it begins.
        self.assertLess(float(shown[0][0]), 0.5)
        self.assertEqual(keys_of(self.folder), LATER)
