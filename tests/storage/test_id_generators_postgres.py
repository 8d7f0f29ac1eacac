"""Tests for id generators on a real PostgreSQL."""

from __future__ import annotations

import gc
import threading
from typing import Any

import psycopg2
from psycopg2.extensions import connection
from twisted.internet import defer, task, threads
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import TestCase

from synapse_replication.app.stop_steps import DRAIN_TIMEOUT, StopSteps
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_generators import (
    MultiWriterIdGenerator,
    load_id_generator,
)
from synapse_replication.storage.transactions import Transaction, connect
from tests.storage.doubles import FakeReactor, PostgresMixin
from tests.storage.id_generator_case import foobar


class _CommittingClock(FakeReactor):
    """A clock on which a transaction is committed while something sleeps."""

    def __init__(self, connection: connection) -> None:
        super().__init__()
        self._connection = connection

    async def sleep(self, delay: float) -> None:
        self._connection.commit()


class PostgresTests(PostgresMixin, TestCase):
    """Generators over a real database."""

    def setUp(self) -> None:
        from twisted.internet import reactor  # noqa: TID251 -- the tests' own

        self.make_database()
        self.reactor = IReactorFromThreads(reactor)
        self.clock = FakeReactor()
        self.database = Database(self.dsn, self.reactor)
        self.addCleanup(self.connection.close)
        self.addCleanup(self.database.close)

    def load(
        self, instance_name: str, *writers: str, negative: bool = False
    ) -> Deferred[MultiWriterIdGenerator]:
        return Deferred.fromCoroutine(
            load_id_generator(
                self.database,
                foobar(*writers, negative=negative),
                instance_name,
                self.reactor,
                self.clock,
            )
        )

    async def write(self, ids: MultiWriterIdGenerator, fail: bool = False) -> int:
        def insert(txn: Transaction) -> None:
            txn.execute("INSERT INTO foobar VALUES (%s, %s)", (id_, ids.instance_name))
            if fail:
                raise RuntimeError("rolled back")

        async with ids.get_next() as id_:
            await self.database.transact("insert", insert)
        return id_

    async def run_turns(self) -> None:
        """Let the reactor run the calls from threads, and their consequences."""
        for _ in range(5):
            await task.deferLater(self.reactor, 0)  # type: ignore[arg-type]

    async def test_fresh(self) -> None:
        """A stream without rows is at 1, and its first id is 2."""
        ids = await self.load("master", "master", "other")
        self.assertEqual(ids.get_positions(), {"master": 1, "other": 1})
        self.assertEqual(await self.write(ids), 2)
        self.assertEqual(self.stored(), {"master": 2})
        self.assertEqual(await ids.get_max_allocated_token(), 2)

    async def test_open_transaction_at_the_start(self) -> None:
        """
        A writer waits for a transaction that its predecessor left, and its position
        includes the row; another process does not wait.
        """
        left = connect(self.dsn)
        self.addCleanup(left.close)
        left.cursor().execute("INSERT INTO foobar VALUES (2, 'first')")
        self.set_sequence(2)
        reader = await self.load("reader", "first", "second")
        self.assertEqual(reader.get_current_token(), 1)
        self.clock = _CommittingClock(left)
        ids = await self.load("first", "first", "second")
        self.assertEqual(ids.get_minimal_local_current_token(), 2)

    async def test_closed_while_its_row_is_written(self) -> None:
        """
        If a coroutine is closed while its transaction runs, the position does not pass
        the row before the commit, even with no other id in flight.
        """
        ids = await self.load("master", "master")
        begun, resume = threading.Event(), threading.Event()
        self.addCleanup(resume.set)

        def insert(txn: Transaction, id_: int) -> None:
            txn.execute("INSERT INTO foobar VALUES (%s, %s)", (id_, "master"))
            begun.set()
            resume.wait(30)

        async def write() -> None:
            async with ids.get_next() as id_:
                await self.database.transact("insert", lambda txn: insert(txn, id_))

        # The test drives the coroutine, which first waits for its id, then for its
        # transaction.
        coroutine = write()
        fetching: Any = coroutine.send(None)
        await defer.DeferredList([fetching])
        coroutine.send(None)
        await threads.deferToThread(begun.wait, 30)
        coroutine.close()
        await self.run_turns()
        self.assertEqual(ids.get_current_token(), 1)
        self.assertEqual(ids.get_minimal_local_current_token(), 1)
        resume.set()
        # The row's transaction has ended, and that of the position has begun.
        await self.database.settled()
        self.assertEqual(ids.get_current_token(), 2)
        await self.database.settled()
        self.assertEqual(self.stored(), {"master": 2})
        # The next write continues from there.
        self.assertEqual(await self.write(ids), 3)

    async def test_stop_while_the_database_is_stuck(self) -> None:
        """
        If transactions do not end, neither the wait for them nor ``close`` succeeds in
        a stop, and both end within their time.
        """
        ids = await self.load("master", "master")
        resume = threading.Event()
        self.addCleanup(resume.set)
        # An allocated id is in flight.
        block = ids.get_next()
        await block.__aenter__()
        running = self.database.transact("stuck", lambda txn: resume.wait(30))
        steps = StopSteps(self.clock)
        steps.add("closing", ids.close)
        steps.add("waiting", self.database.settled)
        with capturedLogs() as logged:
            stopped = Deferred.fromCoroutine(steps.run())
            self.clock.pump([DRAIN_TIMEOUT] * 2)
            gc.collect()
        self.assertEqual(self.successResultOf(stopped), ["waiting", "closing"])
        self.assertEqual(
            [formatEvent(event) for event in logged],
            [
                f"A step of the stop failed ({step}): it did not finish within 10 s"
                for step in ("waiting", "closing")
            ],
        )
        resume.set()
        await running
        await block.__aexit__(None, None, None)

    async def test_failed_while_its_row_is_written(self) -> None:
        """
        If a block fails while a transaction that it requested runs, the position does
        not pass the row before the commit.
        """
        ids = await self.load("master", "master")
        resume = threading.Event()
        self.addCleanup(resume.set)
        inserting: list[Deferred[None]] = []

        def insert(txn: Transaction, id_: int) -> None:
            txn.execute("INSERT INTO foobar VALUES (%s, %s)", (id_, "master"))
            resume.wait(30)

        async def write() -> None:
            async with ids.get_next() as id_:
                inserting.append(
                    self.database.transact("insert", lambda txn: insert(txn, id_))
                )
                raise RuntimeError("failed")

        await self.assertFailure(Deferred.fromCoroutine(write()), RuntimeError)
        async with ids.get_next():
            pass
        self.assertEqual(ids.get_current_token(), 1)
        resume.set()
        await inserting[0]
        self.assertEqual(ids.get_current_token(), 3)

    async def test_closed_while_a_transaction_fetches(self) -> None:
        """close() does not wait for an id that a transaction could not fetch."""
        ids = await self.load("master", "master")
        other = connect(self.dsn)
        self.addCleanup(other.close)
        other.cursor().execute("DROP SEQUENCE foobar_seq")
        inserting = self.database.transact("insert", ids.get_next_txn)
        while not self.sql(
            "SELECT 1 FROM pg_locks WHERE NOT granted AND database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database())"
        ):
            await self.run_turns()
        closing = Deferred.fromCoroutine(ids.close())
        self.assertNoResult(closing)
        other.commit()
        await self.assertFailure(inserting, psycopg2.Error)
        await closing

    async def test_two_writers(self) -> None:
        """Each writer's position is stored, and a restarted writer resumes from it."""
        first = await self.load("first", "first", "second")
        second = await self.load("second", "first", "second")
        self.assertEqual([await self.write(ids) for ids in (first, second)], [2, 3])
        self.assertEqual(self.stored(), {"first": 2, "second": 3})
        self.assertEqual(first.get_current_token(), 2)
        again = await self.load("first", "first", "second")
        self.assertEqual(again.get_positions(), {"first": 3, "second": 3})

    async def test_many_at_once(self) -> None:
        """
        With concurrent blocks of several writers, some rolled back, no id is used twice
        and each position ends at its writer's last id.
        """
        writers = ("a", "b", "c")
        generators = [await self.load(writer, *writers) for writer in writers]
        last: dict[str, int] = {}

        async def run(ids: MultiWriterIdGenerator, fail: bool) -> None:
            for _ in range(4):
                try:
                    id_ = await self.write(ids, fail)
                except RuntimeError:
                    continue
                last[ids.instance_name] = max(last.get(ids.instance_name, 0), id_)

        await defer.gatherResults(
            Deferred.fromCoroutine(run(ids, fail=n % 5 == 0))
            for n in range(20)
            for ids in generators
        )
        # A block that fails does not wait until the position beyond its ids is stored.
        # A further row, which is the last of its writer, waits for that.
        for ids in generators:
            last[ids.instance_name] = await self.write(ids)
        rows = [id_ for (id_,) in self.sql("SELECT stream_id FROM foobar")]
        self.assertEqual(len(rows), len(set(rows)))
        self.assertEqual(len(rows), 3 * (16 * 4 + 1))
        for ids in generators:
            mine = ids.get_minimal_local_current_token()
            self.assertGreaterEqual(mine, last[ids.instance_name])
            self.assertEqual(self.stored()[ids.instance_name], mine)
        # The first round lets every writer announce more; the second advances to that.
        for ids in generators * 2:
            for other in generators:
                token = other.get_current_token_for_writer(other.instance_name)
                ids.advance(other.instance_name, token)
        for ids in generators:
            self.assertGreaterEqual(ids.get_current_token(), max(rows))

    async def test_position_only_moves_forward(self) -> None:
        """A lower position does not even write a new version of the row."""
        ids = await self.load("master", "master")
        await self.write(ids)
        self.sql("UPDATE stream_positions SET stream_id = 50")
        before = self.sql("SELECT xmin, xmax, ctid, stream_id FROM stream_positions")
        await self.write(ids)
        after = self.sql("SELECT xmin, xmax, ctid, stream_id FROM stream_positions")
        self.assertEqual((before[0][0], before[0][3]), (after[0][0], after[0][3]))

    async def test_negative(self) -> None:
        """In a stream that counts down, ids and positions are stored below zero."""
        ids = await self.load("master", "master", negative=True)
        self.assertEqual(ids.get_current_token(), -1)
        self.assertEqual([await self.write(ids) for _ in range(2)], [-2, -3])
        self.assertEqual(self.stored(), {"master": -3})
        again = await self.load("master", "master", negative=True)
        self.assertEqual(again.get_current_token(), -3)

    async def test_in_transactions(self) -> None:
        """Ids fetched inside a transaction are finished when it has ended."""
        ids = await self.load("master", "master")
        inside: list[int] = []

        def insert(txn: Transaction, fail: bool) -> int:
            id_ = ids.get_next_txn(txn)
            inside.append(ids.get_current_token())
            if fail:
                raise RuntimeError("rolled back")
            return id_

        self.assertEqual(
            await self.database.transact("insert", lambda txn: insert(txn, False)), 2
        )
        self.assertEqual((inside, ids.get_current_token()), ([1], 2))
        with self.assertRaises(RuntimeError):
            await self.database.transact("insert", lambda txn: insert(txn, True))
        self.assertEqual(ids.get_current_token(), 3)
