"""Tests for synapse_replication.storage.database."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable
from typing import Any

import psycopg2
import psycopg2.errors
from twisted.internet import defer
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.trial.unittest import TestCase

from synapse_replication.errors import (
    CommitUnknownError,
    StorageError,
    TransactionRolledBackError,
)
from synapse_replication.storage.database import MAX_ATTEMPTS, Database
from synapse_replication.storage.prepared import Prepared, run
from synapse_replication.storage.transactions import Transaction
from tests.storage.doubles import PostgresMixin


class DatabaseTests(PostgresMixin, TestCase):
    """Tests for Database, on a real server."""

    def setUp(self) -> None:
        from twisted.internet import reactor  # noqa: TID251 -- the tests' own

        self.make_database()
        self.sql("INSERT INTO foobar VALUES (1, 'a', 'old'), (2, 'a', 'old')")
        self.reactor = IReactorFromThreads(reactor)
        self.database = Database(self.dsn, self.reactor, max_connections=3)
        self.addCleanup(self.connection.close)
        self.addCleanup(self.database.close)
        self.calls: list[str] = []

    def count(self) -> int:
        return int(self.sql("SELECT count(*) FROM foobar")[0][0])

    async def test_commits(self) -> None:
        """
        A transaction runs in a thread, is committed, and returns the function's result.
        """

        def insert(txn: Transaction) -> str:
            txn.execute("INSERT INTO foobar VALUES (3, 'a')")
            txn.call_after(self.calls.append, "after")
            txn.call_on_exception(self.calls.append, "on exception")
            return threading.current_thread().name

        name = await self.database.transact("insert", insert)
        self.assertNotEqual(name, threading.current_thread().name)
        self.assertEqual((self.count(), self.calls), (3, ["after"]))

    async def test_settled(self) -> None:
        """
        settled() fires when every transaction requested before has ended, and does not
        wait for later ones.
        """
        first, second = threading.Event(), threading.Event()
        self.addCleanup(second.set)
        running = self.database.transact("first", lambda txn: first.wait(30))
        settled = self.database.settled()
        later = self.database.transact("second", lambda txn: second.wait(30))
        self.assertNoResult(settled)
        first.set()
        await settled
        await running
        self.assertNoResult(later)
        second.set()
        await later
        await self.database.settled()

    async def test_rolls_back(self) -> None:
        """
        If the function raises, the transaction is rolled back and the caller gets the
        failure.
        """

        def insert(txn: Transaction) -> None:
            txn.execute("INSERT INTO foobar VALUES (3, 'a')")
            txn.call_after(self.calls.append, "after")
            txn.call_on_exception(self.calls.append, "on exception")
            raise KeyError("no")

        with self.assertRaises(KeyError):
            await self.database.transact("insert", insert)
        self.assertEqual((self.count(), self.calls), (2, ["on exception"]))

    async def test_first_statement(self) -> None:
        """
        BEGIN is sent with the first statement, of whatever kind: an error that follows
        rolls all of them back.
        """
        insert = "INSERT INTO foobar VALUES (3, 'a')"

        def by_text(txn: Transaction) -> None:
            txn.execute(insert)

        def by_bytes(txn: Transaction) -> None:
            txn.execute(insert.encode())

        def by_many(txn: Transaction) -> None:
            txn.executemany("INSERT INTO foobar VALUES (%s, 'a')", [(3,), (4,)])

        def by_copy(txn: Transaction) -> None:
            txn.copy_from(io.StringIO("3\ta\tnew\n"), "foobar")

        def by_other_cursor(txn: Transaction) -> None:
            with txn.connection.cursor() as cursor:
                cursor.execute(insert)

        def after_wrong_parameters(txn: Transaction) -> None:
            with contextlib.suppress(IndexError):
                txn.execute("SELECT %s, %s", (1,))
            txn.execute(insert)

        for func in (
            by_text,
            by_bytes,
            by_many,
            by_copy,
            by_other_cursor,
            after_wrong_parameters,
        ):

            def fail(
                txn: Transaction, func: Callable[[Transaction], None] = func
            ) -> None:
                func(txn)
                raise ZeroDivisionError

            before = self.count()
            with self.assertRaises(ZeroDivisionError):
                await self.database.transact("insert", fail)
            after = self.count()
            self.assertEqual(after, before, func.__name__)
            await self.database.transact("insert", func)
            after = self.count()
            self.assertGreater(after, before, func.__name__)

    async def test_first_statement_not_parsed(self) -> None:
        """A transaction fails even if PostgreSQL cannot parse the first statement."""

        def insert(txn: Transaction) -> None:
            with contextlib.suppress(psycopg2.errors.SyntaxError):
                txn.execute("SELEKT 1")
            with contextlib.suppress(psycopg2.errors.InFailedSqlTransaction):
                txn.execute("INSERT INTO foobar VALUES (3, 'a')")

        before = self.count()
        with self.assertRaises(TransactionRolledBackError):
            await self.database.transact("insert", insert)
        after = self.count()
        self.assertEqual(after, before)

    async def test_swallowed_error(self) -> None:
        """
        A function that catches the error of a statement fails nevertheless: PostgreSQL
        rolls the transaction back, so nothing that belongs to it happens.
        """

        def insert(txn: Transaction) -> None:
            txn.execute("INSERT INTO foobar VALUES (3, 'a')")
            txn.call_after(self.calls.append, "after")
            txn.call_on_exception(self.calls.append, "on exception")
            with contextlib.suppress(psycopg2.Error):
                txn.execute("SELECT 1 / 0")

        with self.assertRaisesRegex(
            TransactionRolledBackError,
            r"transaction insert was rolled back.*caught its error.*division by zero",
        ):
            await self.database.transact("insert", insert)
        self.assertEqual((self.count(), self.calls), (2, ["on exception"]))
        # The connection is used again.
        await self.database.transact("more", lambda txn: txn.execute("SELECT 1"))

    async def test_error_before_a_savepoint(self) -> None:
        """An error that the function undid with a savepoint does no harm."""

        def insert(txn: Transaction) -> None:
            txn.execute("INSERT INTO foobar VALUES (3, 'a'); SAVEPOINT before")
            with contextlib.suppress(psycopg2.Error):
                txn.execute("SELECT 1 / 0")
            txn.execute("ROLLBACK TO SAVEPOINT before")
            txn.call_after(self.calls.append, "after")

        await self.database.transact("insert", insert)
        self.assertEqual((self.count(), self.calls), (3, ["after"]))

    async def test_ended_by_the_function(self) -> None:
        """A function that rolls its transaction back fails, also without an error."""

        def by_statement(txn: Transaction) -> None:
            txn.execute("INSERT INTO foobar VALUES (3, 'a')")
            txn.call_after(self.calls.append, "after")
            txn.execute("ROLLBACK")

        def by_connection(txn: Transaction) -> None:
            txn.execute("INSERT INTO foobar VALUES (3, 'a')")
            txn.call_after(self.calls.append, "after")
            txn.connection.rollback()

        def by_failed_commit(txn: Transaction) -> None:
            txn.call_after(self.calls.append, "after")
            with contextlib.suppress(psycopg2.Error):
                txn.execute("SELECT 1 / 0")
            txn.execute("COMMIT")

        for func in (by_statement, by_connection, by_failed_commit):
            with self.assertRaisesRegex(TransactionRolledBackError, "ended the"):
                await self.database.transact("insert", func)
        self.assertEqual((self.count(), self.calls), (2, []))

    async def test_committed_by_the_function(self) -> None:
        """What the function committed is a success, whichever way it did that."""

        def by_statement(txn: Transaction) -> None:
            txn.execute("INSERT INTO foobar VALUES (3, 'a')")
            txn.call_after(self.calls.append, "after")
            txn.execute("COMMIT")

        def by_connection(txn: Transaction) -> None:
            txn.execute("INSERT INTO foobar VALUES (4, 'a')")
            txn.call_after(self.calls.append, "after")
            txn.connection.commit()

        for func in (by_statement, by_connection):
            await self.database.transact("insert", func)
        self.assertEqual((self.count(), self.calls), (4, ["after"] * 2))

    async def test_callback_that_fails(self) -> None:
        """
        A callback that fails is logged; the other callbacks run and the caller
        succeeds.
        """

        def insert(txn: Transaction) -> int:
            txn.call_after(self.calls.index, "nowhere")
            txn.call_after(self.calls.append, "second")
            return 5

        self.assertEqual(await self.database.transact("insert", insert), 5)
        self.assertEqual(self.calls, ["second"])
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)

    async def test_serialization_failure_is_retried(self) -> None:
        """
        After a serialization failure the transaction is retried, its ids released
        first.
        """
        attempts: list[int] = []

        def update(txn: Transaction) -> None:
            txn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            txn.execute("SELECT data FROM foobar")
            attempts.append(len(attempts))
            txn.call_on_exception(self.calls.append, f"attempt {len(attempts)}")
            if len(attempts) == 1:
                self.sql("UPDATE foobar SET data = 'changed' WHERE stream_id = 1")
            txn.execute("UPDATE foobar SET data = 'new' WHERE stream_id = 1")

        await self.database.transact("update", update)
        self.assertEqual((len(attempts), self.calls), (2, ["attempt 1"]))
        self.assertEqual(
            self.sql("SELECT data FROM foobar WHERE stream_id = 1"), [("new",)]
        )

    async def test_retries_are_bounded(self) -> None:
        """
        A transaction that always fails to serialise is retried a limited number of
        times.
        """
        attempts: list[int] = []

        def fail(txn: Transaction) -> None:
            attempts.append(1)
            txn.execute(
                "DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"
            )

        with self.assertRaises(psycopg2.errors.SerializationFailure):
            await self.database.transact("fail", fail)
        self.assertEqual(len(attempts), MAX_ATTEMPTS)

    async def test_deadlock_is_retried(self) -> None:
        """If two transactions deadlock, both eventually succeed."""
        barrier = threading.Barrier(2)
        first_attempt = [True, True]

        def update(which: int) -> Callable[[Transaction], None]:
            def run(txn: Transaction) -> None:
                txn.execute("SET LOCAL deadlock_timeout = '10ms'")
                for id_ in ((1, 2), (2, 1))[which]:
                    txn.execute(
                        "UPDATE foobar SET data = %s WHERE stream_id = %s",
                        (str(which), id_),
                    )
                    if first_attempt[which]:
                        first_attempt[which] = False
                        barrier.wait(10)

            return run

        await defer.gatherResults(
            [self.database.transact("update", update(which)) for which in (0, 1)]
        )
        self.assertEqual(len(set(self.sql("SELECT data FROM foobar"))), 1)

    async def break_all(self) -> None:
        self.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND datname = current_database()"
        )

    async def test_broken_connections_are_replaced(self) -> None:
        """After the server closed every connection, the next transactions succeed."""

        def read(txn: Transaction) -> Any:
            txn.execute("SELECT count(*) FROM foobar")
            return txn.fetchone()

        for _ in range(2):
            await defer.gatherResults(
                [self.database.transact("read", read) for _ in range(3)]
            )
            await self.break_all()
        for autocommit in (False, True):
            self.assertEqual(
                await self.database.transact("read", read, autocommit=autocommit), (2,)
            )
            await self.break_all()

    async def test_nothing_after_a_rollback(self) -> None:
        """A transaction without statements succeeds on a connection that failed."""

        def fail(txn: Transaction) -> None:
            txn.execute("SELECT 1")
            raise RuntimeError("rolled back")

        await self.assertFailure(self.database.transact("fail", fail), RuntimeError)
        self.assertEqual(await self.database.transact("nothing", lambda txn: 1), 1)

    async def test_closed_cursor(self) -> None:
        """A function that closes its cursor has its transaction committed."""

        def insert(txn: Transaction) -> None:
            txn.execute("INSERT INTO foobar VALUES (77, 'master')")
            txn.close()

        await self.database.transact("insert", insert)
        self.assertEqual(
            self.sql("SELECT count(*) FROM foobar WHERE stream_id = 77"), [(1,)]
        )

    async def test_broken_repeatedly(self) -> None:
        """A transaction that loses its connection twice fails."""
        attempts = []

        def end(txn: Transaction) -> None:
            attempts.append(txn)
            if len(attempts) > 2:
                raise RuntimeError("too many attempts")
            txn.execute("SELECT pg_terminate_backend(pg_backend_pid())")

        await self.assertFailure(
            self.database.transact("end", end), psycopg2.OperationalError
        )
        self.assertEqual(len(attempts), 2)

    async def test_commit_is_never_repeated(self) -> None:
        """
        A connection lost at the commit is an error and not retried: the commit may have
        succeeded.
        """
        attempts: list[int] = []

        def insert(txn: Transaction) -> None:
            attempts.append(1)
            txn.execute("INSERT INTO foobar VALUES (3, 'a')")
            pid = txn.connection.info.backend_pid
            self.sql("SELECT pg_terminate_backend(%s, 5000)", pid)

        with self.assertRaises(CommitUnknownError):
            await self.database.transact("insert", insert)
        self.assertEqual((len(attempts), self.count()), (1, 2))

    async def test_prepared(self) -> None:
        """A statement is planned once for a connection, unless its table changes."""
        count = Prepared(
            "SELECT data FROM foobar WHERE stream_id = %(id)s AND 'a%%' LIKE 'a%%'",
            {"id": "bigint"},
        )

        def read(txn: Transaction) -> Any:
            run(txn, {"id": 1}, count)
            return txn.fetchone()

        def prepared(txn: Transaction) -> Any:
            txn.execute("SELECT count(*) FROM pg_prepared_statements")
            return txn.fetchone()

        for _ in range(2):
            self.assertEqual(await self.database.transact("read", read), ("old",))
            self.assertEqual(await self.database.transact("count", prepared), (1,))
            self.sql("ALTER TABLE foobar ADD COLUMN IF NOT EXISTS more text")
        await self.break_all()
        self.assertEqual(await self.database.transact("read", read), ("old",))

    async def test_server_unreachable(self) -> None:
        """If no server answers, the caller gets the failure."""
        database = Database("host=/nonexistent", self.reactor)
        with self.assertRaises(psycopg2.OperationalError):
            await database.transact("read", lambda txn: None)
        await database.close()

    async def test_parameters_by_name(self) -> None:
        """A mapping of libpq parameters is accepted instead of a DSN."""
        parameters = psycopg2.extensions.parse_dsn(self.dsn)
        database = Database(parameters, self.reactor)
        await database.transact("read", lambda txn: txn.execute("SELECT 1"))
        await database.close()

    async def test_cancelled(self) -> None:
        """
        A cancelled call fails only when its transaction has ended: no position may be
        announced before a commit that is still to come.
        """
        begun, resume = threading.Event(), threading.Event()

        def insert(txn: Transaction) -> None:
            begun.set()
            resume.wait(10)
            txn.execute("INSERT INTO foobar VALUES (3, 'a')")
            txn.call_after(self.calls.append, "after")

        result = self.database.transact("insert", insert)

        async def wait() -> None:
            try:
                await result
            finally:
                self.calls.append("cancelled")

        waiting = Deferred.fromCoroutine(wait())
        begun.wait(10)
        waiting.cancel()
        self.assertEqual(self.calls, [])
        resume.set()
        with self.assertRaises(CancelledError):
            await waiting
        self.assertEqual((self.count(), self.calls), (3, ["after", "cancelled"]))

    async def test_cancelled_before_it_began(self) -> None:
        """A transaction cancelled while it waits for a thread never begins."""
        resume = threading.Event()
        others = [
            self.database.transact("wait", lambda txn: resume.wait(10))
            for _ in range(3)
        ]
        result = self.database.transact(
            "insert", lambda txn: txn.execute("INSERT INTO foobar VALUES (3, 'a')")
        )
        result.cancel()
        resume.set()
        with self.assertRaises(CancelledError):
            await result
        await defer.gatherResults(others)
        self.assertEqual(self.count(), 2)

    async def test_close(self) -> None:
        """
        close() waits for running transactions, makes later ones fail, and may be called
        twice.
        """
        running = self.database.transact("sleep", lambda txn: txn.execute("SELECT 1"))
        await defer.gatherResults([self.database.close(), self.database.close()])
        await running
        with self.assertRaises(StorageError) as caught:
            await self.database.transact("late", lambda txn: None)
        self.assertIn("late", str(caught.exception))
        await self.database.close()
        connections = self.sql(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND state <> 'idle'"
        )
        self.assertEqual(connections, [(0,)])
