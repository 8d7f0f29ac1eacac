"""Tests of a process that is stopped while its application writes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import psycopg2

from synapse_replication.storage.schema import prepare_database
from synapse_replication.testing.servers import shared_redis
from tests.integration.deployment import DeploymentTestCase
from tests.support.forks import ForkedProcess


class StopWhileWritingTests(DeploymentTestCase):
    """The code of a server of its own writes on when the server is told to stop."""

    def start_server(self) -> ForkedProcess:
        redis = shared_redis()
        options = {
            "server_name": self.shared["server_name"],
            "dsn": self.dsn,
            "redis": [redis.host, redis.port],
            "socket": str(self.socket),
            "refused": str(self.folder / "refused"),
        }
        return self.start_module(
            "server", "tests.integration.endless_writer", json.dumps(options)
        )

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            cursor = connection.cursor()
            cursor.execute(sql)
            return cursor.fetchall()

    def test_last_rows(self) -> None:
        """
        Each row that was committed is announced, and its position is stored, before the
        process ends. The transactions that were running end, and later ones are
        refused.
        """
        self.worker["synapse_replication"]["receiving"] = {"position_check_seconds": 0}
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            prepare_database(connection.cursor())
            connection.commit()
        self.start("worker", self.worker)
        self.wait_until_up("worker")
        server = self.start_server()
        self.wait_until("a slow one", lambda: "slow" in str(self.texts("notes")))
        self.assertEqual(self.stop(server), 0, self.log_of("server"))
        committed = self.query("SELECT stream_id, note FROM notes ORDER BY stream_id")
        ((stored,),) = self.query("SELECT stream_id FROM stream_positions")
        self.assertGreaterEqual(stored, committed[-1][0])
        self.wait_until(
            "the last row", lambda: len(self.journal("notes")) >= len(committed)
        )
        delivered = [(e["token"], e["rows"][0][0]) for e in self.journal("notes")]
        self.assertEqual(delivered, committed)
        in_memory = [note for _, note in committed if note != "alone"]
        self.wait_until(
            "the last row in memory",
            lambda: len(self.journal("typing")) >= len(in_memory),
        )
        self.assertEqual(sorted(self.texts("typing")), sorted(in_memory))
        refused = json.loads((self.folder / "refused").read_text())
        self.assertEqual(len(refused), 4)
        # A transaction that is begun after the streams are closed may also come too
        # late for the database.
        self.assertLessEqual(set(refused), {"StreamClosedError", "DatabaseClosedError"})

    def texts(self, stream: str) -> list[str]:
        return [entry["rows"][0][0].strip("!:x") for entry in self.journal(stream)]
