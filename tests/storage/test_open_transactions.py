"""Tests for synapse_replication.storage.open_transactions, on a real PostgreSQL."""

from __future__ import annotations

import threading

import attrs
import psycopg2
import psycopg2.extensions
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.storage import open_transactions
from synapse_replication.storage.open_transactions import (
    MAX_WAIT,
    PredecessorWait,
    Session,
    find_session,
)
from synapse_replication.storage.transactions import connect
from tests.storage.doubles import FOOBAR, PostgresMixin


def pid(connection: psycopg2.extensions.connection) -> int:
    """Return the process id of a session."""
    return connection.get_backend_pid()


class _OpenTransactionsTestCase(PostgresMixin, SynchronousTestCase):
    def setUp(self) -> None:
        self.make_database()
        self.addCleanup(self.connection.close)

    def open(self, statement: str) -> psycopg2.extensions.connection:
        """Run a statement in a transaction that stays open."""
        connection = connect(self.dsn + " application_name=app")
        self.addCleanup(connection.close)
        connection.cursor().execute(statement)
        return connection

    def insert(self, id_: int) -> psycopg2.extensions.connection:
        """Insert a row in a transaction that stays open."""
        return self.open(f"INSERT INTO foobar VALUES ({id_}, 'first')")

    def wait_for_lock(
        self,
    ) -> tuple[psycopg2.extensions.connection, psycopg2.extensions.connection]:
        """Let one session wait for the lock of another, until the end of the test.

        :return: the session that waits, and the other one.
        """
        waiting = self.open("SELECT 1")
        holder = self.open("LOCK TABLE foobar IN SHARE MODE")
        insert = waiting.cursor().execute
        inserting = threading.Thread(
            target=insert, args=("INSERT INTO foobar VALUES (2, 'w1')",)
        )
        inserting.start()
        self.addCleanup(inserting.join)
        self.addCleanup(holder.rollback)
        blocked = [([pid(holder)],)]
        while self.sql("SELECT pg_blocking_pids(%s)", pid(waiting)) != blocked:
            pass
        return waiting, holder


class PredecessorWaitTests(_OpenTransactionsTestCase):
    """Tests for the wait at the start of a process."""

    def setUp(self) -> None:
        super().setUp()
        self.now = 0.0
        self.first_seen: dict[str, float] = {}

    def wait(
        self, instance_name: str = "first", *, is_admitted: bool = True
    ) -> PredecessorWait:
        return PredecessorWait(
            FOOBAR, instance_name, lambda: self.now, self.first_seen, is_admitted
        )

    def is_over(self, wait: PredecessorWait) -> bool:
        with self.connection.cursor() as cursor:
            return wait.is_over(cursor)

    def test_none(self) -> None:
        """Without a transaction that writes to the stream, there is no wait."""
        self.sql("CREATE TABLE other (id bigint)")
        self.open("SELECT count(*) FROM foobar")
        self.open("INSERT INTO other VALUES (1)")
        self.assertTrue(self.is_over(self.wait()))

    def test_until_all_end(self) -> None:
        """It ends with the last of the transactions, committed or not."""
        first, second = self.insert(2), self.insert(3)
        wait = self.wait()
        self.assertFalse(self.is_over(wait))
        first.rollback()
        self.assertFalse(self.is_over(wait))
        second.commit()
        self.assertTrue(self.is_over(wait))

    def test_later_transactions(self) -> None:
        """It does not include transactions that began later."""
        earlier = self.insert(2)
        wait = self.wait()
        self.assertFalse(self.is_over(wait))
        self.insert(3)
        earlier.commit()
        self.assertTrue(self.is_over(wait))

    def test_statement_that_waits(self) -> None:
        """It includes a statement that the server will execute once it has the lock."""
        self.wait_for_lock()
        self.assertFalse(self.is_over(self.wait()))

    def test_reader(self) -> None:
        """A process that only reads waits for the transactions of removed writers."""
        writing = self.insert(2)
        self.sql("INSERT INTO stream_positions VALUES ('foobar', 'first', 1)")
        self.assertTrue(self.is_over(self.wait("reader")))
        self.sql("INSERT INTO stream_positions VALUES ('foobar', 'removed', 1)")
        wait = self.wait("reader")
        self.assertFalse(self.is_over(wait))
        writing.commit()
        self.assertTrue(self.is_over(wait))

    def test_bound(self) -> None:
        """After 10 s, the start continues if it cannot be a predecessor's."""
        writing = self.insert(2)
        wait = self.wait()
        self.assertFalse(self.is_over(wait))
        self.now = MAX_WAIT - 1
        self.assertFalse(self.is_over(wait))
        text = self.warning(wait)
        self.assertIn("writes to stream foobar", text)
        self.assertIn(f"session {pid(writing)}", text)
        self.assertIn(f"pg_terminate_backend({pid(writing)})", text)

    def test_predecessor_that_may_commit(self) -> None:
        """If it may be a predecessor's, its session is ended after 10 s."""
        writing = self.insert(2)
        wait = self.wait(is_admitted=False)
        self.assertFalse(self.is_over(wait))
        self.now = MAX_WAIT
        with capturedLogs() as logged:
            self.assertFalse(self.is_over(wait))
        text = formatEvent(logged[0])
        self.assertIn(f"session {pid(writing)}", text)
        # The values of the query may be private.
        self.assertIn("query INSERT INTO foobar VALUES ...", text)
        while not self.is_over(wait):
            pass
        with self.assertRaises(psycopg2.Error):
            writing.commit()

    def test_reader_waits(self) -> None:
        """A process that only reads ends no session, and does not start either."""
        writing = self.insert(2)
        self.sql("INSERT INTO stream_positions VALUES ('foobar', 'removed', 1)")
        wait = self.wait("reader")
        self.assertFalse(self.is_over(wait))
        self.now = MAX_WAIT
        with capturedLogs() as logged:
            self.assertFalse(self.is_over(wait))
            self.assertFalse(self.is_over(wait))
        (event,) = logged
        self.assertIn("the start waits", formatEvent(event))
        writing.commit()
        self.assertTrue(self.is_over(wait))

    def test_transaction_of_several_streams(self) -> None:
        """The next stream does not wait for the same transaction again."""
        self.insert(2)
        self.assertFalse(self.is_over(self.wait()))
        self.now = MAX_WAIT
        self.assertIn("writes to stream foobar", self.warning(self.wait()))
        self.insert(3)
        self.assertFalse(self.is_over(self.wait()))

    def warning(self, wait: PredecessorWait) -> str:
        """Return what is logged when the wait ends without success."""
        self.now = MAX_WAIT
        with capturedLogs() as logged:
            self.assertTrue(self.is_over(wait))
        (event,) = logged
        return formatEvent(event)

    def test_prepared_transaction(self) -> None:
        """A prepared transaction has no session."""
        self.patch(open_transactions, "find_session", lambda *_, **__: None)
        self.insert(2)
        wait = self.wait()
        self.assertFalse(self.is_over(wait))
        self.assertIn("pg_prepared_xacts", self.warning(wait))

    def test_another_session(self) -> None:
        """A session with another transaction is not named, even if it is older."""
        another = self.open("SELECT 1")
        writing = self.insert(2)
        wait = self.wait()
        self.assertFalse(self.is_over(wait))
        another.cursor().execute("INSERT INTO foobar VALUES (3, 'w1')")
        text = self.warning(wait)
        self.assertIn(f"session {pid(writing)}", text)
        self.assertIn(f"pg_terminate_backend({pid(writing)})", text)

    def test_session_that_waits(self) -> None:
        """A session whose statement waits for a lock is named."""
        waiting, holder = self.wait_for_lock()
        wait = self.wait()
        self.assertFalse(self.is_over(wait))
        text = self.warning(wait)
        self.assertIn(f"session {pid(waiting)}", text)
        self.assertIn(f"waits for session {pid(holder)}", text)


