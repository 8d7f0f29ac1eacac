"""Tests for a host's connection pool, with real connections to PostgreSQL."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import ref

import psycopg2
from twisted.enterprise.adbapi import ConnectionPool
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin import host_database, id_generators
from synapse_replication.dropin.host_database import (
    HostDatabase,
    end_predecessors,
    find_name_check,
)
from synapse_replication.dropin.id_generators import DropInIdGenerator
from synapse_replication.errors import NameLostError
from synapse_replication.storage import lost_answers, name_lock
from synapse_replication.storage.admission import Admission
from synapse_replication.storage.lost_answers import LostAnswer
from synapse_replication.storage.stuck_id_watch import STUCK_AFTER, StuckIdWatch
from synapse_replication.storage.transactions import connect
from synapse_replication.testing.servers import shared_postgres
from tests.dropin.host import FakeHomeserver, fake_modules
from tests.storage.doubles import FakeReactor, PostgresMixin
from tests.storage.test_lost_answers import SLOW_COMMIT
from tests.support import commit_proxy
from tests.support.commit_proxy import CommitProxy

#: The longest time that an event may take, in s.
TIMEOUT = 30.0


class _Transaction:
    """The host's cursor."""

    def __init__(self, cursor: Any) -> None:
        self.execute = cursor.execute
        self.fetchall = cursor.fetchall
        self.fetchone = cursor.fetchone
        self.after: list[Callable[[], object]] = []
        self.on_exception: list[Callable[[], object]] = []

    def call_after(self, func: Callable[..., object], *args: object) -> None:
        self.after.append(lambda: func(*args))

    def call_on_exception(self, func: Callable[..., object], *args: object) -> None:
        self.on_exception.append(lambda: func(*args))


class _HostConnection:
    """The host's own connection, outside of its pool."""

    def __init__(self, dsn: str) -> None:
        self.conn = connect(dsn)
        self.commit, self.rollback = self.conn.commit, self.conn.rollback

    def cursor(self, *, txn_name: str) -> Any:
        return self.conn.cursor()


class _Db:
    """The host's pool, which runs each transaction in this thread."""

    def __init__(self, hs: FakeHomeserver, dsn: str) -> None:
        self.hs = hs
        self._reactor: Any = hs.get_reactor()
        self.engine = sys.modules["synapse.storage.engines"].PostgresEngine()
        self._db_pool = ConnectionPool("psycopg2", dsn)

    async def runInteraction(
        self,
        desc: str,
        func: Callable[..., Any],
        *args: object,
        db_autocommit: bool = False,
    ) -> Any:
        connection = self._db_pool.connect()
        txn = _Transaction(connection.cursor())
        try:
            result = func(txn)
            connection.commit()
        except BaseException:
            self.close()
            # The failure comes from a thread, after what the connection reported.
            self._reactor.run_thread_calls()
            for callback in txn.on_exception:
                callback()
            raise
        for callback in txn.after:
            callback()
        return result

    def close(self) -> None:
        for connection in list(self._db_pool.connections.values()):
            self._db_pool.disconnect(connection)


