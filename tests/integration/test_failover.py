"""Tests with a standby that lags and is promoted, and real processes."""

from __future__ import annotations

import contextlib
import copy
import re
import subprocess
from typing import Any

import psycopg2
from typing_extensions import override

from synapse_replication.testing.servers import PrivatePostgres
from tests.integration.deployment import _SCHEMA, DeploymentTestCase


class _Standby(PrivatePostgres):
    """A standby that streams from a primary until it is cut off."""

    def __init__(self, primary: PrivatePostgres) -> None:
        super().__init__()
        self._primary = primary

    @override
    def _initdb(self) -> None:
        subprocess.run(
            [
                str(self._bin / "pg_basebackup"),
                *("-D", str(self.directory / "data"), "-R", "-X", "stream"),
                *("-c", "fast", "-d", self._primary.dsn()),
            ],
            stdin=subprocess.DEVNULL,
            check=True,
            capture_output=True,
            **self._popen_options(),
        )


def execute(dsn: str, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements, and return the rows of the last."""
    with (
        contextlib.closing(psycopg2.connect(dsn)) as connection,
        connection.cursor() as cursor,
    ):
        connection.autocommit = True
        for sql in statements:
            cursor.execute(sql)
        return cursor.fetchall() if cursor.description else []


class FailoverTests(DeploymentTestCase):
    """Main writes ``notes`` to a primary with one asynchronous standby."""

    def setUp(self) -> None:
        super().setUp()
        self.primary = PrivatePostgres()
        self.addCleanup(self.primary.stop)
        self.primary.start()
        with (self.primary.directory / "data" / "pg_hba.conf").open("a") as file:
            file.write("local replication all peer map=private\n")
        execute(self.primary.dsn(), "SELECT pg_reload_conf()")
        self.dsn = self.primary.new_database("replicated")
        execute(self.dsn, _SCHEMA)
        self.standby = _Standby(self.primary)
        self.addCleanup(self.standby.stop)
        self.standby.start()
        hosts = f"{self.primary.directory},{self.standby.directory}"
        self.shared = copy.deepcopy(self.shared)
        self.shared["database"]["args"]["dsn"] = re.sub(
            r"host=\S+", f"host={hosts} target_session_attrs=read-write", self.dsn
        )
        self.worker["synapse_replication"]["receiving"] = {"position_check_seconds": 1}

    def count(self) -> int:
        """Return the number of tokens of ``notes`` in the journal."""
        return len(self.journal("notes"))

    def test_lagging_standby(self) -> None:
        """
        Everything that the promoted standby has is delivered, although the reader had
        delivered rows that the standby does not have.
        """
        self.start("main", self.main)
        self.start("worker", self.worker)
        for name in ("main", "worker"):
            self.wait_until_up(name)
        self.write_upto(5)
        self.wait_until("5 tokens", lambda: self.count() == 5)
        standby = self.standby.dsn("replicated")
        self.wait_until(
            "the standby has them",
            lambda: (
                execute(standby, "SELECT count(DISTINCT stream_id) FROM notes")
                == [(5,)]
            ),
        )
        execute(
            self.standby.dsn(),
            "ALTER SYSTEM SET primary_conninfo = ''",
            "SELECT pg_reload_conf()",
        )
        self.wait_until(
            "the standby is cut off",
            lambda: not execute(self.standby.dsn(), "SELECT FROM pg_stat_wal_receiver"),
        )
        self.write_upto(12)
        self.wait_until("12 tokens", lambda: self.count() == 12)
        delivered = self.journal("notes")[-1]["token"]

        self.primary.kill()
        execute(self.standby.dsn(), "SELECT pg_promote()")
        self.write_upto(20)
        self.wait_until(
            "the last token",
            lambda: self.journal("notes")[-1]["rows"][0][0] == "note 20",
        )
        stored = execute(standby, "SELECT DISTINCT stream_id FROM notes ORDER BY 1")
        tokens = [entry["token"] for entry in self.journal("notes")]
        self.assertEqual(tokens, sorted(set(tokens)))
        self.assertEqual({id_ for (id_,) in stored} - set(tokens), set())
        self.assertNotIn((delivered,), stored)
