"""
Tests for the ids and positions of a host, on SQLite, and of its start on PostgreSQL.

tests.external.synapse has the other tests on PostgreSQL.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from psycopg2.extensions import ISOLATION_LEVEL_REPEATABLE_READ, connection, cursor
from twisted.enterprise.adbapi import ConnectionPool
from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin import id_generators
from synapse_replication.dropin.id_generators import DropInIdGenerator, HostPositions
from synapse_replication.dropin.settings import variable
from synapse_replication.storage.open_transactions import MAX_WAIT, POLL_SECONDS
from synapse_replication.storage.transactions import connect
from tests.dropin.host import FakeHomeserver, fake_modules
from tests.storage.doubles import PostgresMixin


class _Connection:
    """The host's connection, on SQLite."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.commit = connection.commit

    def cursor(self, *, txn_name: str) -> sqlite3.Cursor:
        return self._connection.cursor()


class _Pool:
    """The host's pool, which runs every transaction immediately."""

    engine = "sqlite"

    def __init__(self, hs: FakeHomeserver, connection: sqlite3.Connection) -> None:
        self.hs = hs
        self._connection = connection

    async def runInteraction(
        self, description: str, func: Callable[[Any], Any], *, db_autocommit: bool
    ) -> Any:
        return func(self._connection.cursor())


class MultiWriterIdGeneratorTests(SynchronousTestCase):
    """Tests for DropInIdGenerator."""

    def setUp(self) -> None:
        self.registry = fake_modules(self)
        self.hs = FakeHomeserver()
        self.connection = sqlite3.connect(":memory:")
        self.addCleanup(self.connection.close)
        self.connection.execute("CREATE TABLE foo (stream_id bigint, writer text)")
        self.connection.execute(
            "CREATE TABLE stream_positions (stream_name text, instance_name text, "
            "stream_id bigint, UNIQUE (stream_name, instance_name))"
        )
        self.pokes = 0

    def _poke(self) -> None:
        self.pokes += 1

    def _make(
        self, *, positive: bool = True, writers: Sequence[str] = ("master",)
    ) -> DropInIdGenerator:
        return DropInIdGenerator(
            db_conn=cast(Any, _Connection(self.connection)),
            db=cast(Any, _Pool(self.hs, self.connection)),
            notifier=SimpleNamespace(notify_replication=self._poke),
            stream_name="foo",
            server_name="test",
            instance_name="master",
            tables=[("foo", "writer", "stream_id")],
            sequence_name="foo_seq",
            writers=writers,
            positive=positive,
        )

    def _allocate(self, ids: DropInIdGenerator) -> int:
        async def take() -> int:
            async with ids.get_next() as id_:
                return id_

        return self.successResultOf(Deferred.fromCoroutine(take()))

    def test_ids(self) -> None:
        """
        The first id is 2; when it is finished, the position advances and is persisted,
        and the streamer is notified.
        """
        ids = self._make()
        self.assertEqual(ids.get_current_token(), 1)
        self.assertEqual(self._allocate(ids), 2)
        self.assertEqual(ids.get_current_token(), 2)
        self.assertEqual(ids.get_positions(), {"master": 2})
        self.assertEqual(self.pokes, 1)
        self.assertEqual(
            self.connection.execute("SELECT * FROM stream_positions").fetchall(),
            [("foo", "master", 2)],
        )

    def test_position_follows_others(self) -> None:
        """
        The streamer is notified if the position of this process follows that of another
        writer, and only then.
        """
        ids = self._make(writers=["master", "w2"])
        ids.advance("w2", 2)
        self.assertEqual(self.pokes, 1)
        ids.advance("w2", 2)
        ids.advance("undeclared", 5)
        self.assertEqual(self.pokes, 1)
        self._make().advance("master", 9)
        self.assertEqual(self.pokes, 1)

    def test_continues_after_greatest_id(self) -> None:
        """Ids continue after the greatest id in the tables, in either direction."""
        for sign in (1, -1):
            self.connection.execute("INSERT INTO foo VALUES (?, 'master')", (7 * sign,))
            ids = self._make(positive=sign > 0)
            self.assertEqual(self._allocate(ids), 8 * sign)

    def test_metric(self) -> None:
        """
        The host's metric of positions is updated, with positive values in either
        direction.
        """
        labels = {"stream_name": "foo", "server_name": "test"}
        for sign in (1, -1):
            self._allocate(self._make(positive=sign > 0))
            value = self.registry.get_sample_value(
                "synapse_storage_stream_current_position", labels
            )
            self.assertEqual(value, 2)

    def test_greatest_issued(self) -> None:
        """Without a sequence, the last known id counts as the greatest issued one."""
        ids = self._make()
        self._allocate(ids)
        greatest = Deferred.fromCoroutine(ids.get_max_allocated_token())
        self.assertEqual(self.successResultOf(greatest), 2)


class _PostgresConnection:
    """The host's connection, with its isolation level."""

    def __init__(self, connection: connection) -> None:
        connection.set_isolation_level(ISOLATION_LEVEL_REPEATABLE_READ)
        self._connection = connection
        self.commit = connection.commit

    def cursor(self, *, txn_name: str) -> cursor:
        return self._connection.cursor()


