"""Tests for a column that is added to a stream while processes run."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import psycopg2

from tests.integration.deployment import (
    DeploymentTestCase,
    expected_rows,
    get_over_socket,
)


class AddedColumnTests(DeploymentTestCase):
    """``notes`` gets a column, which one process knows before the other does."""

    def setUp(self) -> None:
        super().setUp()
        self.metrics = self.folder / "metrics.sock"
        self.worker["worker_listeners"] = [
            {"type": "metrics", "path": str(self.metrics)}
        ]
        self.old = self.shared
        self.new = copy.deepcopy(self.shared)
        notes = self.new["synapse_replication"]["streams"][1]
        notes["columns"]["mood"] = "text"
        self.new_main = copy.deepcopy(self.main)
        module = self.new_main["synapse_replication"]["modules"][0]
        module["config"] |= {"more": ["glad"], "after": 10}

    def add_column(self) -> None:
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            connection.cursor().execute(
                "ALTER TABLE notes ADD COLUMN mood text NOT NULL DEFAULT 'calm'"
            )
            connection.commit()

    def restart(self, process: Any, command: str, shared: Any, own: Any) -> Any:
        self.assertEqual(self.stop(process), 0, self.log_of(command))
        self.shared = shared
        return self.start(command, own)

    def write_and_wait(self, upto: int) -> list[list[Any]]:
        """Write up to a token, and return the rows of ``notes`` in the journal."""
        self.write_upto(upto)
        self.wait_until(
            f"{upto} tokens of notes", lambda: len(self.journal("notes")) >= upto
        )
        rows = [row for entry in self.journal("notes") for row in entry["rows"]]
        self.assertEqual([row[:2] for row in rows], expected_rows(upto))
        return rows

    def discarded(self) -> list[str]:
        """Return the reader's metrics of rows that it could not decode."""
        return [
            line
            for line in get_over_socket(self.metrics, "/metrics").splitlines()
            if "undecodable" in line and not line.endswith(" 0.0")
        ]

    def test_reader_first(self) -> None:
        """A row that lacks a required column is fetched from the table."""
        main = self.start("main", self.main)
        worker = self.start("worker", self.worker)
        self.wait_until_up("worker")
        before = len(self.write_and_wait(5))
        self.add_column()
        self.restart(worker, "worker", self.new, self.worker)
        self.wait_until_up("worker", times=2)
        rows = self.write_and_wait(10)
        self.assertEqual({row[2] for row in rows[before:]}, {"calm"})
        before = len(rows)
        self.restart(main, "main", self.new, self.new_main)
        rows = self.write_and_wait(15)
        self.assertEqual({row[2] for row in rows[before:]}, {"glad"})

    def test_writer_first(self) -> None:
        """A reader skips a column that it does not know."""
        main = self.start("main", self.main)
        worker = self.start("worker", self.worker)
        self.wait_until_up("worker")
        before = len(self.write_and_wait(10))
        self.add_column()
        self.restart(main, "main", self.new, self.new_main)
        rows = self.write_and_wait(15)
        self.assertEqual({len(row) for row in rows}, {2})
        self.assertEqual(self.discarded(), [])
        before = len(rows)
        self.restart(worker, "worker", self.new, self.worker)
        rows = self.write_and_wait(20)
        self.assertEqual({row[2] for row in rows[before:]}, {"glad"})
