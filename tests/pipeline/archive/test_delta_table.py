"""Tests for :mod:`synapse_replication.pipeline.archive.delta_table`."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import attrs
from deltalake import DeltaTable
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive import files
from synapse_replication.pipeline.archive.files import find_damage
from synapse_replication.pipeline.archive.log import committer_of, read_state
from synapse_replication.pipeline.archive.store import ArchiveStore
from synapse_replication.pipeline.schemas import Column, standard_tables
from synapse_replication.pipeline.source.offsets import StreamOffset
from tests.pipeline.archives import (
    TODAY,
    add_rows_to,
    keys_of,
    open_table,
    purge,
    receipts,
)
from tests.pipeline.shared_session import shared_session

RECEIPTS = standard_tables()["receipts"]


class TableTests(SynchronousTestCase):
    """Base class of tests with a table in a local folder."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.uri = ArchiveStore.at(self.folder).stream_uri("receipts")

    def tokens(self) -> list[int]:
        return [token for _, _, token in keys_of(self.folder)]


class CommitTests(TableTests):
    """Tests for committing rows and offsets together."""

    def test_offset_with_rows(self) -> None:
        """The commit that adds rows also has the offset, as JSON with sorted keys."""
        table = open_table(self.folder)
        add_rows_to(self.folder, "receipts", receipts(1, 3), table=table)
        offset = StreamOffset(3, {"w2": 9, "w1": 7})
        table.commit([], offset)
        (commit,) = DeltaTable(self.uri).history(1)
        self.assertEqual(
            commit["synapse_replication.offset"],
            '{"minimum": 3, "writers": {"w1": 7, "w2": 9}}',
        )
        self.assertEqual(open_table(self.folder).state.offset, offset)
        self.assertEqual(open_table(self.folder).state.batch, 2)
        self.assertEqual(self.tokens(), [1, 2, 3])

    def test_durable(self) -> None:
        """Files, their folders, and the table's folder are synced before the commit."""
        synced: list[Path] = []
        self.patch(files, "sync_folder", synced.append)
        add_rows_to(self.folder, "receipts", receipts(1, 1, day=3))
        table = Path(ArchiveStore.at(self.folder).path(self.uri))
        self.assertEqual(synced, [table / "day=2026-01-03", table])

    def test_typed_columns(self) -> None:
        """
        Each field of the row is a typed column, and the table is partitioned by day.
        """
        add_rows_to(self.folder, "receipts", receipts(1, 1, day=3))
        add_rows_to(self.folder, "receipts", receipts(2, 2))
        table = DeltaTable(self.uri)
        self.assertEqual(table.metadata().partition_columns, ["day"])
        rows = table.to_pyarrow_table().sort_by("stream_id").to_pylist()
        self.assertEqual(rows[0]["user_id"], "@user1")
        self.assertIsNone(rows[0]["thread_id"])
        self.assertEqual(rows[0]["written_ts"].hour, 12)
        self.assertEqual(str(rows[0]["written_ts"].tzinfo), "UTC")
        # The day of a row without a time is the day of archiving.
        self.assertEqual(
            [row["day"] for row in rows],
            [datetime.date(2026, 1, 3), datetime.date(2026, 1, 9)],
        )

    def test_second_driver(self) -> None:
        """The driver that commits second gets an error that names the first driver."""
        first, second = open_table(self.folder), open_table(self.folder)
        add_rows_to(self.folder, "receipts", receipts(1, 3), table=first)
        error = self.assertRaises(
            PipelineError,
            add_rows_to,
            *(self.folder, "receipts", receipts(1, 3)),
            table=second,
        )
        self.assertRegex(
            str(error),
            r"^receipts: process \d+ on \S+ at 20.* UTC has archived batch 1",
        )
        self.assertEqual(self.tokens(), [1, 2, 3])

    def test_committer(self) -> None:
        """Maintenance that repeats a batch's number is not its committer."""
        self.patch(os, "getpid", lambda: 11)
        table = add_rows_to(self.folder, "receipts", receipts(1, 3))
        add_rows_to(self.folder, "receipts", receipts(4, 6), table=table)
        self.patch(os, "getpid", lambda: 12)
        table.compact(2, shared_session)
        committed = DeltaTable(self.uri)
        self.assertIn("process 12 ", str(committed.history(1)))
        self.assertTrue(committer_of(committed, 2).startswith("process 11 on "))
        self.assertEqual(committer_of(committed, 3), "another driver")

    def test_second_driver_between_batches(self) -> None:
        """
        A driver detects another driver's batch before its next batch, and when it
        commits.
        """
        first = add_rows_to(self.folder, "receipts", receipts(1, 3))
        second = open_table(self.folder)
        add_rows_to(self.folder, "receipts", receipts(4, 6), table=second)
        for attempt in (
            first.check_sole_driver,
            lambda: add_rows_to(self.folder, "receipts", receipts(4, 6), table=first),
        ):
            error = self.assertRaises(PipelineError, attempt)
            self.assertIn("has archived batch 2", str(error))
        # The other driver continues.
        add_rows_to(self.folder, "receipts", receipts(7, 7), table=second)
        self.assertEqual(self.tokens(), [1, 2, 3, 4, 5, 6, 7])

    def test_attempt_without_commit(self) -> None:
        """Files that were never committed are not visible to readers."""
        table = add_rows_to(self.folder, "receipts", receipts(1, 1, day=1))
        orphan = Path(self.uri, "day=2026-01-01", "part-orphan.zstd.parquet")
        (committed,) = Path(self.uri).glob("day=*/*.parquet")
        orphan.write_bytes(committed.read_bytes())
        self.assertEqual(self.tokens(), [1])
        self.assertEqual(table.vacuum(168), 0)
        self.assertEqual(table.vacuum(0), 1)
        self.assertFalse(orphan.exists())
        self.assertTrue(committed.exists())

    def test_recordings(self) -> None:
        """
        The size of an archived recording is found by its name, also after a checkpoint.
        """
        table = open_table(self.folder)
        table.commit([], recordings={"a.jsonl": 5, "b.jsonl": 7})
        table.commit([], recordings={"c.jsonl": 9})
        DeltaTable(self.uri).create_checkpoint()
        again = open_table(self.folder)
        self.assertEqual(
            [again.archived_size(n) for n in ("a.jsonl", "b.jsonl", "c.jsonl", "d")],
            [5, 7, 9, None],
        )

    def test_log_without_offset(self) -> None:
        """
        A table whose log has lost the offset is an error, because rows would be
        archived twice.
        """
        add_rows_to(self.folder, "receipts", receipts(1, 1))
        (commit,) = Path(self.uri, "_delta_log").glob("*1.json")
        lines = [json.loads(line) for line in commit.read_text().splitlines()]
        for line in lines:
            line.get("commitInfo", {}).pop("synapse_replication.offset", None)
        commit.write_text("\n".join(map(json.dumps, lines)))
        error = self.assertRaises(PipelineError, open_table, self.folder)
        self.assertIn("no longer contains the offset of batch 1", str(error))


