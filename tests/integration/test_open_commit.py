"""Tests with a writer that is killed during a commit, with real processes."""

from __future__ import annotations

import psycopg2

from tests.integration.deployment import DeploymentTestCase, expected_rows

_KEY = 1

#: Let commits of rows of ``notes`` wait while another session holds an advisory lock.
_SLOW_COMMITS = f"""
    CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN PERFORM pg_advisory_xact_lock_shared({_KEY}); RETURN NULL; END
    $$;
    CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON notes
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait()
"""


class OpenCommitTests(DeploymentTestCase):
    """Main writes ``notes``."""

    def setUp(self) -> None:
        super().setUp()
        self.connection = psycopg2.connect(self.dsn)
        self.addCleanup(self.connection.close)
        self.connection.autocommit = True
        self.execute(_SLOW_COMMITS)

    def execute(self, statement: str) -> None:
        self.connection.cursor().execute(statement)

    def wait_for_session(self, condition: str) -> None:
        """Wait for a session of the database for which a condition holds."""
        cursor = self.connection.cursor()

        def exists() -> bool:
            cursor.execute(
                "SELECT FROM pg_stat_activity WHERE datname = current_database() "
                f"AND pid <> pg_backend_pid() AND {condition}"
            )
            return cursor.rowcount > 0

        self.wait_until(condition, exists)

    def test_killed_during_a_commit(self) -> None:
        """
        A row that the database commits after its writer has started again is received.
        """
        main = self.start("main", self.main)
        self.start("worker", self.worker)
        for name in ("main", "worker"):
            self.wait_until_up(name)
        self.write_upto(2)
        self.wait_for_rows(2)
        self.execute(f"SELECT pg_advisory_lock({_KEY})")
        self.write_upto(3)
        self.wait_for_session("query LIKE '%COMMIT' AND wait_event = 'advisory'")
        main.kill()
        main.wait()
        self.main["synapse_replication"]["modules"][0]["config"]["after"] = 3
        self.start("main", self.main)
        self.wait_for_session(
            "query LIKE '%INSERT INTO synapse_replication_writers%' "
            "AND wait_event_type = 'Lock'"
        )
        self.execute(f"SELECT pg_advisory_unlock({_KEY})")
        self.wait_until_up("main", 2)
        self.wait_until("the row", lambda: len(self.journal("notes")) >= 3)
        rows = [row for entry in self.journal("notes") for row in entry["rows"]]
        self.assertEqual(rows, expected_rows(3))
