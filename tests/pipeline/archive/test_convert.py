"""Tests for :mod:`synapse_replication.pipeline.archive.convert`, without Spark."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pyarrow as pa
from click.testing import CliRunner
from deltalake import DeltaTable
from pyarrow import parquet
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.pipeline.convert import convert_command
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.convert import convert_archive
from synapse_replication.pipeline.archive.log import PurgedRange, read_purged_ranges
from synapse_replication.pipeline.archive.store import open_archive
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.tables import WIRE_ARROW_SCHEMA
from tests.pipeline.archives import keys_of, open_table

_ROWS = {
    "receipts": ["!r", "m.read", "@u", "$e", None, {"ts": 5}],
    "events": ["ev", ["$e", "!r", "m.room.message", None, None, None]],
}


def write(path: Path, table: pa.Table) -> None:
    """Write a file with timestamps as Spark wrote them."""
    path.parent.mkdir(parents=True)
    parquet.write_table(table, path, use_deprecated_int96_timestamps=True)


def make_old(folder: Path) -> None:
    """Make an archive in the old format, with two streams and one recording."""
    for token, (stream, row) in enumerate(sorted(_ROWS.items()), 4):
        noon = datetime.datetime(2026, 1, 2, 12)
        write(
            folder / f"rows/stream={stream}/day=2026-01-02/batch-0.parquet",
            pa.table(
                {
                    "instance_name": ["w", "w"],
                    "stream_id": [token, token + 1],
                    "row_index": pa.array([0, 0], pa.int32()),
                    "row": [json.dumps(row)] * 2,
                    "written_ts": pa.array([noon, None], pa.timestamp("us")),
                    "archived_ts": pa.array([noon] * 2, pa.timestamp("us")),
                }
            ),
        )
    line = dict.fromkeys(WIRE_ARROW_SCHEMA.names) | {
        "recording": "a.jsonl",
        "line_number": 1,
        "t": 0.5,
        "channel": "x",
        "line": "PING 1",
    }
    write(
        folder / "wire/day=2026-01-03/batch-0.parquet",
        pa.Table.from_pylist([line], schema=WIRE_ARROW_SCHEMA),
    )
    offsets = {"receipts": {"minimum": 5, "writers": {"w": 9}}, "events": 5}
    purge = {
        "stream": "events",
        "instance_name": "w",
        "day": "2026-01-01",
        "first_token": 1,
        "last_token": 3,
        "rows": 3,
    }
    for name, value in {
        "archive.json": {},
        "rows/000000000007.json": {"batch": {"inputs": [offsets]}},
        "wire/000000000000.json": {"batch": {"inputs": [["a.jsonl", 77]]}},
        "purges/000001.json": {"rows": [purge]},
    }.items():
        path = folder / "_meta" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))


class ConvertTests(SynchronousTestCase):
    """Tests for converting an archive from the old format to Delta tables."""

    def setUp(self) -> None:
        self.old, self.new = (Path(self.mktemp()).absolute() for _ in range(2))
        make_old(self.old)

    def test_all(self) -> None:
        """
        Rows become typed columns, partitioned by day; offsets, purges and recordings
        are retained.
        """
        result = CliRunner().invoke(
            convert_command,
            ["--from", str(self.old), "--archive", str(self.new)],
            env={},
            catch_exceptions=False,
        )
        self.assertIn("converted 4 rows of 2 streams and 1 commands", result.stdout)
        steps = (
            "read the old archive",
            "convert events",
            "convert receipts",
            "convert recordings of the wire",
        )
        shown = [line.split(" s  ") for line in result.stderr.splitlines()]
        self.assertEqual(
            [step for _, step in shown],
            [
                "step 1 of 1: read the old archive",
                *(
                    f"step {number} of 4: {step}"
                    for number, step in enumerate(steps[1:], 2)
                ),
            ],
        )
        # The step is shown as soon as it begins.
        self.assertLess(float(shown[0][0]), 0.5)
        self.assertEqual(
            keys_of(self.new),
            [
                ("events", "w", 4),
                ("events", "w", 5),
                ("receipts", "w", 5),
                ("receipts", "w", 6),
            ],
        )
        store = open_archive(self.new)
        receipts = DeltaTable(store.stream_uri("receipts")).to_pyarrow_table()
        first, second = receipts.sort_by("stream_id").to_pylist()
        self.assertEqual(json.loads(first["data"]), {"ts": 5})
        self.assertEqual(
            first["written_ts"],
            datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.timezone.utc),
        )
        self.assertIsNone(second["written_ts"])
        self.assertEqual(second["day"], datetime.date(2026, 1, 2))
        events = DeltaTable(store.stream_uri("events"))
        kinds = events.to_pyarrow_table(columns=["kind", "event_id", "membership"])
        self.assertEqual(
            kinds.to_pylist()[0], {"kind": "ev", "event_id": "$e", "membership": None}
        )
        self.assertEqual(open_table(self.new).state.offset, StreamOffset(5, {"w": 9}))
        self.assertEqual(
            read_purged_ranges(events, "events"), [PurgedRange("events", "w", 1, 3)]
        )
        # The last commit repeats the batch, in case earlier commits are removed.
        (last,) = events.history(1)
        self.assertEqual(last["operation"], "SET TBLPROPERTIES")
        self.assertEqual(last["synapse_replication.batch"], "1")
        wire = DeltaTable(store.wire_uri)
        self.assertEqual(wire.transaction_version("recording/a.jsonl"), 77)
        (command,) = wire.to_pyarrow_table().to_pylist()
        self.assertEqual(command["day"], datetime.date(2026, 1, 3))

    def test_damaged_file(self) -> None:
        """A file of the old archive that is not Parquet is named."""
        file = next(iter(sorted(self.old.rglob("*.parquet"))))
        file.write_bytes(b"no parquet")
        error = self.assertRaises(
            PipelineError, convert_archive, str(self.old), str(self.new)
        )
        self.assertIn(f"{file} cannot be read: ", str(error))

    def test_refused(self) -> None:
        """
        A pending batch, a destination with an archive, and a folder without an old
        archive are errors, and nothing is written.
        """
        pending = self.old / "_meta/rows/000000000008.pending.json"
        pending.write_text("{}")
        error = self.assertRaises(
            PipelineError, convert_archive, str(self.old), str(self.new)
        )
        self.assertIn("interrupted batch", str(error))
        self.assertFalse(self.new.exists())
        pending.unlink()
        error = self.assertRaises(
            PipelineError, convert_archive, str(self.new), str(self.old)
        )
        self.assertIn("is not an archive of an older version", str(error))
        convert_archive(str(self.old), str(self.new))
        error = self.assertRaises(
            PipelineError, convert_archive, str(self.old), str(self.new)
        )
        self.assertIn("contains an archive", str(error))
