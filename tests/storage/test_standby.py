"""Tests for reading rows from a hot standby, on real servers."""

from __future__ import annotations

import contextlib
from typing import Any

import psycopg2
import psycopg2.extensions
from twisted.trial.unittest import TestCase

from synapse_replication.errors import DatabaseBehindError
from synapse_replication.storage.id_streams import id_stream_of
from synapse_replication.storage.postgres_stream import PostgresStream
from synapse_replication.storage.sequences import limit_positions
from synapse_replication.storage.standby import preferring_writable, read_role
from synapse_replication.storage.transactions import Transaction
from synapse_replication.streams.tokens import MultiWriterStreamToken
from synapse_replication.testing.servers import PrivatePostgres
from tests.storage.postgres_stream_case import (
    ORDERS,
    SCHEMA,
    CountingIds,
    ImmediateDatabase,
)
from tests.support.standby import replicated_postgres


def _connect(server: PrivatePostgres, name: str) -> psycopg2.extensions.connection:
    connection: psycopg2.extensions.connection = psycopg2.connect(server.dsn(name))
    connection.autocommit = True
    return connection


class StandbyTests(TestCase):
    """A reader of ``orders`` whose database is a standby, the replay of which stops."""

    def setUp(self) -> None:
        servers = replicated_postgres()
        self.primary, self.standby = servers.primary, servers.standby
        self.pause, self.resume = servers.pause, servers.resume
        name = psycopg2.extensions.parse_dsn(self.primary.new_database())["dbname"]
        self.writer = _connect(self.primary, name)
        self.addCleanup(self.writer.close)
        with self.writer.cursor() as txn:
            txn.execute(SCHEMA)
            for writer in ("w1", "w2"):
                txn.execute(
                    "INSERT INTO stream_positions VALUES ('orders', %s, 1)", [writer]
                )
        servers.resume()
        self.addCleanup(servers.resume)
        self.reader = _connect(self.standby, name)
        self.addCleanup(self.reader.close)
        self.stream = PostgresStream(
            ORDERS,
            ImmediateDatabase(self.reader),
            CountingIds(),
            instance_name="reader",
        )

    def write(self, *tokens: int, writer: str = "w1", stored: int | None) -> None:
        with self.writer.cursor() as txn:
            for token in tokens:
                txn.execute(
                    "INSERT INTO orders VALUES (%s, %s, 'x', NULL)", [token, writer]
                )
            if stored is not None:
                txn.execute(
                    "UPDATE stream_positions SET stream_id = %s "
                    "WHERE instance_name = %s",
                    [stored, writer],
                )

    async def fetch(self, after: int, upto: int, writer: str = "w1") -> tuple[Any, ...]:
        page = await self.stream.get_updates_since(writer, after, upto)
        return [t for t, _ in page.updates], page.upto_token, page.limited

    async def test_missing_rows_are_waited_for(self) -> None:
        """
        A standby that lacks rows does not show that there are none; once it has
        replayed them, they are returned.
        """
        self.write(2, 3, stored=3)
        self.pause()
        self.write(4, 5, stored=5)
        self.assertEqual(await self.fetch(1, 5), ([2, 3], 3, True))
        with self.assertRaisesRegex(
            DatabaseBehindError,
            r"its database is a standby, which is \d+ s behind: it shows 3 of w1 in "
            r"orders, but 5 was announced",
        ):
            await self.fetch(3, 5)
        self.resume()
        self.assertEqual(await self.fetch(3, 5), ([4, 5], 5, False))

    async def test_row_above_the_stored_position(self) -> None:
        """A row that is visible says nothing about lower ids."""
        self.write(2, 4, stored=2)
        self.pause()
        self.write(3, stored=4)
        self.assertEqual(await self.fetch(1, 4), ([2], 2, True))
        self.resume()
        self.assertEqual(await self.fetch(2, 4), ([3, 4], 4, False))

    async def test_idle_writer(self) -> None:
        """A stored position without rows proves that there are none."""
        self.write(stored=50, writer="w2")
        self.pause()
        self.assertEqual(await self.fetch(1, 50, "w2"), ([], 50, False))

    async def test_new_writer(self) -> None:
        """A declared writer without a stored position may have rows."""
        self.write(stored=5)
        with self.writer.cursor() as txn:
            txn.execute("DELETE FROM stream_positions WHERE instance_name = 'w2'")
        self.pause()
        with self.assertRaisesRegex(DatabaseBehindError, "shows no position of w2"):
            await self.fetch(1, 5, "w2")

    async def test_removed_writer(self) -> None:
        """The rows of a writer that is not declared, and has no position, are final."""
        self.write(7, writer="w3", stored=None)
        self.pause()
        self.assertEqual(await self.fetch(1, 7, "w3"), ([7], 7, False))

    async def test_far_behind(self) -> None:
        """A token is not false because a standby has not replayed its sequence."""
        self.pause()
        with self.assertRaisesRegex(DatabaseBehindError, "but 5000000 was announced"):
            await self.fetch(1, 5_000_000)

    async def test_false_token(self) -> None:
        """A token that a page does not reach is not taken for that of the sequence."""
        self.write(2, 3, stored=3)
        self.pause()
        self.assertEqual(await self.fetch(1, 2**62), ([2, 3], 3, True))
        self.assertFalse(self.stream.is_plausible("w1", 2**61))

    async def test_rows_between(self) -> None:
        """Rows between two tokens are returned if the standby has all of them."""
        self.write(2, stored=2)
        self.write(3, writer="w2", stored=3)
        self.pause()
        self.write(4, stored=4)
        high = MultiWriterStreamToken(3, {"w1": 4})
        with self.assertRaisesRegex(DatabaseBehindError, "shows 2 of w1"):
            await self.stream.get_rows_between(None, high)
        self.resume()
        found = await self.stream.get_rows_between(None, MultiWriterStreamToken(2))
        self.assertEqual([each.position.stream for each in found.rows], [2])

    async def test_primary(self) -> None:
        """The primary has every row, whatever the stored positions are."""
        self.write(2, stored=None)
        stream = PostgresStream(
            ORDERS, ImmediateDatabase(self.writer), CountingIds(), instance_name="r"
        )
        page = await stream.get_updates_since("w1", 1, 9)
        self.assertEqual([t for t, _ in page.updates], [2])
        self.assertEqual((page.upto_token, page.limited), (9, False))

    def test_saved_positions(self) -> None:
        """A position that a standby has not reached is not lowered."""
        stream = id_stream_of(ORDERS, ORDERS.writers)
        self.pause()
        for connection, expected in ((self.reader, 2**40), (self.writer, 1_000_000)):
            with connection.cursor(cursor_factory=Transaction) as txn:
                limited = limit_positions(txn, stream, {"w1": 2**40})
            self.assertEqual(limited, {"w1": expected})

    def test_role(self) -> None:
        """The role of a server is known."""
        for connection, expected in ((self.reader, True), (self.writer, False)):
            with connection.cursor() as txn:
                role = read_role(txn)
            self.assertEqual((role.is_standby, role.is_read_only), (expected,) * 2)

    def test_several_hosts(self) -> None:
        """A process that writes connects to the primary among several hosts."""
        hosts = f"{self.standby.directory},{self.primary.directory}"
        servers = replicated_postgres()
        self.primary, self.standby = servers.primary, servers.standby
        self.pause, self.resume = servers.pause, servers.resume
        name = psycopg2.extensions.parse_dsn(self.primary.dsn())
        conninfo = {**name, "host": hosts, "port": "5432,5432"}
        for given in (conninfo, {"dsn": psycopg2.extensions.make_dsn(**conninfo)}):
            with contextlib.closing(
                psycopg2.connect(**preferring_writable(given))
            ) as connection:
                self.assertEqual(connection.info.host, str(self.primary.directory))
        for same in (name, conninfo | {"target_session_attrs": "any"}):
            self.assertIs(preferring_writable(same), same)
