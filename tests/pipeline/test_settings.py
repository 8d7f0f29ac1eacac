"""Tests for :mod:`synapse_replication.pipeline.settings`."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.settings import PipelineSettings

_SERVER = "server_name: hs.example\n"
_DATABASE = """
database:
  name: psycopg2
  args: {host: db.example, dbname: synapse, user: u, password: hush}
"""
_STREAMS = """
instance_map: {main: {host: localhost, port: 9092}, w1: {host: localhost, port: 9093}}
stream_writers: {events: [w1]}
"""


class DsnTests(SynchronousTestCase):
    """Tests for settings from a libpq connection string."""

    def test_forms(self) -> None:
        """The key-value form and the URI form result in the same settings."""
        expected = {"host": "h", "port": "5", "dbname": "d", "user": "u"}
        for dsn in ("host=h port=5 dbname=d user=u", "postgresql://u@h:5/d"):
            settings = PipelineSettings.of_dsn(dsn)
            self.assertEqual(settings.conninfo, expected)
            self.assertEqual((settings.writers, settings.declared), ({}, ()))

    def test_not_repeated(self) -> None:
        """
        The error for an invalid connection string does not contain the string, which
        may include a password.
        """
        with self.assertRaises(PipelineError) as caught:
            PipelineSettings.of_dsn("password hush")
        self.assertIn("'postgresql://user@host:port/dbname'", str(caught.exception))
        self.assertNotIn("hush", str(caught.exception))
        self.assertIsNone(caught.exception.__cause__)

    def test_not_shown(self) -> None:
        """The ``repr`` of the settings does not contain the password."""
        self.assertNotIn("hush", repr(PipelineSettings.of_dsn("host=h password=hush")))


class ConfigTests(SynchronousTestCase):
    """Tests for settings from the configuration of a homeserver."""

    def write(self, *texts: str) -> list[str]:
        folder = Path(self.mktemp())
        folder.mkdir()
        paths = []
        for number, text in enumerate(texts):
            path = folder / f"{number}.yaml"
            path.write_text(text)
            paths.append(str(path))
        return paths

    def test_several_files(self) -> None:
        """Database and writers may come from different files."""
        settings = PipelineSettings.of_config(self.write(_SERVER + _STREAMS, _DATABASE))
        self.assertEqual(settings.conninfo["host"], "db.example")
        self.assertEqual(settings.conninfo["password"], "hush")
        self.assertEqual(settings.writers["events"], ("w1",))
        self.assertEqual(settings.declared, ())

    def test_no_database(self) -> None:
        """
        If no file configures a database, the error names the files and the missing key.
        """
        paths = self.write(_SERVER)
        with self.assertRaises(PipelineError) as caught:
            PipelineSettings.of_config(paths)
        self.assertIn(paths[0], str(caught.exception))
        self.assertIn("psycopg2", str(caught.exception))

    def test_invalid_configuration(self) -> None:
        """
        An invalid configuration raises PipelineError, which names the invalid key.
        """
        paths = self.write(_SERVER + _DATABASE + "stream_writers: 7\n")
        with self.assertRaises(PipelineError) as caught:
            PipelineSettings.of_config(paths)
        self.assertIn("stream_writers", str(caught.exception))
