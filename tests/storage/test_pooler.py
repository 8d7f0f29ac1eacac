"""Tests of the lock of a writer's name behind PgBouncer."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any
from unittest import mock

import psycopg2
from psycopg2.extensions import parse_dsn
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from synapse_replication.dropin import id_generators
from synapse_replication.errors import StorageError
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.storage import writer_lock
from synapse_replication.storage.database import Database
from synapse_replication.storage.open_transactions import read_open_transactions
from synapse_replication.storage.writer_lock import WriterLock
from synapse_replication.testing.servers import shared_postgres
from tests.storage.doubles import FOOBAR, PostgresMixin
from tests.support.pooler import PGBOUNCER, PgBouncer


class PoolerTests(PostgresMixin, TestCase):
    """Processes behind a pooler with two sessions in transaction mode."""

    timeout = 60
    mode = "transaction"
    if PGBOUNCER is None:
        skip = "PgBouncer is not installed; install the package pgbouncer"

    def setUp(self) -> None:
        from twisted.internet import reactor  # noqa: TID251 -- the tests' own

        self.reactor: Any = reactor
        self.make_database()
        self.addCleanup(self.connection.close)
        pooler = PgBouncer(postgres=shared_postgres(), mode=self.mode, pool_size=4)
        pooler.start()
        self.addCleanup(pooler.stop)
        self.pooled = pooler.dsn(parse_dsn(self.dsn)["dbname"])
        self.lost: Deferred[StorageError] = Deferred()
        for name, value in (
            ("WAIT", 0.3),
            ("RETRY_INTERVAL", 0.05),
            ("LOCK_CHECK_INTERVAL", 0.05),
        ):
            self.patch(writer_lock, name, value)

    def process(self, dsn: str) -> tuple[WriterLock, Database]:
        """Return the lock of a process named w1, and the session of the lock."""
        session = Database(dsn, self.reactor, max_connections=1)
        others = Database(dsn, self.reactor, max_connections=1)
        lock = WriterLock(
            session,
            others,
            "hs",
            "w1",
            "a process",
            ReactorClock(self.reactor),
            self.lost.callback,
        )
        self.addCleanup(others.close)
        self.addCleanup(session.close)
        self.addCleanup(lock.stop)
        return lock, session

    def busy(self) -> Any:
        """Return a client that keeps the session that it was given."""
        client = psycopg2.connect(self.pooled)
        self.addCleanup(client.close)
        client.cursor().execute("SELECT 1")
        return client

    async def stop(self, lock: WriterLock, session: Database) -> None:
        lock.stop()
        await session.close()

    async def test_restart(self) -> None:
        """
        After a clean stop, the lock is not left in a session that others use: the
        process can be started again.
        """
        first = self.process(self.pooled)
        await first[0].acquire()
        await self.stop(*first)
        self.busy()
        lock, _ = self.process(self.pooled)
        await lock.acquire()
        self.assertNoResult(self.lost)

    async def test_homeserver(self) -> None:
        """A process of a homeserver commits the term; its successor gets another."""
        self.patch(id_generators, "_held_names", {})
        terms = []
        for _ in range(2):
            connection = psycopg2.connect(self.pooled)
            self.addCleanup(connection.close)
            host = mock.Mock(conn=connection, commit=connection.commit)
            host.cursor = lambda txn_name, connection=connection: connection.cursor()
            admission = id_generators._hold_name(host, "hs", "w1")
            assert admission is not None
            ((session, _),) = id_generators._held_names.values()
            self.sql("SELECT synapse_replication_admit('w1', %s)", admission.term)
            terms.append(admission.term)
            session.__exit__(None, None, None)
            id_generators._held_names.clear()
        self.assertEqual(terms, [1, 2])

    async def test_busy_pool(self) -> None:
        """A process that has the lock does not take itself for another one."""
        lock, _ = self.process(self.pooled)
        await lock.acquire()
        for _ in range(2):
            self.busy()
            for _ in range(3):
                await lock._hold()
        self.assertNoResult(self.lost)

    async def test_second_process(self) -> None:
        """
        A second process is refused, also if only one of them uses the pooler. No text
        advises to end a session that others may use.
        """
        lock, session = self.process(self.pooled)
        await lock.acquire()
        second, _ = self.process(self.pooled)
        with self.assertRaisesRegex(StorageError, "another process writes as w1") as e:
            await second.acquire()
        self.assertNotIn("terminate", str(e.exception))
        self.assertIn("do not end it", str(e.exception))
        direct, _ = self.process(self.dsn)
        with self.assertRaisesRegex(StorageError, "another process writes as w1"):
            await direct.acquire()
        await self.stop(lock, session)
        await direct.acquire()

    async def test_killed(self) -> None:
        """The lock of a process that disappears is free as soon as its connection."""
        lock, session = self.process(self.pooled)
        await lock.acquire()
        lock.stop()
        for connection in session._idle:
            # End the connection without a message to the pooler.
            with socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
        second, _ = self.process(self.pooled)
        await second.acquire()

    async def test_open_transaction_harms_nothing(self) -> None:
        """
        The open transaction has no snapshot and no lock of a table, and nobody waits
        for it.
        """
        self.sql("ALTER ROLE postgres SET idle_in_transaction_session_timeout = 50")
        self.addCleanup(
            self.sql, "ALTER ROLE postgres RESET idle_in_transaction_session_timeout"
        )
        lock, _ = self.process(self.pooled)
        await lock.acquire()
        lock.stop()
        self.sql("SELECT pg_sleep(0.2)")
        found = self.sql(
            "SELECT backend_xmin, backend_xid, (SELECT count(*) FROM pg_locks AS l "
            "WHERE l.pid = a.pid AND relation = 'foobar'::regclass) "
            "FROM pg_stat_activity AS a "
            "WHERE state = 'idle in transaction' AND datname = current_database() "
            "AND pid <> pg_backend_pid()"
        )
        self.assertEqual(found, [(None, None, 0)])
        with contextlib.closing(self.connection.cursor()) as txn:
            self.assertEqual(read_open_transactions(txn, FOOBAR), frozenset())

    async def test_lost_transaction(self) -> None:
        """If the open transaction is ended, the lock is acquired again."""
        lock, _ = self.process(self.pooled)
        await lock.acquire()
        lock.stop()
        self.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_database "
            "ON oid = database WHERE locktype = 'advisory' "
            "AND datname = current_database()"
        )
        lock._stopped = False
        await lock._hold()
        self.assertNoResult(self.lost)
        second, _ = self.process(self.pooled)
        with self.assertRaises(StorageError):
            await second.acquire()


class SessionModeTests(PoolerTests):
    """The same in session mode."""

    mode = "session"