class FindSessionTests(_OpenTransactionsTestCase):
    """Sessions with open transactions, which count as old immediately."""

    def find(self) -> Session | None:
        missing = attrs.evolve(FOOBAR.tables[0], table="missing")
        stream = attrs.evolve(FOOBAR, tables=[*FOOBAR.tables, missing])
        with self.connection.cursor() as cursor:
            return find_session(cursor, stream, open_for=0)

    def test_none(self) -> None:
        """There is none if no transaction is open."""
        self.assertIsNone(self.find())

    def test_writes_the_stream(self) -> None:
        """A session that has written to the stream precedes older ones."""
        other = self.open("SELECT 1")
        found = self.find()
        assert found is not None
        self.assertEqual((found.pid, found.writes_stream), (pid(other), False))
        writing = self.open(
            "INSERT INTO foobar (stream_id, instance_name) VALUES (2, 'secret')"
        )
        found = self.find()
        assert found is not None
        self.assertEqual((found.pid, found.writes_stream), (pid(writing), True))
        self.assertEqual(found.query, "INSERT INTO foobar")
        self.assertIn("application app", found.describe())
        self.assertIn("idle in transaction", found.describe())
        self.assertIn(f"pg_terminate_backend({pid(writing)})", found.hint())
        self.sql("SELECT pg_terminate_backend(%s)", pid(writing))

    def test_blocked(self) -> None:
        """If the session waits for a lock, the session to end is the lock's holder."""
        waiting, holder = self.wait_for_lock()
        session = self.find()
        assert session is not None
        self.assertEqual(session.pid, pid(waiting))
        self.assertIn(f"waits for session {pid(holder)}", session.describe())
        self.assertIn(f"pg_terminate_backend({pid(holder)})", session.hint())
        # The session to end is described like the one that waits for it.
        _, text = session.describe().split("waits for ")
        self.assertRegex(
            text,
            r"of \w+, application app, from a Unix socket, idle in transaction, "
            r"transaction open for \d+ s, query LOCK TABLE foobar",
        )
        later = session.after(20)
        assert session.blocker is not None
        assert later.blocker is not None
        assert session.open_for is not None
        assert session.blocker.open_for is not None
        self.assertEqual(later.open_for, session.open_for + 20)
        self.assertEqual(later.blocker.open_for, session.blocker.open_for + 20)

    def test_without_privileges(self) -> None:
        """A session of another role is found by its locks, without its query."""
        writing = self.open("INSERT INTO foobar VALUES (2, 'w1')")
        self.sql("CREATE ROLE stuck_id_reader LOGIN")
        self.addCleanup(self.sql, "DROP ROLE stuck_id_reader")
        with self.connection.cursor() as cursor:
            cursor.execute("SET ROLE stuck_id_reader")
            found = find_session(cursor, FOOBAR, open_for=0)
            cursor.execute("RESET ROLE")
        assert found is not None
        self.assertEqual(
            (found.pid, found.query, found.open_for), (pid(writing), "", None)
        )
        self.assertIn("pg_read_all_stats", found.describe())
