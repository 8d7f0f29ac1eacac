"""Tests for a streaming query beside a writer whose COMMIT was not answered."""

from __future__ import annotations

import os
import socket
from typing import Any

import psycopg2
from twisted.internet import task
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.trial.unittest import TestCase

from synapse_replication.errors import CommitUnknownError
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.storage import database as pool, lost_answers
from synapse_replication.storage.id_generators import load_id_generator
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.streams.id_column import IdColumn
from tests.pipeline.source.test_streaming import Database, Follower, of

#: Let the commit of a row of the user ``@slow`` wait for a lock.
_SLOW_COMMIT = """
    CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF new.user_id = '@slow' THEN PERFORM pg_advisory_xact_lock(77); END IF;
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON receipts_linearized
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait()
"""
_WAITING = (
    "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = 77"
)


class LostAnswerTests(TestCase):
    """The writer and the query use one server."""

    timeout = 60

    async def test_row_of_an_unsettled_id(self) -> None:
        """
        No row beyond the unsettled id is read before it is settled, and then all are.
        """
        from twisted.internet import reactor  # noqa: TID251 -- the tests' own

        self.patch(pool, "OUTCOME_WAIT", 0.05)
        self.patch(lost_answers, "ASK_INTERVAL", 0.05)
        database = Database()
        database.sql(_SLOW_COMMIT)
        own = psycopg2.connect(database.dsn)
        self.addCleanup(own.close)
        own.autocommit = True
        cursor = own.cursor()
        cursor.execute("SELECT pg_advisory_lock(77)")
        connections = pool.Database(database.dsn, IReactorFromThreads(reactor))
        self.addCleanup(connections.close)
        stream = IdStream(
            stream_name="receipts",
            sequence="receipts_sequence",
            tables=(IdColumn("receipts_linearized", "stream_id", "instance_name"),),
            writers=("w",),
        )
        clock: Any = ReactorClock(reactor)
        threads = IReactorFromThreads(reactor)
        ids = await load_id_generator(connections, stream, "w", threads, clock)
        used: list[Any] = []

        async def write(user: str) -> None:
            def insert(txn: Any, id_: int) -> None:
                used.append(txn.connection)
                txn.execute(
                    "INSERT INTO receipts_linearized VALUES "
                    "(%s, '!r', 'm.read', %s, '$e', '{}', 'w', NULL)",
                    (id_, user),
                )

            async with ids.get_next() as id_:
                await connections.transact("write", lambda txn: insert(txn, id_))

        async def until(condition: Any) -> None:
            while not condition():
                await task.deferLater(reactor, 0.02)

        def is_waiting() -> bool:
            cursor.execute(_WAITING)
            return bool(cursor.rowcount)

        writing = Deferred.fromCoroutine(write("@slow"))
        await until(is_waiting)
        with socket.socket(fileno=os.dup(used[0].fileno())) as client:
            client.shutdown(socket.SHUT_RDWR)
        await self.assertFailure(writing, CommitUnknownError)
        await write("@quick")
        follower = Follower(database)
        self.assertEqual(follower.read(), [])
        cursor.execute("SELECT pg_advisory_unlock(77)")
        await until(lambda: ids.get_current_token() == 1002)
        await write("@quick")
        self.assertEqual(follower.read(), of("w", 1001, 1002, 1003))
