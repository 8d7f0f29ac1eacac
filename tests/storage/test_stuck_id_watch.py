"""Tests for synapse_replication.storage.stuck_id_watch, on a real PostgreSQL."""

from __future__ import annotations

import threading

import psycopg2.extensions
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from synapse_replication.storage import stuck_id_watch
from synapse_replication.storage.database import Database, connect
from synapse_replication.storage.id_generators import (
    MultiWriterIdGenerator,
    load_id_generator,
)
from synapse_replication.storage.stuck_id_watch import (
    ASK_EVERY,
    STUCK_AFTER,
    Session,
    StuckIdWatch,
    find_session,
)
from synapse_replication.streams.stuck_ids import StuckId
from tests.storage.doubles import FakeReactor, PostgresMixin
from tests.storage.id_generator_case import foobar


class WatchTests(PostgresMixin, TestCase):
    """An instance ``w1`` that shares a stream with ``w2``."""

    def setUp(self) -> None:
        from twisted.internet import reactor  # noqa: TID251 -- the tests' own

        self.make_database()
        self.reactor = IReactorFromThreads(reactor)
        self.clock = FakeReactor()
        self.database = Database(self.dsn, self.reactor)
        self.addCleanup(self.connection.close)
        self.addCleanup(self.database.close)

    async def watch(self, *, negative: bool = False) -> MultiWriterIdGenerator:
        ids = await load_id_generator(
            self.database,
            foobar("w1", "w2", negative=negative),
            "w1",
            self.reactor,
            self.clock,
        )
        self.stuck_ids = StuckIdWatch(lambda: {"foo": ids}, self.clock)
        return ids

    def check_after(self, seconds: float) -> list[StuckId]:
        self.clock.advance(seconds)
        self.stuck_ids.check()
        return self.stuck_ids.stuck()

    async def session(self) -> StuckId:
        """Return the only stuck id, once the database has named its session."""
        while True:
            (stuck,) = self.stuck_ids.stuck()
            if stuck.session:
                return stuck
            await deferLater(self.reactor, 0.01)  # type: ignore[arg-type]

    async def test_own_id(self) -> None:
        """An id of this process is stuck until it is finished."""
        ids = await self.watch()
        gate: Deferred[None] = Deferred()

        async def write() -> None:
            async with ids.get_next():
                await gate

        writing = Deferred.fromCoroutine(write())
        while ids.get_first_unfinished() != (2, "w1"):
            await deferLater(self.reactor, 0.01)  # type: ignore[arg-type]
        self.assertEqual(self.check_after(0), [])
        self.assertEqual(self.check_after(STUCK_AFTER - 1), [])
        (stuck,) = self.check_after(1)
        self.assertEqual(stuck, StuckId("foo", 2, "w1", STUCK_AFTER))
        stuck = await self.session()
        self.assertIn("no session", stuck.session)
        self.assertIn("restart", stuck.hint)
        gate.callback(None)
        await writing
        self.assertEqual(self.check_after(5), [])

    async def test_id_of_another(self) -> None:
        """
        The first id that another writer may not have finished is stuck if a later id is
        finished; its age restarts if the position advances.
        """
        ids = await self.watch(negative=True)
        self.assertEqual(self.check_after(STUCK_AFTER), [])
        self.set_sequence(3)
        async with ids.get_next():
            pass
        self.check_after(0)
        ids.advance("w2", -2)
        self.check_after(STUCK_AFTER - 1)
        self.assertEqual(self.check_after(1), [])
        (stuck,) = self.check_after(STUCK_AFTER)
        self.assertEqual((stuck.id, stuck.instance_name), (-3, "w2"))
        ids.advance("w2", -3)
        self.assertEqual(self.check_after(5), [])

    async def test_asks_rarely(self) -> None:
        """The database is queried only for stuck ids, and rarely."""
        asked: list[str] = []
        transact = self.database.transact

        def counting(description: str, *args: object, **more: object) -> object:
            asked.append(description)
            return transact(description, *args, **more)  # type: ignore[arg-type]

        ids = await self.watch()
        self.patch(self.database, "transact", counting)
        async with ids.get_next():
            asked.clear()
            self.check_after(0)
            self.check_after(STUCK_AFTER - 1)
            self.assertEqual(asked, [])
            for _ in range(int(ASK_EVERY)):
                self.check_after(1)
            self.assertEqual(asked, ["find_session"])
            await self.session()

    async def test_failed_query(self) -> None:
        """If the sessions cannot be read, the id is reported nevertheless."""
        ids = await self.watch()
        unreachable = Database("port=1 host=::", self.reactor)
        self.addCleanup(unreachable.close)
        async with ids.get_next():
            self.patch(ids, "database", unreachable)
            self.check_after(0)
            self.check_after(STUCK_AFTER)
            stuck = await self.session()
        self.assertIn("could not be read", stuck.session)


class FindSessionTests(PostgresMixin, TestCase):
    """Sessions with open transactions, which count as old immediately."""

    def setUp(self) -> None:
        self.patch(stuck_id_watch, "STUCK_AFTER", 0.0)
        self.make_database()
        self.addCleanup(self.connection.close)

    def open(self, statement: str) -> psycopg2.extensions.connection:
        """Run a statement in a transaction that stays open."""
        connection = connect(self.dsn + " application_name=app")
        self.addCleanup(connection.close)
        connection.cursor().execute(statement)
        return connection

    def find(self) -> Session | None:
        with self.connection.cursor() as cursor:
            return find_session(cursor, ["foobar", "missing"])

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
        waiting = self.open("SELECT 1")
        holder = self.open("LOCK TABLE foobar IN SHARE MODE")
        insert = waiting.cursor().execute
        inserting = threading.Thread(
            target=insert, args=("INSERT INTO foobar VALUES (2, 'w1')",)
        )
        inserting.start()
        blocked = [([pid(holder)],)]
        while self.sql("SELECT pg_blocking_pids(%s)", pid(waiting)) != blocked:
            pass
        session = self.find()
        assert session is not None
        self.assertEqual(session.pid, pid(waiting))
        self.assertIn(f"waits for session {pid(holder)}", session.describe())
        self.assertIn(f"pg_terminate_backend({pid(holder)})", session.hint())
        holder.rollback()
        inserting.join()

    def test_without_privileges(self) -> None:
        """A session of another role is found by its locks, without its query."""
        writing = self.open("INSERT INTO foobar VALUES (2, 'w1')")
        self.sql("CREATE ROLE stuck_id_reader LOGIN")
        self.addCleanup(self.sql, "DROP ROLE stuck_id_reader")
        with self.connection.cursor() as cursor:
            cursor.execute("SET ROLE stuck_id_reader")
            found = find_session(cursor, ["foobar"])
            cursor.execute("RESET ROLE")
        assert found is not None
        self.assertEqual(
            (found.pid, found.query, found.open_for), (pid(writing), "", None)
        )
        self.assertIn("pg_read_all_stats", found.describe())


def pid(connection: psycopg2.extensions.connection) -> int:
    """Return the process id of a session."""
    return connection.get_backend_pid()
