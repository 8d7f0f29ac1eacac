"""Tests of ``follow --verify`` beside real processes."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from typing import Any

import psycopg2

from synapse_replication.testing.private_process import free_port
from tests.integration.deployment import DeploymentTestCase


class VerifyTests(DeploymentTestCase):
    """A main process, and a meter whose role may only SELECT."""

    def setUp(self) -> None:
        super().setUp()
        self.role = self.folder.name.replace("-", "_")
        self.execute(f"CREATE ROLE {self.role} IN ROLE pg_read_all_data")
        self.addCleanup(self.execute, f"DROP ROLE {self.role}")

    def execute(self, sql: str) -> None:
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            connection.cursor().execute(sql)
            connection.commit()

    def write_silently(self) -> int:
        """Commit a row of a writer that does not run; return its token."""
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            cursor = connection.cursor()
            cursor.execute(
                "INSERT INTO notes SELECT nextval('notes_seq'), 'ghost', 'lost', 0 "
                "RETURNING stream_id"
            )
            row = cursor.fetchone()
            assert row is not None
            cursor.execute(
                "INSERT INTO stream_positions VALUES ('notes', 'ghost', %s) "
                "ON CONFLICT (stream_name, instance_name) "
                "DO UPDATE SET stream_id = EXCLUDED.stream_id",
                row,
            )
            connection.commit()
        return int(row[0])

    def findings(self) -> list[dict[str, Any]]:
        text = (self.folder / "follow.out").read_bytes()
        return [
            json.loads(line)
            for line in text.splitlines(keepends=True)
            if line.endswith(b"\n")
        ]

    def test_row_that_was_never_announced(self) -> None:
        """A row that no line carried is reported, as a line, metric and total."""
        main = self.start("main", self.main)
        self.wait_until_up("main")
        self.write_silently()
        port = free_port()
        reading = {
            "database": {
                "name": "psycopg2",
                "args": {"dsn": self.dsn, "options": f"-c role={self.role}"},
            }
        }
        options = ("--verify", "--json", "--patience", "5", "--metrics-port", str(port))
        follow = self.start("follow", reading, options=options)
        self.wait_until("follow connects", lambda: "Connected" in self.log_of("follow"))
        url = f"http://127.0.0.1:{port}/metrics"
        # Rows that were written before the first check are not verified.
        self.wait_until("a check", lambda: "Verifying" in self.log_of("follow"))
        token = self.write_silently()
        self.write_upto(3)
        self.wait_until("the finding", lambda: bool(self.findings()))
        (finding,) = self.findings()
        self.assertEqual(
            (finding["stream_name"], finding["instance_name"], finding["token"]),
            ("notes", "ghost", token),
        )
        metric = "synapse_replication_unannounced_rows_total{"
        self.assertIn(metric, _get(url).decode())
        self.assertEqual(self.stop(follow), 0, self.log_of("follow"))
        summary = self.findings()[-1]["summary"]
        self.assertEqual(
            [
                (each["instance_name"], each["verified"], each["lost"])
                for each in summary["writers"]
            ],
            [("ghost", 1, 1), ("master", 3, 0)],
        )
        self.assertEqual(self.stop(main), 0, self.log_of("main"))


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        content: bytes = answer.read()
    return content