class EvolutionTests(TableTests):
    """Tests for versions of a table with different columns."""

    def test_new_column(self) -> None:
        """A column that a newer version adds is null in older rows."""
        add_rows_to(self.folder, "receipts", receipts(1, 2))
        newer = attrs.evolve(
            RECEIPTS, columns=(*RECEIPTS.columns, Column("thread_ts", "bigint"))
        )
        rows = [{**row, "thread_ts": 5} for row in receipts(3, 3)]
        add_rows_to(self.folder, "receipts", rows, columns=newer)
        found = DeltaTable(self.uri).to_pyarrow_table().sort_by("stream_id")
        self.assertEqual(found.column("thread_ts").to_pylist(), [None, None, 5])
        # An older version can still write.
        add_rows_to(self.folder, "receipts", receipts(4, 4))
        found = DeltaTable(self.uri).to_pyarrow_table().sort_by("stream_id")
        self.assertEqual(found.column("thread_ts").to_pylist(), [None, None, 5, None])
        self.assertEqual(open_table(self.folder).state.offset, StreamOffset(4))

    def test_other_type(self) -> None:
        """If the type of a column has changed, the error names the column."""
        add_rows_to(self.folder, "receipts", receipts(1, 1))
        changed = attrs.evolve(
            RECEIPTS, columns=(Column("room_id", "bigint"), *RECEIPTS.columns[1:])
        )
        error = self.assertRaises(
            PipelineError, open_table, self.folder, "receipts", changed
        )
        self.assertIn("column room_id is ", str(error))
        self.assertIn("archive to a new location", str(error))

    def test_store_fails(self) -> None:
        """If the store fails, each operation raises an error that names the table."""
        table = open_table(self.folder)
        add_rows_to(self.folder, "receipts", receipts(1, 3), table=table)
        log = Path(ArchiveStore.at(self.folder).path(self.uri)) / "_delta_log"
        log.rename(log.with_name("moved"))
        log.write_text("not a folder")
        for operation in (
            table.check_sole_driver,
            lambda: table.commit([], StreamOffset(3)),
            lambda: table.vacuum(0),
        ):
            error = str(self.assertRaises(PipelineError, operation))
            self.assertIn(f"the archive {self.uri} cannot be read or written: ", error)
            self.assertNotIn("[31m", error)


