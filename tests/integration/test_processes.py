"""Tests for main and workers as real processes, with private servers."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import time
from functools import partial
from typing import Any

import psycopg2

from synapse_replication.testing.private_process import free_port
from synapse_replication.testing.servers import shared_redis
from tests.integration.deployment import (
    PATIENCE,
    DeploymentTestCase,
    expected_rows,
    get_over_socket,
)


class DescriptorTests(DeploymentTestCase):
    def test_too_few(self) -> None:
        """A process that may open too few files refuses to start, and says so."""
        self.start("main", self.main)
        self.wait_until_up("main")
        self.kill_all()
        files = [part for n in "01" for part in ("-c", self.folder / f"main.{n}.yaml")]
        command = [sys.executable, "-m", "synapse_replication.cli.main", "main", *files]
        for limit in (7, 8, 9, 10, 12, 31):
            limits = (limit, limit)
            found = subprocess.run(
                command,
                preexec_fn=partial(resource.setrlimit, resource.RLIMIT_NOFILE, limits),
                capture_output=True,
                timeout=PATIENCE,
                text=True,
            )
            self.assertNotEqual(found.returncode, 0)
            self.assertIn("limit of open files", found.stderr)
            self.assertNotIn("Traceback", found.stderr)


class ProcessTests(DeploymentTestCase):
    def test_rows_and_an_orderly_stop(self) -> None:
        """Rows arrive in order, and a worker that stops sends CLEAR_USER_SYNC."""
        follow = self.start("follow", options=("--json",))
        self.wait_until("follow connects", lambda: "Connected" in self.log_of("follow"))
        worker = self.start("worker", self.worker)
        main = self.start("main", self.main)
        self.wait_until_up("worker")
        self.wait_until_linked("main")
        self.write_upto(20)
        self.wait_for_rows(20)
        self.assertEqual(self.stop(worker), 0, self.log_of("worker"))

        def seen() -> list[dict[str, Any]]:
            text = (self.folder / "follow.out").read_bytes()
            return [
                json.loads(line)
                for line in text.splitlines(keepends=True)
                if line.endswith(b"\n")
            ]

        self.wait_until(
            "CLEAR_USER_SYNC is seen",
            lambda: any(entry["command"] == "CLEAR_USER_SYNC" for entry in seen()),
        )
        self.assertEqual(self.stop(main), 0, self.log_of("main"))
        self.assertEqual(self.stop(follow), 0, self.log_of("follow"))
        rows = [
            entry["row"]
            for entry in seen()
            if (entry["command"], entry.get("stream_name")) == ("RDATA", "notes")
        ]
        self.assertEqual(rows, expected_rows(20))

    def test_row_that_was_never_announced(self) -> None:
        """A row whose writer dies before it announces it arrives from the database."""
        self.worker["synapse_replication"]["receiving"] = {"position_check_seconds": 1}
        main = self.start("main", self.main)
        self.start("worker", self.worker)
        self.wait_until_up("worker")
        self.write_upto(3)
        self.wait_for_rows(3)
        main.kill()
        main.wait()
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            connection.autocommit = True
            cursor = connection.cursor()
            cursor.execute(
                "INSERT INTO notes SELECT nextval('notes_seq'), 'master', 'last', 0"
            )
            cursor.execute(
                "UPDATE stream_positions SET stream_id = (SELECT max(stream_id) "
                "FROM notes) WHERE stream_name = 'notes'"
            )
        self.wait_until(
            "the row arrives",
            lambda: self.journal("notes")[-1]["rows"] == [["last", 0]],
        )
        self.assertIn("has stored position", self.log_of("worker"))

    def test_killed_worker_resumes(self) -> None:
        """A restarted worker gets the missed rows, each of them once."""
        main = self.start("main", self.main)
        worker = self.start("worker", self.worker)
        self.wait_until_up("worker")
        self.write_upto(10)
        self.wait_for_rows(10)
        worker.kill()
        worker.wait()
        self.write_upto(30)
        self.start("worker", self.worker)
        self.wait_until_up("worker", 2)
        self.wait_for_rows(30)
        self.assertEqual(self.stop(main), 0, self.log_of("main"))

    def test_resumes_from_the_memory_of_the_writer(self) -> None:
        """
        A restarted worker gets the missed rows from main's backlog, each of them once.
        """
        metrics = self.folder / "metrics.sock"
        self.worker["worker_listeners"] = [{"type": "metrics", "path": str(metrics)}]
        main = self.start("main", self.main)
        worker = self.start("worker", self.worker)
        self.wait_until_up("worker")
        self.write_upto(10)
        self.wait_for_rows(10)
        worker.kill()
        worker.wait()
        metrics.unlink(missing_ok=True)
        self.write_upto(30)
        self.start("worker", self.worker)
        self.wait_until_up("worker", 2)
        self.wait_for_rows(30)
        resyncs = [
            line
            for line in get_over_socket(metrics, "/metrics").splitlines()
            if line.startswith("synapse_replication_resyncs_total")
            and 'stream_name="notes"' in line
        ]
        self.assertEqual(len(resyncs), 1, resyncs)
        self.assertIn('kind="partial"', resyncs[0])
        self.assertEqual(self.stop(main), 0, self.log_of("main"))

    def test_second_worker_of_a_name(self) -> None:
        """Two workers with the same name are reported within seconds."""
        self.start("main", self.main)
        self.start("worker", self.worker)
        self.wait_until_up("worker")
        del self.worker["synapse_replication"]
        self.start("worker", self.worker)
        started = time.monotonic()
        self.wait_until(
            "the report",
            lambda: (
                "Two processes are called reader1" in self.log_of("worker")
                and "Two processes are called reader1" in self.log_of("main")
            ),
        )
        self.assertLess(time.monotonic() - started, 30)

    def test_direct_tcp(self) -> None:
        """Without Redis, a worker gets its rows from main over direct TCP."""
        port = free_port()
        del self.shared["redis"]
        self.shared["worker_replication_port"] = port
        self.main["listeners"].append(
            {"type": "replication", "port": port, "bind_addresses": ["127.0.0.1"]}
        )
        main = self.start("main", self.main)
        worker = self.start("worker", self.worker)
        self.wait_until_up("main")
        self.wait_until_up("worker")
        self.write_upto(10)
        self.wait_for_rows(10)
        self.assertEqual(self.stop(worker), 0, self.log_of("worker"))
        self.assertEqual(self.stop(main), 0, self.log_of("main"))

    def test_second_worker_of_a_name_over_direct_tcp(self) -> None:
        """Without Redis, main also reports two workers with the same name."""
        port = free_port()
        del self.shared["redis"]
        self.shared["worker_replication_port"] = port
        self.main["listeners"].append(
            {"type": "replication", "port": port, "bind_addresses": ["127.0.0.1"]}
        )
        self.start("main", self.main)
        self.start("worker", self.worker)
        self.wait_until_up("worker")
        del self.worker["synapse_replication"]
        self.start("worker", self.worker)
        self.wait_until(
            "the report",
            lambda: "Two processes are called reader1" in self.log_of("main"),
        )

    def test_port_in_use(self) -> None:
        """A process whose port is in use logs it with a hint, and exits with 1."""
        port = shared_redis().port
        self.main["listeners"].append(
            {
                "type": "metrics",
                "port": port,
                "bind_addresses": [shared_redis().host],
            }
        )
        main = self.start("main", self.main)
        self.assertEqual(main.wait(PATIENCE), 1)
        self.assertIn("Address already in use", self.log_of("main"))
        self.assertIn("choose a free port", self.log_of("main"))
        self.assertNotIn("Traceback", self.log_of("main"))
