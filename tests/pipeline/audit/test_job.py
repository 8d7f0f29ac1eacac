"""Tests for :mod:`synapse_replication.pipeline.audit.job`, with real databases."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from click.testing import CliRunner, Result
from pyarrow import dataset
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.pipeline.deployment import audit_command
from tests.pipeline.archives import archive_database
from tests.pipeline.audits import (
    artificial_database,
    healthy_lines,
    new_database,
    problems_of,
    write_recording,
)
from tests.support.recordings import FULL_RECORDING

REAL_STREAMS = Path(__file__).parents[1] / "data" / "real_streams.sql.gz"


@functools.cache
def real_dsn() -> str:
    """Create the database of a real deployment, up to the end of its recording."""
    return new_database(gzip.decompress(REAL_STREAMS.read_bytes()).decode())


class AuditTests(SynchronousTestCase):
    """Tests for the whole job."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()

    def audit(self, dsn: str, *args: str | Path) -> Result:
        return CliRunner().invoke(
            audit_command, ["--dsn", dsn, *map(str, args)], catch_exceptions=False
        )

    def test_the_real_deployment(self) -> None:
        """The only error found is the row that the real deployment lost."""
        result = self.audit(real_dsn(), "--recording", FULL_RECORDING, "--json")

        self.assertEqual(result.exit_code, 1)
        (found,) = problems_of(result).values()
        evidence = found.pop("evidence")
        (event, state) = evidence.pop("rows")
        self.assertEqual(
            {name: found[name] for name in found if name != "message"},
            {
                "kind": "announced_absent",
                "severity": "error",
                "stream": "events",
                "instance_name": "event_persister1",
                "first_token": 1848,
                "last_token": 1848,
                "count": 1,
            },
        )
        self.assertEqual(
            evidence,
            {
                "recording": "startup_drive.jsonl.xz",
                "line_number": 9565,
                "t": 2450.995,
                "line": "POSITION events event_persister1 1847 1848",
                "tables": ["events", "ex_outlier_stream", "current_state_delta_stream"],
            },
        )
        self.assertEqual(json.loads(event["row"])[0], "ev")
        self.assertEqual(json.loads(state["row"])[0], "state")

    def test_healthy(self) -> None:
        """A healthy deployment has only notes, and the exit status is 0."""
        path = self.folder / "healthy.jsonl"
        write_recording(path, healthy_lines())
        out = self.folder / "out"

        result = self.audit(artificial_database(), "--recording", path, "--out", out)

        self.assertIn("\n0 errors, 0 warnings, ", result.stdout)
        self.assertRegex(
            result.stdout, r"id_without_row +device_lists|id_without_row +presence"
        )
        self.assertEqual(result.exit_code, 0)
        self.assertEqual(
            sorted(path.name for path in out.iterdir() if path.is_file()),
            ["findings.json", "findings.parquet"],
        )
        parquet = dataset.dataset(out / "findings.parquet").to_table().to_pylist()
        lines = [
            json.loads(line)
            for line in (out / "findings.json").read_text().splitlines()
        ]
        self.assertEqual(len(parquet), len(lines))
        self.assertEqual(
            {each["kind"] for each in parquet}, {each["kind"] for each in lines}
        )

    def test_damage(self) -> None:
        """Each kind of damage is reported with its stream; the exit status is 1."""
        dsn = artificial_database(
            "SELECT setval('receipts_sequence', 2)",
            "UPDATE stream_positions SET stream_id = 21 "
            "WHERE stream_name = 'to_device'",
            "UPDATE stream_positions SET stream_id = 10 WHERE stream_name = 'backfill'",
            "INSERT INTO current_state_delta_stream VALUES "
            "(5, '!r', 'm.room.name', '', '$x', 'p2')",
            "INSERT INTO thread_subscriptions VALUES (9, 'master', '!r', '$r', '@c:x')",
            # A committed row beyond all positions of its stream.
            "INSERT INTO sticky_events VALUES (9, 'p1', '$lost', '!r')",
            "UPDATE stream_positions SET stream_id = 2 "
            "WHERE stream_name = 'sticky_events'",
        )
        lines = healthy_lines()
        lines.append("RDATA push_rules master 3 []")
        lines.append("RDATA presence master 3 []")
        lines.append("POSITION sticky_events p1 25 25")
        path = self.folder / "damaged.jsonl"
        write_recording(path, lines)
        path.write_text("nonsense\n" + path.read_text())
        archive = self._archive(dsn)

        result = self.audit(dsn, "--recording", path, "--archive", archive, "--json")

        self.assertEqual(result.exit_code, 1)
        found = problems_of(result)
        self.assertEqual(
            set(found),
            {
                ("sequence_behind", "receipts"),
                ("token_ahead", "receipts"),
                ("position_ahead", "receipts"),
                ("position_ahead", "to_device"),
                ("position_wrong_sign", "backfill"),
                ("id_of_two_writers", "events"),
                ("announced_absent", "thread_subscriptions"),
                ("announced_absent", "sticky_events"),
                ("row_twice_on_wire", "push_rules"),
                ("row_out_of_order", "presence"),
                ("token_ahead", "sticky_events"),
                ("recording_damaged", None),
                ("row_twice_in_archive", "profile_updates"),
                ("row_not_archived", "caches"),
            },
        )
        ahead = found["position_ahead", "to_device"]
        self.assertEqual(
            (ahead["instance_name"], ahead["first_token"], ahead["last_token"]),
            ("w", 21, 21),
        )
        behind = found["sequence_behind", "receipts"]
        self.assertEqual((behind["first_token"], behind["last_token"]), (3, 4))
        self.assertIn("setval", behind["evidence"]["hint"][0])
        lost = found["announced_absent", "thread_subscriptions"]
        self.assertEqual(
            lost["evidence"]["line"], "POSITION thread_subscriptions master 2 10"
        )
        # The row is shown from both tables and archive.
        self.assertEqual(
            [
                (row["source"], row["stream_id"], json.loads(row["row"]))
                for row in lost["evidence"]["rows"]
            ],
            [("archive", 9, ["@c:x", "!r", "$r"]), ("tables", 9, ["@c:x", "!r", "$r"])],
        )
        lost = found["announced_absent", "sticky_events"]
        self.assertEqual(
            [
                (row["source"], row["stream_id"], json.loads(row["row"]))
                for row in lost["evidence"]["rows"]
            ],
            [("tables", 9, ["!r", "$lost"])],
        )

    def test_no_database(self) -> None:
        """
        Without a database, the error names the missing option; the exit status is 2.
        """
        result = CliRunner().invoke(audit_command, [], env={})

        self.assertEqual(result.exit_code, 2)
        self.assertIn("--dsn", result.output)

    def test_cannot_be_read(self) -> None:
        """
        If the database or the archive cannot be read, this is reported immediately,
        with exit status 2 instead of 1.
        """
        for args in (
            ["--dsn", "host=127.0.0.1 port=1 password=hush"],
            ["--dsn", real_dsn(), "--archive", self.folder],
        ):
            result = CliRunner().invoke(audit_command, [*map(str, args)])
            self.assertEqual(result.exit_code, 2)
            self.assertRegex(result.output, "cannot be reached|is not an archive")
            self.assertNotIn("hush", result.output)

    def _archive(self, dsn: str) -> Path:
        """Make an archive that contains one row twice and lacks another row."""

        def change(stream: str, batch: pa.RecordBatch) -> pa.Table:
            rows = pa.Table.from_batches([batch])
            if stream == "caches":
                return rows.filter(pc.not_equal(rows["stream_id"], 4))
            if stream == "profile_updates":
                twice = rows.filter(pc.equal(rows["stream_id"], 2))
                return pa.concat_tables([rows, twice])
            return rows

        folder = self.folder / "archive"
        archive_database(folder, dsn, change)
        return folder