class _HostCase(PostgresMixin, SynchronousTestCase):
    def setUp(self) -> None:
        fake_modules(self)
        self.hs = FakeHomeserver("w1")
        self.reactor = FakeReactor()
        self.hs.reactor = self.reactor
        self.make_database()
        self.addCleanup(self.connection.close)
        self.patch(id_generators, "_held_names", {})

    def make_db(self, dsn: str) -> _Db:
        db = _Db(self.hs, dsn)
        self.addCleanup(db.close)
        return db

    def until(self, condition: Callable[[], object]) -> None:
        """Run the calls of threads, and timers, until a condition holds."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            self.assertLess(time.monotonic(), deadline)
            self.reactor.run_thread_calls()
            self.reactor.advance(lost_answers.ASK_INTERVAL)
            time.sleep(0.01)


class LostAnswerTests(_HostCase):
    """The answer to the COMMIT of a transaction of the host is lost."""

    def setUp(self) -> None:
        super().setUp()
        self.set_sequence(4)
        self.sql(SLOW_COMMIT)
        server = shared_postgres()
        self.proxy = CommitProxy(server)
        self.addCleanup(self.proxy.close)
        for name, share in (("LOST", 1.0), ("DELAYED", 0.0)):
            patch = mock.patch.object(commit_proxy, name, share)
            patch.start()
            self.addCleanup(patch.stop)
        folder = str(self.proxy.directory)
        self.db = self.make_db(self.dsn.replace(str(server.directory), folder))
        own = _HostConnection(self.dsn)
        self.addCleanup(own.conn.close)
        self.patch(sys, "stderr", mock.Mock())
        self.ids = DropInIdGenerator(
            db_conn=own,
            db=self.db,
            notifier=SimpleNamespace(notify_replication=lambda: None),
            stream_name="foobar",
            server_name="test",
            instance_name="w1",
            tables=[("foobar", "instance_name", "stream_id")],
            sequence_name="foobar_seq",
            writers=["w1"],
        )
        self.addCleanup(self.release_name)

    def release_name(self) -> None:
        for session, _ in id_generators._held_names.values():
            with session:
                pass

    def lose(self, writing: Deferred[Any]) -> None:
        """Let a coroutine write; the answer to its COMMIT is lost."""
        self.failureResultOf(writing, psycopg2.OperationalError)
        self.proxy.heal()
        self.reactor.run_thread_calls()
        self.until(lambda: [lost.session for lost in self.lost()] == ["active"])

    def lost(self) -> Sequence[LostAnswer]:
        return self.ids.database.lost_answers()

    def insert(self, txn: Any, id_: int) -> None:
        txn.execute("INSERT INTO foobar VALUES (%s, 'w1', '')", (id_,))
        self.proxy.lose(1)

    async def write_in_a_block(self) -> None:
        async with self.ids.get_next() as id_:
            await self.db.runInteraction("", lambda txn: self.insert(txn, id_))

    async def write_in_a_transaction(self) -> None:
        await self.db.runInteraction(
            "", lambda txn: self.insert(txn, self.ids.get_next_txn(txn))
        )

    def check(self, writing: Any) -> None:
        """The position passes the id only when its row is committed."""
        before = self.ids.get_current_token()
        self.lose(ensureDeferred(writing))
        self.assertEqual(self.ids.get_current_token(), before)
        self.sql("SELECT pg_advisory_unlock(77)")
        self.until(lambda: self.ids.get_current_token() > before)
        self.assertEqual(self.lost(), [])
        ((row,),) = self.sql("SELECT stream_id FROM foobar")
        self.assertEqual(row, self.ids.get_current_token())

    def test_block(self) -> None:
        """The id of a block is not finished when its block fails."""
        self.check(self.write_in_a_block())

    def test_transaction(self) -> None:
        """The id of a transaction is not finished when the host calls back."""
        self.check(self.write_in_a_transaction())

    def test_stuck_id(self) -> None:
        """The id is stuck, with the reason; earlier answers do not concern others."""
        watch = StuckIdWatch(lambda: {"foobar": self.ids}, self.reactor)
        self.lose(ensureDeferred(self.write_in_a_block()))
        watch.check()
        self.reactor.advance(STUCK_AFTER)
        watch.check()
        (stuck,) = watch.stuck()
        self.assertRegex(stuck.session, "of a transaction of the homeserver was lost")
        database: Any = self.ids.database
        self.successResultOf(database.settled(database.mark()))
        self.sql("SELECT pg_advisory_unlock(77)")
        self.until(lambda: not self.lost())

    def test_cancelled_wait(self) -> None:
        """A caller that gives up the wait for a lost answer learns of no end."""
        self.lose(ensureDeferred(self.write_in_a_block()))
        waiting = self.ids.database.settled()
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)
        self.sql("SELECT pg_advisory_unlock(77)")
        self.until(lambda: not self.lost())

    def test_not_sent(self) -> None:
        """If the connection breaks before COMMIT is sent, the id is finished."""

        async def write() -> None:
            async with self.ids.get_next() as id_:
                await self.db.runInteraction(
                    "", lambda txn: self.insert_and_end(txn, id_)
                )

        self.failureResultOf(ensureDeferred(write()), psycopg2.OperationalError)
        self.reactor.run_thread_calls()
        self.assertEqual((self.lost(), self.ids.get_current_token()), ([], 5))

    def insert_and_end(self, txn: Any, id_: int) -> None:
        txn.execute("INSERT INTO foobar VALUES (%s, 'w1', '')", (id_,))
        txn.execute("SELECT pg_terminate_backend(pg_backend_pid())")


class FreedTests(_HostCase):
    """A homeserver that has been shut down is freed, while the process goes on."""

    def test_freed(self) -> None:
        """Nothing keeps a pool whose connections this package opens."""
        db = _Db(self.hs, self.dsn)
        HostDatabase(db, "test").open_connections(None)
        pool = ref(db._db_pool)
        db._db_pool.close()
        del db
        gc.collect()
        self.assertIsNone(pool())

    def test_once(self) -> None:
        """The generators of a pool share its connections."""
        db = self.make_db(self.dsn)
        first, second = HostDatabase(db, "test"), HostDatabase(db, "test")
        first.open_connections(None)
        second.open_connections(None)
        self.assertIs(first.connections, second.connections)


class PredecessorTests(_HostCase):
    """A process of the host is replaced, and goes on."""

    def setUp(self) -> None:
        super().setUp()
        self.own = _HostConnection(self.dsn)
        self.addCleanup(self.own.conn.close)
        self.db = self.make_db(self.dsn)
        self.database = HostDatabase(self.db, "test")
        with self.own.cursor(txn_name="") as cursor:
            name_lock.prepare_terms(cursor, "w1")
        self.own.commit()
        self.database.open_connections(self.acquire())
        self.stopping = mock.Mock()
        self.patch(host_database, "_stop_process", self.stopping)
        self.patch(sys, "stderr", mock.Mock())

    def acquire(self) -> Admission:
        with self.own.cursor(txn_name="") as cursor:
            admission = name_lock.acquire_name(cursor, "w1", "a test")
        self.own.commit()
        return admission

    def write(self) -> Deferred[None]:
        return self.database.transact(
            "write", lambda txn: txn.execute("INSERT INTO foobar VALUES (5, 'w1', '')")
        )

    def rows(self) -> list[Any]:
        return self.sql("SELECT stream_id FROM foobar")

    def test_idle_session(self) -> None:
        """
        The sessions that a process has are ended, and it cannot open others: it stops.
        """
        self.successResultOf(self.write())
        self.acquire()
        end_predecessors(self.own, "w1")
        self.failureResultOf(self.write(), psycopg2.OperationalError)
        refused = self.failureResultOf(self.write(), NameLostError)
        self.assertIn("a test", str(refused.value))
        self.reactor.run_thread_calls()
        self.stopping.assert_called_once_with(self.reactor, refused.value)
        self.assertEqual(self.rows(), [(5,)])

    def test_confirm_name(self) -> None:
        """The check that a process has its name fails, and stops it, if it has not."""
        self.assertIsNone(find_name_check(self.make_db(self.dsn)))
        confirm = find_name_check(self.db)
        assert confirm is not None
        self.successResultOf(confirm())
        self.acquire()
        lost = self.failureResultOf(confirm(), NameLostError)
        self.reactor.run_thread_calls()
        self.stopping.assert_called_once_with(self.reactor, lost.value)

    def test_open_transaction(self) -> None:
        """A session with an open transaction is ended after a while, and logged."""
        connection = self.db._db_pool.connect()
        connection.cursor().execute("INSERT INTO foobar VALUES (5, 'w1', '')")
        self.acquire()
        with (
            mock.patch.object(name_lock, "WAIT", 0.3),
            capturedLogs() as logged,
        ):
            began = time.monotonic()
            end_predecessors(self.own, "w1")
        self.assertGreater(time.monotonic() - began, 0.3)
        self.assertIn("Ended a session", formatEvent(logged[0]))
        self.assertRaises(psycopg2.OperationalError, connection.commit)
        self.assertEqual(self.rows(), [])

    def test_commit_in_progress(self) -> None:
        """A commit in progress is waited for, and its row is there afterwards."""
        self.sql(SLOW_COMMIT)
        connection = self.db._db_pool.connect()
        connection.cursor().execute("INSERT INTO foobar VALUES (5, 'w1', '')")
        committing = threading.Thread(target=connection.commit)
        committing.start()
        self.acquire()
        threading.Timer(0.3, self.sql, ["SELECT pg_advisory_unlock(77)"]).start()
        end_predecessors(self.own, "w1")
        committing.join()
        self.assertEqual(self.rows(), [(5,)])

    def test_other_names(self) -> None:
        """The sessions of other names are left alone."""
        self.successResultOf(self.write())
        end_predecessors(self.own, "w2")
        self.successResultOf(self.write())


class NameTests(_HostCase):
    """A process of the host acquires its name when it starts."""

    def acquire(self) -> Admission | None:
        host = _HostConnection(self.dsn)
        self.addCleanup(host.conn.close)
        return id_generators._hold_name(host, "test", "w1")

    def locks(self) -> list[Any]:
        return self.sql(
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database())"
        )

    def test_failure(self) -> None:
        """If the term cannot be acquired, the lock is released, for the next try."""
        error = psycopg2.OperationalError("failing")
        failing = mock.patch.object(name_lock, "prepare_terms", side_effect=error)
        with failing, self.assertRaises(psycopg2.OperationalError):
            self.acquire()
        # Its traceback refers to the session.
        self.assertIsNotNone(error.__traceback__)
        self.until(lambda: not self.locks())
        self.assertIsNotNone(self.acquire())
        self.assertEqual(len(self.locks()), 1)
        ((session, _),) = id_generators._held_names.values()
        with session:
            pass
        self.until(lambda: not self.locks())
