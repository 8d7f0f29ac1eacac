"""Tests for what becomes of rows that a PostgresStream writes while COMMIT waits."""

from __future__ import annotations

import os
import socket
from typing import Any
from unittest import mock

import psycopg2
from twisted.internet import task
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.trial.unittest import TestCase

from synapse_replication.errors import CommitUnknownError, StreamClosedError
from synapse_replication.storage import database as database_module, lost_answers
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_generators import load_id_generator
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.postgres_stream import PostgresStream
from synapse_replication.storage.transactions import connect
from synapse_replication.testing.servers import shared_postgres
from tests.storage.doubles import FakeReactor
from tests.storage.postgres_stream_case import ORDERS, SCHEMA

#: Let the COMMIT of each row wait for a lock, which the test's session holds. The
#: commit of an item 'failing' then fails; the first one of an item 'repeated' fails
#: because of a concurrent transaction.
SLOW_COMMIT = """
    CREATE SEQUENCE attempts;
    CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF new.item = 'repeated' AND nextval('attempts') = 1 THEN
            RAISE 'it conflicts' USING ERRCODE = 'serialization_failure';
        END IF;
        PERFORM pg_advisory_xact_lock(77);
        IF new.item = 'failing' THEN RAISE 'it fails'; END IF;
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON orders
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait();
    SELECT setval('orders_seq', 1);
    SELECT pg_advisory_lock(77);
"""


class WriteTests(TestCase):
    """Tests for ``write`` with a real id generator, in threads."""

    timeout = 60

    async def setUp(self) -> None:  # type: ignore[override]
        from twisted.internet import reactor  # noqa: TID251 -- the tests' own

        self.reactor: Any = reactor
        dsn = shared_postgres().new_database()
        connection = connect(dsn)
        connection.autocommit = True
        self.cursor = connection.cursor()
        self.cursor.execute(SCHEMA + SLOW_COMMIT)
        #: The connections of the pool, by the process of the server.
        self.connections: dict[int, Any] = {}
        for module, name, value in (
            (database_module, "identify", self.identify),
            (database_module, "OUTCOME_WAIT", 0.05),
            (lost_answers, "ASK_INTERVAL", 0.05),
        ):
            patch = mock.patch.object(module, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        self.database = Database(dsn, IReactorFromThreads(reactor))
        self.addCleanup(self.database.close)
        # Closing this connection releases the lock, so that the pool can be closed.
        self.addCleanup(connection.close)
        self.finished: list[int] = []
        self.ids = await load_id_generator(
            self.database,
            IdStream(
                stream_name=ORDERS.positions_name,
                sequence=ORDERS.sequence,
                tables=ORDERS.id_columns,
                writers=ORDERS.writers,
            ),
            "w1",
            IReactorFromThreads(reactor),
            FakeReactor(),
            on_finished=lambda: self.finished.append(self.token()),
        )
        self.stream = PostgresStream(
            ORDERS, self.database, self.ids, instance_name="w1"
        )

    def identify(self, connection: Any) -> lost_answers.Backend:
        backend = lost_answers.identify(connection)
        self.connections[backend.pid] = connection
        return backend

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        self.cursor.execute(statement)
        return self.cursor.fetchall()

    def token(self) -> int:
        return self.ids.get_current_token_for_writer("w1")

    def ids_of_rows(self) -> list[int]:
        return [id_ for (id_,) in self.sql("SELECT stream_id FROM orders ORDER BY 1")]

    def stored(self) -> list[int]:
        return [id_ for (id_,) in self.sql("SELECT stream_id FROM stream_positions")]

    def write(self, item: str = "") -> Deferred[int]:
        return Deferred.fromCoroutine(
            self.stream.write([ORDERS.row_type(item, 1)]),
        )

    async def until(self, condition: Any) -> Any:
        """Wait until a condition holds; return its value."""
        while not (value := condition()):
            await task.deferLater(self.reactor, 0.02, lambda: None)
        return value

    async def committing(self) -> int:
        """Wait until a COMMIT waits; return the process of the server."""
        ((pid,),) = await self.until(
            lambda: self.sql(
                "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
                "AND database = "
                "(SELECT oid FROM pg_database WHERE datname = current_database())"
            )
        )
        return int(pid)

    def finish_commit(self) -> None:
        self.sql("SELECT pg_advisory_unlock(77)")

    async def test_committing(self) -> None:
        """No position covers the row before its commit; the token does afterwards."""
        writing = self.write()
        await self.committing()
        self.assertEqual((self.token(), self.ids.get_current_token()), (1, 1))
        self.finish_commit()
        self.assertEqual((await writing, self.token(), self.finished), (2, 2, [2]))

    async def test_cancelled(self) -> None:
        """
        A cancelled write fails after its commit. The row is announced all the same.
        """
        writing = self.write()
        await self.committing()
        writing.cancel()
        self.assertNoResult(writing)
        self.assertEqual(self.token(), 1)
        self.finish_commit()
        await self.assertFailure(writing, CancelledError)
        self.assertEqual((self.ids_of_rows(), self.finished), ([2], [2]))

    async def test_failed(self) -> None:
        """If COMMIT fails, the token has no row, and the next one is announced."""
        writing = self.write("failing")
        await self.committing()
        self.finish_commit()
        await self.assertFailure(writing, psycopg2.Error)
        self.assertEqual((self.ids_of_rows(), self.token()), ([], 2))
        self.assertEqual((await self.write(), self.token()), (3, 3))

    async def test_repeated(self) -> None:
        """A repeated transaction has a new token; both finish after its commit."""
        writing = self.write("repeated")
        await self.committing()
        self.assertEqual((self.token(), self.finished), (1, []))
        self.finish_commit()
        self.assertEqual((await writing, self.ids_of_rows()), (3, [3]))
        self.assertEqual(self.token(), 3)
        self.assertIsNone(self.ids.get_first_unfinished())

    async def test_closed(self) -> None:
        """close() waits for the commit and its position, and refuses further rows."""
        writing = self.write()
        await self.committing()
        closing = Deferred.fromCoroutine(self.ids.close())
        await self.assertFailure(self.write(), StreamClosedError)
        self.assertNoResult(closing)
        self.finish_commit()
        await closing
        self.assertEqual((self.ids_of_rows(), self.stored()), ([2], [2]))
        self.assertEqual(await writing, 2)

    async def test_lost_answer(self) -> None:
        """If the answer to COMMIT is lost, the row is announced after the commit."""
        writing = self.write()
        pid = await self.committing()
        with socket.socket(fileno=os.dup(self.connections[pid].fileno())) as client:
            client.shutdown(socket.SHUT_RDWR)
        await self.assertFailure(writing, CommitUnknownError)
        closing = Deferred.fromCoroutine(self.ids.close())
        self.assertNoResult(closing)
        self.assertEqual((self.token(), self.ids_of_rows()), (1, []))
        self.finish_commit()
        await closing
        self.assertEqual((self.ids_of_rows(), self.finished), ([2], [2]))

    async def test_ended_session(self) -> None:
        """If the session is ended during COMMIT, the row is never announced twice."""
        writing = self.write()
        pid = await self.committing()
        self.sql(f"SELECT pg_terminate_backend({pid})")
        await self.until(lambda: self.finished)
        await self.assertFailure(writing, psycopg2.Error, CommitUnknownError)
        self.assertEqual((self.ids_of_rows(), self.finished), ([], [2]))
        self.finish_commit()
        self.assertEqual((await self.write(), self.ids_of_rows()), (3, [3]))
