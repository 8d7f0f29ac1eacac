"""Tests for :mod:`synapse_replication.pipeline.export`."""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path

from click.testing import CliRunner
from pyarrow import parquet
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.pipeline.archives import export_command
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.export import export_rows
from synapse_replication.pipeline.schemas import ARCHIVED_ROWS_SCHEMA
from synapse_replication.pipeline.spark.session import SparkJob
from tests.pipeline.archives import make_archive
from tests.pipeline.shared_session import shared_session


@functools.cache
def shared_archive() -> Path:
    """Make an archive for all of these tests, which only read it."""
    return make_archive(Path("archive-to-export").absolute())


class ExportTests(SynchronousTestCase):
    """Tests with an archive of eight rows, two streams and two days."""

    def setUp(self) -> None:
        shared_session()
        self.folder = shared_archive()
        self.out = Path(self.mktemp()).absolute()

    def export(self, format_: str, where: str | None = None) -> int:
        with SparkJob("test") as spark:
            return export_rows(str(self.folder), str(self.out), format_, where, spark)

    def files(self) -> list[Path]:
        return sorted(self.out.iterdir())

    def test_parquet(self) -> None:
        """Parquet files have the columns of the archive, and only the selected rows."""
        self.assertEqual(
            self.export("parquet", "stream = 'receipts' AND day < '2026-01-02'"), 2
        )
        tables = [parquet.read_table(path) for path in self.files()]
        rows = [row for table in tables for row in table.to_pylist()]
        self.assertEqual(list(rows[0]), ARCHIVED_ROWS_SCHEMA.names)
        self.assertEqual(
            {(r["stream"], r["stream_id"]) for r in rows},
            {("receipts", 1), ("receipts", 2)},
        )

    def test_jsonl(self) -> None:
        """
        Each line is an object with all columns; ``row`` is an array, and times are UTC.
        """
        self.assertEqual(self.export("jsonl"), 8)
        lines = [
            json.loads(line)
            for path in self.files()
            for line in path.read_text().splitlines()
        ]
        (first,) = (
            line
            for line in lines
            if line["stream_id"] == 1 and line["stream"] == "to_device"
        )
        self.assertEqual(
            first,
            {
                "stream": "to_device",
                "instance_name": "w1",
                "stream_id": 1,
                "row_index": 0,
                "row": ["@user"],
                "written_ts": "2026-01-01T12:00:00.000Z",
                "day": "2026-01-01",
            },
        )

    def test_csv(self) -> None:
        """Python's CSV module reads quoted JSON back unchanged."""
        self.assertEqual(
            self.export("csv", "stream_id = 1 AND stream = 'to_device'"), 1
        )
        rows: list[dict[str, str]] = []
        for path in self.files():
            with path.open(newline="") as file:
                rows += csv.DictReader(file)
        (row,) = rows
        self.assertEqual(row["row"], '["@user"]')
        self.assertEqual(row["written_ts"], "2026-01-01T12:00:00.000Z")

    def test_nothing_found(self) -> None:
        """If no row matches the condition, the folder is created without rows."""
        self.assertEqual(self.export("jsonl", "stream = 'none'"), 0)
        self.assertTrue(self.out.is_dir())

    def test_bad_expressions(self) -> None:
        """
        The error for an invalid condition has the reason, and no folder is created.
        """
        for where, reason in (
            ("stream =", "PARSE_SYNTAX_ERROR"),
            ("room = 'x'", "name `room` cannot be resolved"),
            ("stream_id + day", "DATATYPE_MISMATCH"),
            ("stream_id = row::INT", "CAST_INVALID_INPUT"),
        ):
            error = self.assertRaises(PipelineError, self.export, "csv", where)
            self.assertIn(reason, str(error))
            self.assertLess(len(str(error)), 700)
        self.assertEqual(list(self.out.parent.glob(f"*{self.out.name}*")), [])

    def test_stream(self) -> None:
        """
        If one stream is selected, the fields of its rows are columns, also for the
        condition.
        """
        where = "user_id >= '@user2' AND stream_id > 2"
        with SparkJob("test") as spark:
            count = export_rows(
                *(str(self.folder), str(self.out), "jsonl", where, spark),
                stream="receipts",
            )
        self.assertEqual(count, 2)
        lines = [
            json.loads(line)
            for path in self.files()
            for line in path.read_text().splitlines()
        ]
        self.assertEqual({line["room_id"] for line in lines}, {"!room"})
        error = self.assertRaises(
            PipelineError,
            export_rows,
            *(str(self.folder), "new", "csv", None, spark),
            stream="receipt",
        )
        self.assertIn("it has rows of receipts, to_device", str(error))

    def test_folder_exists(self) -> None:
        """An existing folder is left unchanged."""
        self.out.mkdir()
        error = self.assertRaises(PipelineError, self.export, "csv")
        self.assertIn("exists: give the name of a new folder", str(error))

    def test_command(self) -> None:
        """With ``--json``, the command prints the number of exported rows."""
        arguments = ["--archive", str(self.folder), "--out", str(self.out), "--json"]
        result = CliRunner().invoke(export_command, arguments, catch_exceptions=False)
        self.assertEqual(json.loads(result.stdout)["rows"], 8)
        self.assertEqual(self.files()[0].name, "rows.parquet")
