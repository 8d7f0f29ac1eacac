"""Tests for transactions whose COMMIT was not answered, on a real server."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Any
from unittest import mock

import attrs
import psycopg2
from twisted.internet import task
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorFromThreads
from twisted.trial.unittest import TestCase

from synapse_replication.errors import CommitUnknownError
from synapse_replication.storage import database as database_module, lost_answers
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_generators import (
    MultiWriterIdGenerator,
    load_id_generator,
)
from synapse_replication.storage.lost_answers import Backend, LostAnswer, LostAnswers
from synapse_replication.storage.stuck_id_watch import STUCK_AFTER, StuckIdWatch
from synapse_replication.storage.transactions import Transaction, connect
from synapse_replication.streams.writer import TransactionOutcome
from synapse_replication.streams.writer_table import TransactionEvent, TransactionState
from tests.storage.doubles import FakeReactor, PostgresMixin
from tests.storage.id_generator_case import foobar

#: Let commits of rows of ``foobar`` wait for a lock, which the test's session holds.
#: The commit of a row 'failing' then fails.
SLOW_COMMIT = """
    CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        PERFORM pg_advisory_xact_lock(77);
        IF new.data = 'failing' THEN RAISE 'it fails'; END IF;
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON foobar
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait();
    SELECT pg_advisory_lock(77);