class MaintenanceTests(TableTests):
    """Tests for compaction and vacuum."""

    def test_compaction(self) -> None:
        """
        The small files of a day are merged without losing or repeating a row. The
        offset is retained, and readers of an older version still work.
        """
        table = open_table(self.folder)
        for token in range(1, 6):
            add_rows_to(
                self.folder, "receipts", receipts(token, token, day=1), table=table
            )
        add_rows_to(self.folder, "receipts", receipts(6, 6, day=2), table=table)
        older = DeltaTable(self.uri)
        done = table.compact(5, shared_session)
        self.assertEqual(done, (5, 1))
        self.assertEqual(self.tokens(), [1, 2, 3, 4, 5, 6])
        self.assertEqual(len(DeltaTable(self.uri).file_uris()), 2)
        self.assertEqual(read_state(DeltaTable(self.uri)).offset, StreamOffset(6))
        self.assertEqual(table.compact(5, shared_session), (0, 0))
        # Nothing is deleted before the retention period is over.
        self.assertEqual(table.vacuum(1), 0)
        self.assertEqual(older.to_pyarrow_table().num_rows, 6)
        add_rows_to(self.folder, "receipts", receipts(7, 7), table=table)
        self.assertEqual(table.vacuum(0), 5)
        self.assertEqual(self.tokens(), [1, 2, 3, 4, 5, 6, 7])

    def test_compaction_of_damage(self) -> None:
        """Files are not merged if one of them is damaged."""
        table = open_table(self.folder)
        for token in range(1, 4):
            add_rows_to(
                self.folder, "receipts", receipts(token, token, day=1), table=table
            )
        before = table.files
        damaged = Path(self.uri, before[0].path)
        content = damaged.read_bytes()
        damaged.write_bytes(content[:100])
        self.assertEqual(table.compact(2, shared_session), (0, 0))
        self.assertEqual(open_table(self.folder).files, before)
        damaged.write_bytes(content)
        self.assertEqual(table.compact(2, shared_session), (3, 1))
        self.assertEqual(self.tokens(), [1, 2, 3])
        # The new file has checksums.
        (file,) = table.files
        path = Path(self.uri, file.path)
        content = path.read_bytes()
        path.write_bytes(content[:40] + bytes([content[40] ^ 16]) + content[41:])
        (found,) = find_damage(ArchiveStore.at(self.folder), [file], shared_session)
        self.assertIn("CRC", found.reason)

    def test_compaction_beside_a_purge(self) -> None:
        """If files are removed at the same time, their rows do not return."""
        table = open_table(self.folder)
        for token in range(1, 4):
            add_rows_to(
                self.folder, "receipts", receipts(token, token, day=1), table=table
            )
        purge(str(self.folder), TODAY.replace(day=2))
        self.assertEqual(table.compact(2, shared_session), (0, 0))
        self.assertEqual(self.tokens(), [])

    def test_maintenance_beside_a_driver(self) -> None:
        """
        A maintenance commit of another driver, which repeats the offset, is not
        mistaken for a new batch.
        """
        stale = add_rows_to(self.folder, "receipts", receipts(1, 1, day=1))
        driver = open_table(self.folder)
        for token in (2, 3):
            add_rows_to(
                self.folder, "receipts", receipts(token, token, day=1), table=driver
            )
        self.assertEqual(stale.state.batch, 1)
        stale.vacuum(168)
        self.assertEqual(
            open_table(self.folder).state, read_state(DeltaTable(self.uri))
        )
        self.assertEqual(open_table(self.folder).state.offset, StreamOffset(3))
