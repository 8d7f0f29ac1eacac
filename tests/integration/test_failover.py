"""Tests with a standby that lags and is promoted, and real processes."""

from __future__ import annotations

import contextlib
import copy
import re
import subprocess
from typing import Any

import psycopg2

from synapse_replication.app.position_check import JITTER
from synapse_replication.testing.servers import PrivatePostgres, shared_postgres
from tests.integration.deployment import _SCHEMA, DeploymentTestCase


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


class SetBackTestCase(DeploymentTestCase):
    """Main writes ``notes``, and a reader compares its positions often."""

    def setUp(self) -> None:
        super().setUp()
        # wait_for_read() would take a comparison of main for one of the reader.
        for config, seconds in ((self.main, 0), (self.worker, 1)):
            config["synapse_replication"]["receiving"] = {
                "position_check_seconds": seconds
            }

    def count(self) -> int:
        """Return the number of tokens of ``notes`` in the journal."""
        return len(self.journal("notes"))

    def deliver_upto(self, count: int) -> int:
        """Write notes, and wait until all are delivered; return the last token."""
        self.write_upto(count)
        self.wait_until(
            f"note {count}",
            lambda: (
                bool(self.journal("notes"))
                and self.journal("notes")[-1]["rows"][0][0] == f"note {count}"
            ),
        )
        token: int = self.journal("notes")[-1]["token"]
        return token

    def wait_for_read(self) -> None:
        """Wait until the reader has compared its positions with the database.

        It records them before the query, by at most :data:`JITTER` of its interval of
        1 s.
        """
        ((began,),) = execute(self.dsn, f"SELECT now() + interval '{JITTER} s'")
        self.wait_until(
            "a comparison",
            lambda: bool(
                execute(
                    self.dsn,
                    "SELECT 1 FROM pg_stat_activity WHERE query LIKE "
                    "'%pg_walfile_name%' AND state = 'idle' "
                    f"AND query_start > '{began}'",
                )
            ),
        )

    def check(self, dsn: str, delivered: int | None) -> None:
        """Check that all rows of the database arrived in order.

        :param delivered: the last token that is not in the database any more; it must
            be reported.
        """
        stored = {
            id_ for (id_,) in execute(dsn, "SELECT DISTINCT stream_id FROM notes")
        }
        tokens = [entry["token"] for entry in self.journal("notes")]
        self.assertEqual(tokens, sorted(set(tokens)))
        self.assertEqual(stored - set(tokens), set())
        if delivered is None:
            self.assertEqual(stored, set(tokens))
            return
        self.assertNotIn(delivered, stored)
        kept = max(id_ for id_ in stored if id_ < delivered)
        self.wait_until(
            "the report of the range",
            lambda: (
                f"master of notes is stored at {kept}, but rows up to {delivered} "
                "were delivered" in self.log_of("worker")
            ),
        )


class RestoreTests(SetBackTestCase):
    """The database is set back while both processes run."""

    def test_restored(self) -> None:
        """A backup is restored; the rows since then are reported."""
        self.start_both()
        self.deliver_upto(5)
        backup = self.folder / "backup.sql"
        programs = shared_postgres()._bin
        dump = [*map(str, (programs / "pg_dump", "--clean", "-f", backup)), self.dsn]
        subprocess.run(dump, check=True, capture_output=True)
        delivered = self.deliver_upto(12)
        self.wait_for_read()
        restore = [*map(str, (programs / "psql", "-1", "-q", "-f", backup)), self.dsn]
        subprocess.run(restore, check=True, capture_output=True)
        self.deliver_upto(20)
        self.check(self.dsn, delivered)

    def test_sequence(self) -> None:
        """A sequence is set back; the writer advances it, and no row is lost."""
        self.start_both()
        self.deliver_upto(12)
        execute(self.dsn, "SELECT setval('notes_seq', 3)")
        self.deliver_upto(20)
        self.check(self.dsn, None)


class FailoverTests(SetBackTestCase):
    """Main writes ``notes`` to a primary with one asynchronous standby."""

    def setUp(self) -> None:
        super().setUp()
        self.primary = PrivatePostgres()
        self.addCleanup(self.primary.stop)
        self.primary.start()
        self.dsn = self.primary.new_database("replicated")
        execute(self.dsn, _SCHEMA)
        self.standby = PrivatePostgres(primary=self.primary)
        self.addCleanup(self.standby.stop)
        self.standby.start()
        hosts = f"{self.primary.directory},{self.standby.directory}"
        self.shared = copy.deepcopy(self.shared)
        self.shared["database"]["args"]["dsn"] = re.sub(
            r"host=\S+", f"host={hosts} target_session_attrs=read-write", self.dsn
        )

    def test_lagging_standby(self) -> None:
        """
        Everything that the promoted standby has is delivered, although the reader had
        delivered rows that the standby does not have.
        """
        self.start_both()
        self.deliver_upto(5)
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
            lambda: (
                not execute(self.standby.dsn(), "SELECT 1 FROM pg_stat_wal_receiver")
            ),
        )
        delivered = self.deliver_upto(12)
        self.wait_for_read()

        self.primary.kill()
        self.standby.promote()
        self.deliver_upto(20)
        self.check(standby, delivered)
