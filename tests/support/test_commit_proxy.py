"""Tests for :mod:`tests.support.commit_proxy`."""

from __future__ import annotations

import contextlib
from unittest import mock

import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.servers import shared_postgres
from tests.support import commit_proxy
from tests.support.commit_proxy import CommitProxy


class CommitProxyTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.server = shared_postgres()
        self.dsn = self.server.new_database()
        self.proxy = CommitProxy(self.server)
        self.addCleanup(self.proxy.close)
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection, connection:
            connection.cursor().execute("CREATE TABLE numbers (number int)")

    def insert(self, number: int) -> None:
        """Insert a number through the proxy."""
        dsn = self.dsn.replace(str(self.server.directory), str(self.proxy.directory))
        with contextlib.closing(psycopg2.connect(dsn)) as connection, connection:
            connection.cursor().execute("INSERT INTO numbers VALUES (%s)", (number,))

    def test_all_passes(self) -> None:
        """Until answers are lost, and afterwards, everything is forwarded."""
        self.insert(1)
        with mock.patch.object(commit_proxy, "LOST", 1):
            self.proxy.lose(1)
            self.proxy.heal()
            self.insert(2)
        self.assertEqual((self.numbers(), self.proxy.lost), ([1, 2], 0))

    def test_lost_answer(self) -> None:
        """The connection breaks, although PostgreSQL commits."""
        with (
            mock.patch.object(commit_proxy, "LOST", 1),
            mock.patch.object(commit_proxy, "DELAYED", 0),
        ):
            self.proxy.lose(1)
            self.assertRaises(psycopg2.OperationalError, self.insert, 1)
        while not (found := self.numbers()):
            pass
        self.assertEqual((found, self.proxy.lost), ([1], 1))

    def numbers(self) -> list[int]:
        """Read the numbers from the server."""
        with (
            contextlib.closing(psycopg2.connect(self.dsn)) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("SELECT number FROM numbers ORDER BY 1")
            return [number for (number,) in cursor.fetchall()]