"""


class LostAnswerTests(PostgresMixin, TestCase):
    """The connection breaks while PostgreSQL commits."""

    timeout = 60

    def setUp(self) -> None:
        from twisted.internet import reactor  # noqa: TID251 -- the tests' own

        self.make_database()
        self.sql(SLOW_COMMIT)
        self.reactor: Any = reactor
        self.database = Database(self.dsn, IReactorFromThreads(reactor))
        self.addCleanup(self.connection.close)
        self.addCleanup(self.database.close)
        self.calls: list[str] = []
        self.set_wait(0.05)
        patch = mock.patch.object(lost_answers, "ASK_INTERVAL", 0.05)
        patch.start()
        self.addCleanup(patch.stop)
        # Its connection breaks, as if the network did.
        self.breaking: list[Any] = []

    def set_wait(self, seconds: float) -> None:
        """Set how long a caller waits for the outcome."""
        patch = mock.patch.object(database_module, "OUTCOME_WAIT", seconds)
        patch.start()
        self.addCleanup(patch.stop)

    def insert(self, txn: Transaction, id_: int = 5, data: str = "") -> str:
        txn.execute("INSERT INTO foobar VALUES (%s, 'master', %s)", (id_, data))
        txn.call_after(self.calls.append, "after")
        txn.call_on_exception(self.calls.append, "on exception")
        self.breaking.append(txn.connection)
        return "inserted"

    async def until(self, condition: Any) -> None:
        """Wait until a condition holds."""
        while not condition():
            await task.deferLater(self.reactor, 0.02, lambda: None)

    async def break_commit(self) -> None:
        """Break the connection of the commit that is in progress."""
        await self.until(
            lambda: self.sql(
                "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
                "AND database = "
                "(SELECT oid FROM pg_database WHERE datname = current_database())"
            )
        )
        with socket.socket(fileno=os.dup(self.breaking.pop().fileno())) as client:
            client.shutdown(socket.SHUT_RDWR)

    def finish_commit(self) -> None:
        self.sql("SELECT pg_advisory_unlock(77)")

    def ids_of_rows(self) -> list[int]:
        return [id_ for (id_,) in self.sql("SELECT stream_id FROM foobar ORDER BY 1")]

    async def test_committed_later(self) -> None:
        """
        The caller learns that the outcome is unknown; the callbacks run, and the
        transaction counts as ended, once PostgreSQL has committed it.
        """
        inserting = self.database.transact("insert", self.insert)
        await self.break_commit()
        await self.assertFailure(inserting, CommitUnknownError)
        settled = self.database.settled()
        (lost,) = self.database.lost_answers()
        self.assertIn("insert", lost.describe())
        await self.until(lambda: lost.session == "active")
        self.assertNoResult(settled)
        self.assertEqual(self.calls, [])
        self.finish_commit()
        await settled
        self.assertEqual((self.ids_of_rows(), self.calls), ([5], ["after"]))
        self.assertEqual(self.database.lost_answers(), [])

    async def test_committed_soon(self) -> None:
        """A caller that learns the outcome in time gets the result."""
        self.set_wait(30)
        inserting = self.database.transact("insert", self.insert)
        await self.break_commit()
        await self.until(self.database.lost_answers)
        self.finish_commit()
        self.assertEqual(await inserting, "inserted")
        self.assertEqual(self.calls, ["after"])

    async def test_rolled_back(self) -> None:
        """If the commit fails later, the callbacks for a rollback run."""
        self.set_wait(30)
        inserting = self.database.transact(
            "insert", lambda txn: self.insert(txn, data="failing")
        )
        await self.break_commit()
        await self.until(self.database.lost_answers)
        self.finish_commit()
        await self.assertFailure(inserting, psycopg2.Error)
        self.assertEqual((self.ids_of_rows(), self.calls), ([], ["on exception"]))

    async def load(self) -> MultiWriterIdGenerator:
        return await load_id_generator(
            self.database,
            foobar("master"),
            "master",
            IReactorFromThreads(self.reactor),
            FakeReactor(),
        )

    async def check_block(self, ids: MultiWriterIdGenerator, block: Any) -> None:
        """Check that no position passes the ids of a block before the commit."""
        before = ids.get_current_token_for_writer("master")
        writing = Deferred.fromCoroutine(block())
        await self.break_commit()
        await self.until(self.database.lost_answers)
        writing.addErrback(lambda failure: failure.trap(CommitUnknownError))
        await writing
        async with ids.get_next():
            pass
        async with ids.get_next():
            pass
        self.assertEqual(ids.get_current_token_for_writer("master"), before)
        self.assertEqual(ids.get_current_token(), before)
        settled = self.database.settled()
        self.finish_commit()
        await settled
        token = ids.get_current_token_for_writer("master")
        self.assertLessEqual(max(self.ids_of_rows()), token)

    async def test_block(self) -> None:
        """The id of a block stays unfinished."""
        ids = await self.load()

        async def block() -> None:
            async with ids.get_next() as id_:
                await self.database.transact(
                    "insert", lambda txn: self.insert(txn, id_)
                )

        await self.check_block(ids, block)

    async def test_swallowed_in_the_block(self) -> None:
        """So does that of a block which catches the error."""
        ids = await self.load()

        async def block() -> None:
            async with ids.get_next() as id_:
                with contextlib.suppress(CommitUnknownError):
                    await self.database.transact(
                        "insert", lambda txn: self.insert(txn, id_)
                    )

        await self.check_block(ids, block)

    async def test_several_ids_in_a_transaction(self) -> None:
        """So do several ids that a transaction allocates itself."""
        ids = await self.load()

        def insert(txn: Transaction) -> None:
            for id_ in ids.get_next_mult_txn(txn, 3):
                self.insert(txn, id_)

        async def block() -> None:
            await self.database.transact("insert", insert)

        await self.check_block(ids, block)
        self.assertEqual(self.calls, ["after"] * 3)

    async def test_stuck_id(self) -> None:
        """The status says which answer was lost, and what settles it."""
        ids = await self.load()
        clock = FakeReactor()
        watch = StuckIdWatch(lambda: {"foobar": ids}, clock)

        async def block() -> None:
            async with ids.get_next() as id_:
                await self.database.transact(
                    "insert", lambda txn: self.insert(txn, id_)
                )

        writing = Deferred.fromCoroutine(block())
        await self.break_commit()
        await self.assertFailure(writing, CommitUnknownError)
        watch.check()
        clock.advance(STUCK_AFTER)
        await self.until(lambda: self.database.lost_answers()[0].session == "active")
        watch.check()
        (stuck,) = watch.stuck()
        self.assertRegex(
            stuck.session, "answer to COMMIT of transaction insert was lost .* active"
        )
        self.assertIn("pg_terminate_backend", stuck.hint)
        self.finish_commit()
        await self.database.settled()
        watch.check()
        self.assertEqual(watch.stuck(), [])

    async def test_other_transaction(self) -> None:
        """A block whose own transactions have ended does not wait for another."""
        ids = await self.load()
        inserting = self.database.transact("insert", self.insert)
        await self.break_commit()
        await self.assertFailure(inserting, CommitUnknownError)
        async with ids.get_next() as id_:
            pass
        self.assertEqual(ids.get_current_token_for_writer("master"), id_)
        self.finish_commit()
        await self.database.settled()

    async def test_behind_a_pooler(self) -> None:
        """Where the session is not known, the number of the transaction decides."""

        def identify(connection: Any) -> Backend:
            return attrs.evolve(lost_answers.identify(connection), pid=0)

        patch = mock.patch.object(database_module, "identify", identify)
        patch.start()
        self.addCleanup(patch.stop)

        def insert(txn: Transaction) -> None:
            self.insert(txn)
            txn.after_callbacks.clear()

        inserting = self.database.transact("insert", insert)
        await self.break_commit()
        await self.assertFailure(inserting, CommitUnknownError)
        await self.until(
            lambda: self.database.lost_answers()[0].session != "not known yet"
        )
        settled = self.database.settled()
        self.assertNoResult(settled)
        self.finish_commit()
        await settled
        self.assertEqual(self.ids_of_rows(), [5])

    async def test_closed(self) -> None:
        """close() gives up, and the transaction never counts as ended."""
        self.set_wait(30)
        inserting = self.database.transact("insert", self.insert)
        await self.break_commit()
        await self.until(self.database.lost_answers)
        settled = self.database.settled()
        await self.database.close()
        await self.assertFailure(inserting, CommitUnknownError)
        self.assertNoResult(settled)
        self.assertEqual(self.calls, [])
        self.finish_commit()

    async def test_commit_that_has_not_arrived(self) -> None:
        """The session is ended, so that a COMMIT on its way cannot arrive."""
        other = connect(self.dsn)
        self.addCleanup(other.close)
        lost = self.lost(lost_answers.identify(other))
        other.cursor().execute("SELECT 1")
        event = await self.database.transact("ask", lost.ask, autocommit=True)
        self.assertIs(event, TransactionEvent.FOUND_IDLE)
        while event is not TransactionEvent.FOUND_ENDED:
            event = await self.database.transact("ask", lost.ask, autocommit=True)
        with self.assertRaises(psycopg2.OperationalError):
            other.cursor().execute("COMMIT")

    async def test_settings_of_a_session(self) -> None:
        """A session is found whatever the time zone and the role of the asker are."""
        # This role may not see when a session of another role started.
        hidden = "ROLE pg_signal_backend"
        for own, setting in (
            ("TIME ZONE 'UTC'", "TIME ZONE 'Asia/Tokyo'"),
            ("TIME ZONE 'UTC'", hidden),
            (hidden, hidden),
            (hidden, "TIME ZONE 'Asia/Tokyo'"),
        ):
            other = connect(self.dsn)
            self.addCleanup(other.close)
            other.cursor().execute(f"SET {own}")
            lost = self.lost(lost_answers.identify(other))

            def ask(
                txn: Transaction, lost: LostAnswer = lost, setting: str = setting
            ) -> TransactionEvent:
                txn.execute(f"SET LOCAL {setting}")
                return lost.ask(txn)

            event = await self.database.transact("ask", ask)
            self.assertIn(
                event,
                (TransactionEvent.FOUND_OPEN, TransactionEvent.FOUND_IDLE),
                (own, setting),
            )

    async def test_service_without_timelines(self) -> None:
        """Where the timeline cannot be read, the database is asked nevertheless."""
        self.sql("REVOKE EXECUTE ON FUNCTION pg_current_wal_lsn() FROM PUBLIC")
        database = Database(
            f"{self.dsn} options='-c role=pg_read_all_stats'", self.reactor
        )
        self.addCleanup(database.close)
        other = connect(f"{self.dsn} options='-c role=pg_read_all_stats'")
        self.addCleanup(other.close)
        other.autocommit = True
        ((xid,),) = self.sql("SELECT pg_current_xact_id()::text")
        lost = self.lost(lost_answers.identify(other), xid)
        event = await database.transact("ask", lost.ask)
        self.assertIs(event, TransactionEvent.FOUND_COMMITTED)

    async def test_closed_while_asking(self) -> None:
        """close() does not block the reactor while the database does not answer."""
        self.set_wait(30)
        asked, answer = threading.Event(), threading.Event()

        def ask(lost: LostAnswer, txn: Any) -> TransactionEvent:
            asked.set()
            answer.wait(5)
            return TransactionEvent.NOT_FOUND_OUT

        patch = mock.patch.object(LostAnswer, "ask", ask)
        patch.start()
        self.addCleanup(patch.stop)
        inserting = self.database.transact("insert", self.insert)
        await self.break_commit()
        await self.until(asked.is_set)
        closing = self.database.close()
        self.assertNoResult(closing)
        answer.set()
        await closing
        await self.assertFailure(inserting, CommitUnknownError)
        self.finish_commit()

    async def test_failover(self) -> None:
        """After a failover, the number may be that of another transaction."""
        (row,) = self.sql(
            "SELECT pid, backend_start::text, pg_current_xact_id()::text "
            "FROM pg_stat_get_activity(pg_backend_pid())"
        )
        pid, started, xid = row
        lost = self.lost(Backend(pid, started, "000000FF"), xid)
        event = await self.database.transact("ask", lost.ask, autocommit=True)
        self.assertIs(event, TransactionEvent.FOUND_ENDED)

    async def test_question_fails(self) -> None:
        """A question that fails for any reason is repeated, also about others."""
        other = Backend(0, None, None)
        lost, failing = self.lost(other), self.lost(other)
        events = iter([TransactionEvent.NOT_FOUND_OUT, TransactionEvent.FOUND_ENDED])
        errors = iter([ValueError("no")])
        settled: list[LostAnswer] = []
        clock = task.Clock()

        def ask(about: LostAnswer) -> Deferred[TransactionEvent]:
            if about is failing:
                for error in errors:
                    return fail(error)
                return succeed(TransactionEvent.FOUND_ENDED)
            return succeed(next(events))

        def settle(about: LostAnswer, effects: object) -> None:
            settled.append(about)
            if about is failing:
                raise ValueError("not completed")

        lost_ones = LostAnswers(ask, clock, settle)
        lost_ones.add(failing)
        lost_ones.add(lost)
        clock.advance(0)
        self.assertEqual(failing.session, "not known: no")
        self.assertEqual(len(lost_ones), 2)
        clock.advance(lost_answers.ASK_INTERVAL)
        self.assertEqual(settled, [failing, lost])
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 2)

    def lost(self, backend: Backend, xid: str | None = None) -> LostAnswer:
        """Return a transaction of another session, whose answer was lost."""
        return LostAnswer(
            "insert",
            backend,
            xid,
            psycopg2.OperationalError("the network is down"),
            TransactionOutcome(TransactionState.LOST),
            lambda effects: [],
        )
