"""Tests for :mod:`synapse_replication.pipeline.archive.log` on damaged logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive import log
from synapse_replication.pipeline.archive.files import files_of
from synapse_replication.pipeline.source.offsets import StreamOffset

_OFFSET = "synapse_replication.offset"
_BATCH = "synapse_replication.batch"


class DamagedLogTests(SynchronousTestCase):
    """Each damage is an error that names the table and says what to do."""

    def make(self, **metadata: str) -> DeltaTable:
        """Return a table whose last commit has metadata."""
        path = Path(self.mktemp())
        table = DeltaTable.create(
            str(path), pa.schema([("stream_id", pa.int64()), ("day", pa.string())])
        )
        table.create_write_transaction(
            [],
            "append",
            table.schema(),
            commit_properties=CommitProperties(
                custom_metadata=metadata,
                app_transactions=[Transaction(log.APPLICATION, 3)],
            ),
        )
        table.update_incremental()
        return table

    def rewrite(self, table: DeltaTable, **changes: Any) -> DeltaTable:
        """Change actions of the newest commit; return the table, opened again."""
        folder = Path(table.table_uri.removeprefix("file://"), "_delta_log")
        newest = max(folder.glob("*.json"))
        lines = [json.loads(line) for line in newest.read_text().splitlines()]
        for line in lines:
            for action, change in changes.items():
                if action in line:
                    change(line[action])
        newest.write_text("\n".join(map(json.dumps, lines)))
        return DeltaTable(str(folder.parent))

    def test_whole(self) -> None:
        """Without damage, the progress is read."""
        offset = '{"minimum":5,"writers":{"w":7}}'
        table = self.make(**{_OFFSET: offset, _BATCH: "3"})
        expected = log.TableState(3, StreamOffset(5, {"w": 7}))
        self.assertEqual(log.read_state(table), expected)

    def test_damaged_offset(self) -> None:
        """An offset that is no position names the commit."""
        for offset in ("{", "[]", '"x"', "9" * 30, '{"minimum":9223372036854775808}'):
            table = self.make(**{_OFFSET: offset, _BATCH: "3"})
            for read in (log.read_state, lambda t: log.offsets_around(t, [0])):
                error = self.assertRaises(PipelineError, read, table)
                self.assertIn("commit 1 of ", str(error))
                self.assertIn("has a damaged offset", str(error))

    def test_damaged_transaction(self) -> None:
        """A number beyond 64 bits in the log is an error that names the table."""
        table = self.rewrite(
            self.make(), txn=lambda action: action.update(version=10**20)
        )
        error = self.assertRaises(PipelineError, log.read_state, table)
        self.assertIn(f"the log of the table {table.table_uri} cannot be", str(error))
        self.assertIn("pipeline archive --repair", str(error))

    def test_commit_without_time(self) -> None:
        """The commit of another program may have no time."""
        table = self.make(**{_BATCH: "3"})
        self.assertRegex(log.committer_of(table, 3), r"another program at 20.* UTC$")
        table = self.rewrite(table, commitInfo=lambda action: action.pop("timestamp"))
        self.assertEqual(log.committer_of(table, 3), "another program")

    def test_other_table(self) -> None:
        """A table without the partitions of an archive is an error."""
        path = Path(self.mktemp())
        path.mkdir()
        table = DeltaTable.create(str(path), pa.schema([("stream_id", pa.int64())]))
        self.assertEqual(files_of(table, "uri", "x"), [])
        from deltalake import write_deltalake

        write_deltalake(str(path), pa.table({"stream_id": [1]}), mode="append")
        error = self.assertRaises(
            PipelineError, files_of, DeltaTable(str(path)), "uri", "x"
        )
        self.assertIn("the table uri is not partitioned by", str(error))
