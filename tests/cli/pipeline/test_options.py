"""Tests for :mod:`synapse_replication.cli.pipeline.options`."""

from __future__ import annotations

from pathlib import Path

import click
from click.testing import CliRunner, Result
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.pipeline.options import (
    DSN_VARIABLE,
    json_option,
    master_option,
    optional_source_options,
    source_options,
)
from synapse_replication.pipeline.settings import PipelineSettings


@click.command()
@source_options
@master_option
@json_option
def strict(settings: PipelineSettings, master: str | None, as_json: bool) -> None:
    """A command that requires a database."""
    click.echo(f"{settings.conninfo['dbname']} {master} {as_json}")


@click.command()
@optional_source_options
def lenient(settings: PipelineSettings | None) -> None:
    """A command with an optional database."""
    click.echo(str(settings))


def run(command: click.Command, *args: str, environment: str | None = None) -> Result:
    """Run a command in an environment that has only this DSN."""
    return CliRunner().invoke(command, args, env={DSN_VARIABLE: environment})


class SourceOptionsTests(SynchronousTestCase):
    """Tests for selecting the database of a command."""

    def test_dsn(self) -> None:
        """The values of the options are passed to the command."""
        done = run(strict, "--dsn", "dbname=a", "--master", "local[2]", "--json")
        self.assertEqual(done.output, "a local[2] True\n")

    def test_environment(self) -> None:
        """Without ``--dsn``, the database is taken from the environment."""
        self.assertEqual(run(strict, environment="dbname=b").output, "b None False\n")
        both = run(strict, "--dsn", "dbname=a", environment="dbname=b")
        self.assertEqual(both.output, "a None False\n")

    def test_config_wins_over_environment(self) -> None:
        """A configuration file takes precedence over the environment."""
        path = Path(self.mktemp())
        path.write_text(
            "server_name: example.org\n"
            "database: {name: psycopg2, args: {dbname: of_file}}\n"
        )
        done = run(strict, "-c", str(path), environment="dbname=b")
        self.assertEqual(done.output, "of_file None False\n")

    def test_both(self) -> None:
        """Passing both ``-c`` and ``--dsn`` is an error."""
        done = run(strict, "-c", "x.yaml", "--dsn", "dbname=a")
        self.assertEqual(done.exit_code, 2)
        self.assertIn("use -c or --dsn, not both", done.output)

    def test_none(self) -> None:
        """Without a database, the error lists the three ways to specify one."""
        done = run(strict)
        self.assertEqual(done.exit_code, 2)
        for way in ("-c", "--dsn", DSN_VARIABLE):
            self.assertIn(way, done.output)
        self.assertEqual(run(lenient).output, "None\n")

    def test_bad_dsn(self) -> None:
        """The error for an invalid DSN does not contain the DSN."""
        done = run(strict, "--dsn", "password=hush hush")
        self.assertEqual(done.exit_code, 2)
        self.assertIn("the dsn cannot be read", done.output)
        self.assertNotIn("hush", done.output)

    def test_missing_config(self) -> None:
        """The error for a missing configuration file names the file."""
        done = run(strict, "-c", "/nonexistent.yaml")
        self.assertEqual(done.exit_code, 2)
        self.assertIn("/nonexistent.yaml", done.output)

    def test_password_is_not_shown(self) -> None:
        """The ``repr`` of the settings does not contain the password."""
        self.assertNotIn("hush", run(lenient, "--dsn", "password=hush").output)