class StartTests(PostgresMixin, SynchronousTestCase):
    """A process of the host that starts while a row is being written."""

    def setUp(self) -> None:
        fake_modules(self)
        self.hs = FakeHomeserver()
        self.make_database()
        self.addCleanup(self.connection.close)
        self.writing, own = connect(self.dsn), connect(self.dsn)
        self.addCleanup(self.writing.close)
        self.addCleanup(own.close)
        self.db_conn = _PostgresConnection(own)
        self.write_rows("w1", 2)
        self.set_sequence(3)
        # The host has used the connection, whose transaction does not see later rows.
        self.db_conn.cursor(txn_name="").execute("SELECT 1")
        self.writing.cursor().execute("INSERT INTO foobar VALUES (3, 'w1')")
        self.pool = ConnectionPool("psycopg2", self.dsn)
        self.slept: list[float] = []
        self.patch(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.writing.commit()

    def start(self, instance_name: str) -> DropInIdGenerator:
        engine = sys.modules["synapse.storage.engines"].PostgresEngine()
        with patch.dict(os.environ, {variable("writer_lock"): "false"}):
            return DropInIdGenerator(
                db_conn=cast(Any, self.db_conn),
                db=SimpleNamespace(hs=self.hs, engine=engine, _db_pool=self.pool),
                notifier=SimpleNamespace(notify_replication=lambda: None),
                stream_name="foobar",
                server_name="test",
                instance_name=instance_name,
                tables=[("foobar", "instance_name", "stream_id")],
                sequence_name="foobar_seq",
                writers=["w1", "w2"],
            )

    def test_writer(self) -> None:
        """A writer waits for the transaction, and its position includes the row."""
        ids = self.start("w1")
        self.assertEqual(self.slept, [POLL_SECONDS])
        self.assertEqual(ids.get_minimal_local_current_token(), 3)

    def test_long_transaction(self) -> None:
        """A process waits for a transaction, and then ends it for all its streams."""
        now = [0.0]
        self.patch(time, "monotonic", lambda: now[0])
        self.patch(id_generators, "_first_seen", {})

        def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            now[0] += seconds

        self.patch(time, "sleep", sleep)
        with capturedLogs() as logged:
            for _ in range(3):
                self.start("w1")
        # The session ends in real time, and is waited for meanwhile.
        self.assertGreaterEqual(sum(self.slept), MAX_WAIT - POLL_SECONDS)
        (event,) = logged
        self.assertIn("Ended a session", formatEvent(event))

    def test_committed_before(self) -> None:
        """The position includes a row that was committed after the host connected."""
        self.writing.commit()
        self.assertEqual(self.start("w1").get_minimal_local_current_token(), 3)
        self.assertEqual(self.slept, [])

    def test_reader(self) -> None:
        """A process that does not write the stream does not wait."""
        ids = self.start("reader")
        self.assertEqual(self.slept, [])
        self.assertEqual(ids.get_current_token(), 2)

    def test_reader_after_a_removal(self) -> None:
        """A reader waits if a removed writer may have left the transaction."""
        self.sql("INSERT INTO stream_positions VALUES ('foobar', 'removed', 1)")
        self.db_conn.commit()
        ids = self.start("reader")
        self.assertEqual(self.slept, [POLL_SECONDS])
        self.assertEqual(ids.get_current_token(), 3)


def _allocate(positions: HostPositions, *ids: int) -> None:
    positions.end_fetch(positions.begin_fetch(), ids)


class HostPositionsTests(SynchronousTestCase):
    """Tests for HostPositions."""

    def test_first_id(self) -> None:
        """The first id of a new sequence can be used exactly once."""
        positions = HostPositions("w", ["w"])
        _allocate(positions, 1)
        self.assertEqual((positions.announced, positions.persisted_upto), (1, 1))
        self.assertRaises(ValueError, _allocate, positions, 1)
        positions.finish([1])
        self.assertEqual((positions.announced, positions.local), (1, 1))
        self.assertRaises(ValueError, _allocate, positions, 1)
        _allocate(positions, 2)
        positions.finish([2])
        self.assertEqual(positions.all_positions(), {"w": 2})

    def test_first_id_of_a_stream_that_was_written(self) -> None:
        """A sequence that restarts at 1 is detected."""
        positions = HostPositions("w", ["w"], {"w": 7})
        self.assertRaises(ValueError, _allocate, positions, 1)

    def test_peer_ids_finish_while_own_in_flight(self) -> None:
        """Ids of other writers are announced once no id of this writer is in flight."""
        positions = HostPositions("second", ["first", "second"], {"first": 3}, [7], 3)
        positions.advance("first", 9)
        self.assertEqual(positions.announced, 9)
        _allocate(positions, 12)
        positions.advance("first", 11)
        self.assertEqual(positions.announced, 9)
        positions.finish([12])
        self.assertEqual((positions.announced, positions.local), (12, 12))

    def test_own_ids_finish_out_of_order(self) -> None:
        """Ids of this writer are announced only below its smallest id in flight."""
        positions = HostPositions("w", ["w", "v"], {"w": 7, "v": 7})
        _allocate(positions, 8, 9, 12)
        positions.finish([9])
        self.assertEqual(positions.announced, 7)
        positions.finish([8])
        self.assertEqual((positions.announced, positions.local), (9, 9))
        positions.finish([12])
        self.assertEqual(positions.announced, 12)
