"""Tests for :mod:`synapse_replication.cli.init_db`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import psycopg2
import yaml
from click.testing import CliRunner

from synapse_replication.cli.main import cli
from synapse_replication.testing.servers import shared_postgres
from tests.support.config_files import FilesMixin


class InitDbTests(FilesMixin):
    def run_on(self, database: Mapping[str, object]) -> tuple[int, str]:
        path = self.write(
            "hs.yaml",
            yaml.safe_dump(
                {
                    "server_name": "x.test",
                    "database": dict(database),
                    "redis": {"enabled": True},
                    "synapse_replication": {"streams": []},
                }
            ),
        )
        result = CliRunner().invoke(cli, ["init-db", "-c", path])
        return result.exit_code, result.output

    def test_twice(self) -> None:
        """The first run creates the table; the second changes nothing."""
        dsn = shared_postgres().new_database()
        database = {"name": "psycopg2", "args": {"dsn": dsn}}
        status, output = self.run_on(database)
        self.assertEqual(status, 0, output)
        self.assertIn("applied", output)
        with contextlib.closing(psycopg2.connect(dsn)) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT count(*) FROM stream_positions")
            self.assertEqual(cursor.fetchone(), (0,))
        status, output = self.run_on(database)
        self.assertEqual(
            (status, output), (0, "The database is ready: nothing to do.\n")
        )

    def test_no_connection(self) -> None:
        """
        If the database cannot be reached, one message is printed, and the exit status
        is 2.
        """
        args = {"host": "/nowhere", "dbname": "x"}
        status, output = self.run_on({"name": "psycopg2", "args": args})
        self.assertEqual(status, 2)
        self.assertIn("cannot connect to the database", output)

    def test_no_database(self) -> None:
        """If no PostgreSQL database is configured, the error says what to add."""
        status, output = self.run_on({"name": "sqlite3"})
        self.assertEqual(status, 2)
        self.assertIn("add the section 'database'", output)
