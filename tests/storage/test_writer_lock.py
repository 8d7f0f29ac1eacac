"""Tests for :mod:`synapse_replication.storage.writer_lock`, on a real server."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import attrs
import psycopg2
from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IReactorFromThreads
from twisted.internet.task import deferLater
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import TestCase

from synapse_replication.errors import NameLostError, StorageError
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.timer import Backoff
from synapse_replication.storage import (
    database as database_module,
    name_lock,
    queries,
    writer_lock,
)
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_streams import read_sequence
from synapse_replication.storage.lost_answers import identify
from synapse_replication.storage.sequences import fetch_ids
from synapse_replication.storage.transactions import Transaction, connect
from synapse_replication.storage.writer_lock import WriterLock
from tests.storage.doubles import FOOBAR, PostgresMixin


class _NameTestCase(PostgresMixin, TestCase):
    """Locks of several processes, with short intervals."""

    timeout = 60

    def setUp(self) -> None:
        from twisted.internet import reactor  # noqa: TID251 -- the tests' own

        self.make_database()
        self.addCleanup(self.connection.close)
        self.lost: Deferred[StorageError] = Deferred()
        self.reactor: Any = reactor
        self.others = Database(self.dsn, IReactorFromThreads(reactor))
        self.addCleanup(self.others.close)
        for name, value in (
            ("WAIT", 0.2),
            ("RETRY_INTERVAL", 0.05),
            ("LOCK_CHECK_INTERVAL", 0.1),
        ):
            self.patch(writer_lock, name, value)

    def lock(self, name: str = "w1", database: Any = None) -> WriterLock:
        """Return the lock of a process."""
        if database is None:
            database = Database(self.dsn, self.reactor, max_connections=1)
            self.addCleanup(database.close)
        lock = WriterLock(
            database,
            self.others,
            "hs",
            name,
            f"process of {name}",
            ReactorClock(self.reactor),
            self.lost.callback,
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


class WriterLockTests(_NameTestCase):
    """Locks of two processes."""

    async def test_second_process(self) -> None:
        """A second process with the name is refused, and one with another is not."""
        await self.lock().acquire()
        (pid,) = self.holders()
        with self.assertRaises(StorageError) as caught:
            await self.lock().acquire()
        self.assertIn("another process writes as w1", str(caught.exception))
        self.assertIn(f"pg_terminate_backend({pid})", str(caught.exception))
        await self.lock("w2").acquire()

    async def test_check_fails(self) -> None:
        """After a check that failed for any reason, the lock is checked again."""
        lock = self.lock()
        await lock.acquire()
        checks: list[Deferred[None]] = []

        def check() -> Deferred[None]:
            checks.append(Deferred())
            return fail(ValueError("no"))

        patch = self.patch(lock, "_hold", check)
        while len(checks) < 2:
            await deferLater(self.reactor, 0.01, lambda: None)
        patch.restore()
        self.assertGreaterEqual(len(self.flushLoggedErrors(ValueError)), 2)

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
        failing.transact.side_effect = itertools.chain(
            [fail(refused)], itertools.repeat(mock.DEFAULT)
        )
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


class AdmissionTests(_NameTestCase):
    """What a process can commit after a successor has acquired its name."""

    async def start(self, name: str = "w1") -> Database:
        """Return the database of a process that has acquired a name."""
        session = Database(self.dsn, self.reactor, max_connections=1)
        self.addCleanup(session.close)
        lock = self.lock(name, session)
        admission = await lock.acquire()
        assert admission is not None
        lock.stop()
        # The session ends, as in a failover; the process runs on.
        await session.close()
        database = Database(self.dsn, self.reactor)
        self.addCleanup(database.close)
        database.admit(admission, self.refused.append)
        return database

    def setUp(self) -> None:
        super().setUp()
        self.refused: list[NameLostError] = []
        self.ended: list[str] = []

    def insert(self, txn: Transaction) -> None:
        txn.call_after(self.ended.append, "committed")
        txn.call_on_exception(self.ended.append, "rolled back")
        txn.execute("INSERT INTO foobar VALUES (5, 'w1')")

    def count(self) -> int:
        return int(self.sql("SELECT count(*) FROM foobar")[0][0])

    async def test_replaced(self) -> None:
        """A process that was replaced commits nothing, and learns who replaced it."""
        old, new = await self.start(), await self.start()
        with self.assertRaises(NameLostError) as caught:
            await old.transact("insert", self.insert)
        self.assertIn("process of w1 since ", caught.exception.holder)
        self.assertEqual((self.count(), self.ended), (0, ["rolled back"]))
        self.assertEqual(self.refused, [caught.exception])
        await new.transact("insert", self.insert)
        self.assertEqual((self.count(), self.ended[1:]), (1, ["committed"]))

    async def test_other_name(self) -> None:
        """A process with another name does not replace it."""
        old, _ = await self.start(), await self.start("w2")
        await old.transact("insert", self.insert)
        self.assertEqual(self.count(), 1)

    async def test_replaced_before_commit(self) -> None:
        """A transaction that began before is refused, at any isolation level."""
        for level in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"):
            old = await self.start()
            reached, resume = Deferred[None](), threading.Event()

            def insert(
                txn: Transaction,
                level: str = level,
                reached: Deferred[None] = reached,
                resume: threading.Event = resume,
            ) -> None:
                txn.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
                self.insert(txn)
                if not resume.is_set():
                    self.reactor.callFromThread(reached.callback, None)
                    resume.wait(30)

            inserting = old.transact("insert", insert)
            await reached
            await self.start()
            resume.set()
            with self.assertRaises(NameLostError):
                await inserting
            self.assertEqual(self.count(), 0)

    async def test_old_snapshot(self) -> None:
        """An id is refused even if the snapshot is older than the successor's term."""
        for level in ("REPEATABLE READ", "SERIALIZABLE"):
            old = await self.start()
            reached, resume = Deferred[None](), threading.Event()

            def fetch(
                txn: Transaction,
                level: str = level,
                admission: Admission | None = old.admission,
                reached: Deferred[None] = reached,
                resume: threading.Event = resume,
            ) -> list[int]:
                txn.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
                txn.execute("SELECT count(*) FROM foobar")
                if not resume.is_set():
                    self.reactor.callFromThread(reached.callback, None)
                    resume.wait(30)
                ids = fetch_ids(txn, FOOBAR, 1, list, 0, admission, in_use=True)
                self.fail(f"{level}: {ids} were allocated after the name was lost")

            fetching = old.transact("fetch", fetch)
            await reached
            await self.start()
            resume.set()
            with self.assertRaises(NameLostError):
                await fetching

    async def test_reads_and_ids(self) -> None:
        """Ids, the sequence and stored positions are refused, too."""
        old = await self.start()
        await self.start()
        admission = old.admission
        assert admission is not None
        statements: dict[str, Callable[[Transaction], object]] = {
            "next": lambda txn: fetch_ids(txn, FOOBAR, 2, list, 0, admission),
            "txn": lambda txn: fetch_ids(
                txn, FOOBAR, 1, list, 0, admission, in_use=True
            ),
            "txn of several": lambda txn: fetch_ids(
                txn, FOOBAR, 2, list, 0, admission, in_use=True
            ),
            "sequence": lambda txn: read_sequence(txn, "foobar_seq", admission),
            "position": lambda txn: txn.execute(
                queries.upsert_position(False, is_admitted=True),
                {
                    "stream_name": "foobar",
                    "instance_name": "w1",
                    "stream_id": 9,
                    **admission.parameters,
                },
            ),
        }
        for name, statement in statements.items():
            with self.assertRaises(NameLostError, msg=name):
                await old.transact(name, statement, autocommit=True)
        self.assertEqual(self.sql("SELECT * FROM stream_positions"), [])

    async def test_commit_in_progress(self) -> None:
        """A successor waits for a commit in progress, and then ends its session."""
        self.sql(SLOW_COMMIT)
        old = await self.start()
        commit = old.transact("insert", self.insert)
        while not self.sql(
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        ):
            await deferLater(self.reactor, 0.02, lambda: None)
        with capturedLogs() as logged:
            await self.start()
        texts = [formatEvent(event) for event in logged]
        self.assertIn("Ended a session that an earlier process of w1", "".join(texts))
        await self.assertFailure(commit, psycopg2.Error)
        self.assertEqual(self.count(), 0)

    async def test_timeouts(self) -> None:
        """A timeout of the role does not end the wait before the session is ended."""
        await self.start()
        other = connect(self.dsn)
        self.addCleanup(other.close)
        other.cursor().execute("SELECT FROM synapse_replication_writers FOR SHARE")
        self.dsn += " options='-c statement_timeout=100 -c lock_timeout=100'"
        await self.start()
        with self.assertRaises(psycopg2.Error):
            other.cursor().execute("SELECT 1")

    async def test_unusual_name(self) -> None:
        """A name may have characters with a meaning for the driver of the database."""
        name = "100% 'w%s'"
        for is_pooled in (False, True):
            if is_pooled:
                self.patch(
                    database_module,
                    "identify",
                    lambda connection: attrs.evolve(identify(connection), pid=0),
                )
            old = await self.start(name)
            await old.transact("insert", self.insert)
            await self.start(name)
            with self.assertRaises(NameLostError):
                await old.transact("insert", self.insert)
        self.assertEqual(self.count(), 2)

    async def test_without_rights(self) -> None:
        """Without the table and the right to create it, the process says so."""
        role = f"powerless_{self.id().rpartition('.')[2]}_{os.getpid()}"
        self.sql(f"CREATE ROLE {role}")
        self.addCleanup(self.sql, f"DROP ROLE {role}")
        database = Database(f"{self.dsn} options='-c role={role}'", self.reactor)
        self.addCleanup(database.close)
        self.others = database
        with mock.patch.object(name_lock, "_log") as log:
            self.assertIsNone(await self.lock().acquire())
        ((text,), fields) = log.warn.call_args
        self.assertIn("init-db", text.format(**fields))


#: Let commits of rows of ``foobar`` wait for a lock, which the test's session holds.
SLOW_COMMIT = """
    CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock(77); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON foobar
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait();
    SELECT pg_advisory_lock(77);
"""
