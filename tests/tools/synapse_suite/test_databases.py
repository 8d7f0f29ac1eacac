"""Tests for dropping databases that tests still use."""

from __future__ import annotations

import contextlib

import psycopg2
import psycopg2.extensions
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.synapse_suite.databases import terminate_blocking_sessions
from synapse_replication.testing.servers import shared_postgres


class TerminateBlockingSessionsTests(SynchronousTestCase):
    """Tests for terminate_blocking_sessions."""

    def connect(self, dsn: str) -> psycopg2.extensions.connection:
        """Return a connection that is closed after the test."""
        connection = psycopg2.connect(dsn)
        self.addCleanup(connection.close)
        connection.autocommit = True
        return connection

    def test_terminates(self) -> None:
        """
        A session blocks the removal of its database until it is terminated; sessions of
        other databases go on, even if their name starts with the same name.
        """
        server = shared_postgres()
        admin = self.connect(server.dsn())
        # A database that is not dropped here is removed with the server.
        with admin.cursor() as cursor:
            for name in ("left_open", "left_open_2"):
                cursor.execute(f"CREATE DATABASE {name}")
            blocking = self.connect(server.dsn("left_open"))
            other = self.connect(server.dsn("left_open_2"))
            with terminate_blocking_sessions(server.dsn()):
                cursor.execute("DROP DATABASE IF EXISTS left_open;")
        with (
            self.assertRaises(psycopg2.OperationalError),
            blocking.cursor() as cursor,
        ):
            cursor.execute("SELECT 1")
        with contextlib.closing(other.cursor()) as cursor:
            cursor.execute("SELECT 1")
            self.assertEqual(cursor.fetchone(), (1,))
