"""Tests for :mod:`synapse_replication.cli.database`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

import psycopg2
import psycopg2.extensions
import yaml
from click.testing import CliRunner, Result
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.main import cli
from synapse_replication.testing.servers import shared_postgres
from tests.storage.doubles import PostgresMixin
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


class PositionsCommandTests(PostgresMixin, SynchronousTestCase):
    """Tests for the commands, on a real database."""

    def setUp(self) -> None:
        self.make_database()
        self.addCleanup(self.connection.close)
        self.write_rows("master", 5)
        self.set_sequence(5)
        self.store(master=5)
        self.config = self.write_config(psycopg2.extensions.parse_dsn(self.dsn))

    def write_config(self, arguments: dict[str, str]) -> str:
        path = Path(self.mktemp())
        stream = {
            "name": "foobar", "table": "foobar", "id_column": "stream_id",
            "writer_column": "instance_name", "sequence": "foobar_seq",
            "columns": {"data": "text?"}, "writers": ["master"],
        }  # fmt: skip
        config = {
            "server_name": "example.org",
            "database": {"name": "psycopg2", "args": arguments},
            "redis": {"enabled": True},
            "synapse_replication": {"streams": [stream]},
        }
        path.write_text(json.dumps(config), "utf-8")
        return str(path)

    def run_command(self, *arguments: str) -> Result:
        return CliRunner().invoke(
            cli, ["positions", *arguments, "-c", self.config], catch_exceptions=False
        )

    def test_show(self) -> None:
        """The table has a row for each stream and writer."""
        result = self.run_command("show")
        self.assertEqual(result.exit_code, 0, result.output)
        self.assertRegex(result.output, r"foobar .* 5 .* 5 .* master .* 5 .* 0")

    def test_check(self) -> None:
        """
        Without problems, the exit status is 0; otherwise, it is 1, and SQL for the
        repair is shown.
        """
        self.assertEqual(self.run_command("check").exit_code, 0)
        self.write_rows("master", 9)
        result = self.run_command("check")
        self.assertEqual(result.exit_code, 1)
        self.assertIn("table foobar contains 9", result.output)
        self.assertIn("SELECT setval('\"foobar_seq\"', GREATEST(", result.output)

    def test_names(self) -> None:
        """A writer's name can neither control the terminal nor be markup."""
        self.store(**{"w\u202e[red]": 2})
        for command in ("show", "check"):
            output = self.run_command(command).output
            self.assertIn(r"w\u202e[red]", output)
            self.assertNotIn("\u202e", output)

    def test_repair(self) -> None:
        """A dry run changes nothing; a repair makes the reported changes."""
        self.store(gone=2)
        dry = self.run_command("repair", "--dry-run")
        self.assertIn("nothing was changed", dry.output)
        self.assertIn("gone", self.stored())
        result = self.run_command("repair")
        self.assertEqual(result.exit_code, 0, result.output)
        self.assertIn("repaired: 1", result.output)
        self.assertEqual(self.stored(), {"master": 5})
        self.assertIn("nothing to repair", self.run_command("repair").output)

    def test_repair_to_seen_id(self) -> None:
        """
        A sequence is advanced to the id that a reader has received, unless the id is
        implausible.
        """
        result = self.run_command("repair", "--seen", "foobar=50")
        self.assertEqual(result.exit_code, 0, result.output)
        self.assertIn("is at 50", result.output)
        result = self.run_command("repair", "--seen", "foobar=20")
        self.assertIn("is at 50", result.output)
        result = self.run_command("repair", "--seen", f"foobar={2**62}")
        self.assertEqual(result.exit_code, 2)
        self.assertIn("would use up the ids in between", result.output)
        for wrong in ("foobar", "foobar=x", f"foobar={'9' * 5000}"):
            result = self.run_command("repair", "--seen", wrong)
            self.assertIn("write STREAM=POSITION", result.output)
            self.assertEqual(result.exit_code, 2)
        twice = "--seen", "foobar=60", "--seen", "foobar=70"
        result = self.run_command("repair", *twice)
        self.assertIn("there are two positions of foobar", result.output)
        result = self.run_command("repair", "--seen", "nothing=5")
        self.assertEqual(result.exit_code, 2)
        # If one position is refused, no sequence is advanced.
        both = "--seen", "foobar=60", "--seen", "nothing=5"
        self.assertEqual(self.run_command("repair", *both).exit_code, 2)
        result = self.run_command("repair", "--seen", "foobar=20")
        self.assertIn("is at 50", result.output)

    def test_no_database(self) -> None:
        """
        If the database cannot be reached, the error is printed, and the exit status is
        2.
        """
        self.config = self.write_config({"host": "/nonexistent", "dbname": "x"})
        result = self.run_command("check")
        self.assertEqual(result.exit_code, 2)
        self.assertIn("cannot connect to the database", result.output)
