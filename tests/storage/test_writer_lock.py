"""Tests for :mod:`synapse_replication.storage.writer_lock`, on a real server."""

from __future__ import annotations

from typing import Any
from unittest import mock

import psycopg2
from twisted.internet.defer import Deferred, fail
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from synapse_replication.errors import StorageError
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.timer import Backoff
from synapse_replication.storage import database as database_module, writer_lock
from synapse_replication.storage.database import Database
from synapse_replication.storage.writer_lock import WriterLock
from tests.storage.doubles import PostgresMixin


class WriterLockTests(PostgresMixin, TestCase):
    """Locks of two processes, with short intervals."""

    timeout = 60

    def setUp(self) -> None:
        from twisted.internet import reactor  # noqa: TID251 -- the tests' own

        self.reactor: Any = reactor
        self.make_database()
        self.addCleanup(self.connection.close)
        self.lost: Deferred[StorageError] = Deferred()
        for name, value in (
            ("WAIT", 0.2),
            ("RETRY_INTERVAL", 0.05),
            ("LOCK_CHECK_INTERVAL", 0.1),
        ):
            patch = mock.patch.object(writer_lock, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def lock(self, name: str = "w1", database: Any = None) -> WriterLock:
        """Return the lock of a process."""
        if database is None:
            database = Database(self.dsn, self.reactor, max_connections=1)
            self.addCleanup(database.close)
        lock = WriterLock(
            database, "hs", name, ReactorClock(self.reactor), self.lost.callback
        )
        self.addCleanup(lock.stop)
        return lock

    def holders(self) -> list[int]:
        """Return the sessions that hold a lock in this test's database."""
        found = self.sql(
            "SELECT pid FROM pg_locks JOIN pg_database ON oid = database "
            "WHERE locktype = 'advisory' AND datname = current_database()"
        )
        return [pid for (pid,) in found]

    async def test_second_process(self) -> None:
        """A second process with the name is refused, and one with another is not."""
        await self.lock().acquire()
        (pid,) = self.holders()
        with self.assertRaises(StorageError) as caught:
            await self.lock().acquire()
        self.assertIn("another process writes as w1", str(caught.exception))
        self.assertIn(f"pg_terminate_backend({pid})", str(caught.exception))
        await self.lock("w2").acquire()

    async def test_restart_that_overlaps(self) -> None:
        """A process waits for its predecessor to end."""
        database = Database(self.dsn, self.reactor, max_connections=1)
        first = self.lock(database=database)
        await first.acquire()
        second = Deferred.fromCoroutine(self.lock().acquire())
        await deferLater(self.reactor, 0.07, lambda: None)
        self.assertNoResult(second)
        first.stop()
        await database.close()
        await second

    async def test_unavailable(self) -> None:
        """The lock is acquired when the database answers; the log says why it did not.

        It has the reasons of all addresses of the database: any may be the right one.
        """
        refused = psycopg2.OperationalError(
            'connection to server at "db" (::1), port 5432 failed: Connection refused\n'
            "\tIs the server running on that host?\n"
            'connection to server at "db" (127.0.0.1), port 5432 failed: FATAL:  '
            "password authentication failed\n"
        )
        database = Database(self.dsn, self.reactor, max_connections=1)
        self.addCleanup(database.close)
        failing = mock.Mock(wraps=database)
        failing.transact.side_effect = [fail(refused), mock.DEFAULT]
        with (
            mock.patch.object(database_module, "_BACKOFF", Backoff(0.01)),
            mock.patch.object(database_module, "_log") as log,
        ):
            await self.lock(database=failing).acquire()
        self.assertEqual(len(self.holders()), 1)
        ((text,), fields) = log.warn.call_args
        self.assertRegex(
            text.format(**fields),
            r"^Cannot lock the name w1: .*\(::1\).* refused .*\(127\.0\.0\.1\).*"
            r"authentication failed; retrying in 0\.0 s$",
        )

    async def test_lost_session(self) -> None:
        """If the session ends, the lock is acquired in another."""
        await self.lock().acquire()
        (pid,) = self.holders()
        self.sql(f"SELECT pg_terminate_backend({pid}, 5000)")
        while not (holders := self.holders()):
            await deferLater(self.reactor, 0.02, lambda: None)
        self.assertNotEqual(holders, [pid])
        self.assertNoResult(self.lost)

    async def test_taken_over(self) -> None:
        """If another process acquires the lock meanwhile, this process must stop."""
        lock = self.lock()
        await lock.acquire()
        (pid,) = self.holders()
        lock.stop()
        self.sql(f"SELECT pg_terminate_backend({pid}, 5000)")
        await self.lock().acquire()
        lock._stopped = False
        lock._check_later()
        error = await self.lost
        self.assertIn("another process writes as w1", str(error))

    async def test_pooler(self) -> None:
        """Behind a pooler in transaction mode, the lock is given up, with a warning."""
        databases = [Database(self.dsn, self.reactor) for _ in range(2)]
        for database in databases:
            self.addCleanup(database.close)

        class Pooler:
            """Runs each transaction in the next session."""

            def transact(self, *args: Any, **kwargs: Any) -> Any:
                databases.reverse()
                return databases[0].transact(*args, **kwargs)

        with mock.patch.object(writer_lock, "_log") as log:
            lock = self.lock(database=Pooler())
            await lock.acquire()
            while not log.warn.called:
                await deferLater(self.reactor, 0.02, lambda: None)
        self.assertIn("pooler", log.warn.call_args[0][0])
        self.assertNoResult(self.lost)
