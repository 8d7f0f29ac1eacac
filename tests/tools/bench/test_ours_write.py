"""Tests for :mod:`scripts.tools.bench.ours_write`."""

from __future__ import annotations

import sys
from typing import Any

import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.bench import ours_write
from scripts.tools.bench.runner import run_measure
from synapse_replication.testing.servers import shared_postgres, shared_redis


class MeasureTests(SynchronousTestCase):
    """The measures, with few rows, in processes of their own."""

    def measure(self, name: str, **parameters: Any) -> dict[str, float]:
        self.dsn = shared_postgres().new_database()
        parameters |= {"dsn": self.dsn, "port": shared_redis().port}
        command = [sys.executable, str(ours_write.__file__)]
        return run_measure(command, name, parameters)

    def test_writes(self) -> None:
        """Every row is written, before the time is read."""
        result = self.measure("writes", rows=6, callers=2, kind="write")
        self.assertGreater(min(result["seconds"], result["cpu"]), 0)
        with psycopg2.connect(self.dsn) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM orders")
            self.assertEqual(cursor.fetchall(), [(7,)])
        connection.close()

    def test_messages(self) -> None:
        """A write in a transaction takes several messages, with more statements."""
        result = self.measure("messages", rows=20, kind="write_txn")
        self.assertLess(result["messages"], result["statements"])
        self.assertGreater(result["messages"], 2)
        self.assertLess(result["statements"], 15)
