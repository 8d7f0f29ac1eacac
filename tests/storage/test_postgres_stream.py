"""Tests for :mod:`synapse_replication.storage.postgres_stream`."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import Any

import attrs
import psycopg2
from twisted.internet import defer
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import (
    CatchUpError,
    LocalProtocolError,
    StreamConfigurationError,
)
from synapse_replication.storage.postgres_stream import (
    PostgresStream,
)
from synapse_replication.storage.row_queries import declared_query
from synapse_replication.streams.stream import StreamUpdateResult
from synapse_replication.streams.table import TableStream
from synapse_replication.testing.servers import shared_postgres
from tests.storage.postgres_stream_case import (
    ORDERS,
    SCHEMA,
    CountingIds,
    ImmediateDatabase,
    T,
)


class PostgresStreamTests(SynchronousTestCase):
    """Tests for a declared stream, on a real table."""

    def setUp(self) -> None:
        connection = psycopg2.connect(shared_postgres().new_database())
        self.addCleanup(connection.close)
        self.database = ImmediateDatabase(connection)
        self.ids = CountingIds()
        self.execute(SCHEMA)

    def execute(self, sql: str) -> list[Any]:
        with self.database.connection as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall() if cursor.description else []

    def make(self, declaration: TableStream = ORDERS, **options: Any) -> PostgresStream:
        return PostgresStream(
            declaration, self.database, self.ids, instance_name="w1", **options
        )

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.successResultOf(defer.ensureDeferred(coroutine))

    def row(self, *values: Any) -> Any:
        return ORDERS.row_type(*values)

    def fetch_all(
        self, stream: PostgresStream, writer: str, after: int, upto: int
    ) -> list[tuple[int, Any]]:
        """Fetch all pages, checking that no page reports more than it contains."""
        updates: list[tuple[int, Any]] = []
        while True:
            page = self.wait(stream.get_updates_since(writer, after, upto))
            self.assertGreater(page.upto_token, after)
            self.assertTrue(all(after < t <= page.upto_token for t, _ in page.updates))
            updates += page.updates
            after = page.upto_token
            if not page.limited:
                self.assertEqual(page.upto_token, upto)
                return updates

    def test_written_rows_are_fetched(self) -> None:
        """Rows written together share one token, and are fetched unchanged."""
        stream = self.make()

        first = self.wait(stream.write([self.row("tea", 3), self.row("☕\n", None)]))
        second = self.wait(stream.write([self.row("milk", -1)]))

        self.assertEqual((first, second), (2, 3))
        self.assertEqual(
            self.wait(stream.get_updates_since("w1", 1, 3)),
            StreamUpdateResult(
                [(2, ["tea", 3]), (2, ["☕\n", None]), (3, ["milk", -1])], 3, False
            ),
        )
        self.assertEqual(self.execute("SELECT DISTINCT writer FROM orders"), [("w1",)])
        self.assertEqual(
            self.database.transactions, ["write_orders"] * 2 + ["catch_up_orders"]
        )

    def test_a_process_that_only_writes(self) -> None:
        """Its memory does not grow with its rows, although nobody asks for a token."""
        for writers in (["w1"], []):
            stream = self.make(writers=writers)
            for _ in range(250):
                self.wait(stream.write([self.row("apple", 5)]))
                stream.minimal_local_current_token()
            self.assertLess(stream._combined.size, 150)

    def test_each_writer_has_its_rows(self) -> None:
        """Catch-up returns the rows of the given writer only."""
        self.execute("INSERT INTO orders VALUES (5, 'w1', 'a', 1), (6, 'w2', 'b', 2)")
        stream = self.make()

        self.assertEqual(self.fetch_all(stream, "w1", 0, 9), [(5, ["a", 1])])
        self.assertEqual(self.fetch_all(stream, "w2", 0, 9), [(6, ["b", 2])])

    def test_page_bytes(self) -> None:
        """
        A page ends before a token that does not fit; a larger token has its own page.
        """
        mib = 1024 * 1024
        sizes = [3, 1, 2, 20, 20, 1, 1]
        tokens = [2, 3, 4, 5, 5, 6, 7]
        for token, size in zip(tokens, sizes, strict=True):
            self.execute(
                f"INSERT INTO orders VALUES ({token}, 'w2', "
                f"repeat('x', {size * mib - 100}), {size})"
            )
        ends = []
        found = []
        after = 1
        while after < 7:
            page = self.wait(self.make().get_updates_since("w2", after, 7))
            after = page.upto_token
            ends.append(after)
            found += [(token, row[1]) for token, row in page.updates]
            self.assertEqual(page.limited, after < 7)
        self.assertEqual(ends, [3, 4, 5, 7])
        self.assertEqual(found, list(zip(tokens, sizes, strict=True)))

    def test_page_bytes_of_json(self) -> None:
        """A large value that PostgreSQL stores in few bytes counts as large."""
        self.execute(
            "CREATE TABLE notes (id bigint, note jsonb, at timestamptz); "
            "CREATE INDEX ON notes (id); "
            "INSERT INTO notes SELECT id, to_jsonb(repeat('x', 3000000)), now() "
            "FROM generate_series(2, 5) AS id; "
            "INSERT INTO notes SELECT id, 'null', NULL FROM generate_series(6, 9) AS id"
        )
        notes = TableStream(
            name="notes",
            table="notes",
            id_column="id",
            columns={"note": Any, "at": str | None},
            sequence="orders_seq",
            writers=["w2"],
        )
        ends = []
        after = 1
        while after < 9:
            page = self.wait(self.make(notes).get_updates_since("w2", after, 9))
            after = page.upto_token
            ends.append(after)
        self.assertEqual(ends, [2, 3, 4, 9])

    def test_nothing_beyond_the_sequence(self) -> None:
        """If the bound is too far, pages end at the sequence, and report this end."""
        self.execute("INSERT INTO orders VALUES (5, 'w2', 'a', 1), (6, 'w2', 'b', 2)")
        self.execute("SELECT setval('orders_seq', 7)")
        stream = self.make(page_rows=1)
        page = self.wait(stream.get_updates_since("w2", 0, 2**62))
        self.assertEqual((page.upto_token, page.limited, page.last_token), (5, True, 7))
        page = self.wait(stream.get_updates_since("w2", 6, 2**62))
        self.assertEqual((list(page.updates), page.upto_token), ([], 7))
        page = self.wait(stream.get_updates_since("w2", 9, 2**62))
        self.assertEqual((list(page.updates), page.last_token), ([], 7))
        # After a switch to a standby, a sequence may be slightly behind.
        page = self.wait(stream.get_updates_since("w2", 6, 100_007))
        self.assertEqual((page.upto_token, page.last_token), (100_007, None))

    def test_plausible_positions(self) -> None:
        """
        A position near the known part of the sequence is plausible without a query.
        """
        stream = self.make()
        self.assertTrue(stream.is_plausible("w2", 100_000))
        self.assertFalse(stream.is_plausible("w2", 100_001))
        page = self.wait(stream.get_updates_since("w2", 999_990, 1_000_000))
        self.assertIsNone(page.last_token)
        self.assertTrue(stream.is_plausible("w2", 1_100_000))
        self.assertFalse(stream.is_plausible("w2", 1_100_001))

    def test_another_plausible_distance(self) -> None:
        """A position further beyond the sequence than configured is not plausible."""
        self.execute("SELECT setval('orders_seq', 7)")
        stream = self.make(plausible_distance=10)
        self.assertTrue(stream.is_plausible("w2", 10))
        self.assertFalse(stream.is_plausible("w2", 11))
        page = self.wait(stream.get_updates_since("w2", 6, 17))
        self.assertEqual((page.upto_token, page.last_token), (17, None))
        page = self.wait(stream.get_updates_since("w2", 6, 18))
        self.assertEqual((page.upto_token, page.last_token), (7, 7))

    def test_pages_make_the_whole_table(self) -> None:
        """The pages of a longer table add up to all of its rows."""
        self.execute(
            "INSERT INTO orders SELECT n, 'w' || (n % 2 + 1), 'i' || n, n "
            "FROM generate_series(2, 400) AS n"
        )
        stream = self.make(page_rows=7)

        self.assertEqual(
            self.fetch_all(stream, "w1", 0, 1000),
            [(n, [f"i{n}", n]) for n in range(2, 401, 2)],
        )
        page = self.wait(stream.get_updates_since("w1", 0, 1000))
        self.assertEqual((page.upto_token, page.limited), (14, True))

    def test_a_token_is_never_split(self) -> None:
        """All rows of a token are returned together, even if they exceed a page."""
        self.execute(
            "INSERT INTO orders SELECT token, 'w1', 'i', n FROM "
            "(VALUES (2, 1), (3, 150), (4, 2), (5, 3)) AS v (token, count), "
            "generate_series(1, count) AS n"
        )
        stream = self.make(page_rows=2)

        page = self.wait(stream.get_updates_since("w1", 0, 5))
        self.assertEqual(len(page.updates), 151)
        self.assertEqual((page.upto_token, page.limited), (3, True))
        self.assertEqual(
            [token for token, _ in self.fetch_all(stream, "w1", 0, 5)],
            [2] + [3] * 150 + [4] * 2 + [5] * 3,
        )

    def test_a_full_last_page_is_the_end(self) -> None:
        """A full page that ends at the upper bound is not limited."""
        self.execute("INSERT INTO orders VALUES (5, 'w1', 'a', 1)")

        page = self.wait(self.make(page_rows=1).get_updates_since("w1", 0, 5))

        self.assertEqual((page.upto_token, page.limited), (5, False))

    def test_empty_range_makes_no_query(self) -> None:
        """An empty range causes no query."""
        result = self.wait(self.make().get_updates_since("w1", 5, 5))

        self.assertEqual(result, StreamUpdateResult([], 5, False))
        self.assertEqual(self.database.transactions, [])

    def test_pages_without_transaction(self) -> None:
        """A page is read without BEGIN and COMMIT, which would be two round trips."""
        self.wait(self.make().get_updates_since("w1", 1, 5))

        self.assertEqual(self.database.with_autocommit, self.database.transactions)
        self.assertEqual(len(self.database.transactions), 1)

    def test_ids_below_zero(self) -> None:
        """A negative stream counts down in the table and up on the wire."""
        self.ids = CountingIds(sign=-1)
        stream = self.make(attrs.evolve(ORDERS, negative=True), page_rows=1)

        tokens = [self.wait(stream.write([self.row("a", n)])) for n in range(3)]

        self.assertEqual(tokens, [2, 3, 4])
        self.assertEqual(
            self.execute("SELECT stream_id FROM orders ORDER BY 1"),
            [(-4,), (-3,), (-2,)],
        )
        self.assertEqual(
            self.fetch_all(stream, "w1", 2, 4), [(3, ["a", 1]), (4, ["a", 2])]
        )
        self.assertEqual(stream.minimal_local_current_token(), 4)
        self.assertTrue(stream.has_local_updates(3, 4))
        self.assertFalse(stream.has_local_updates(4, 9))
        stream.advance("w2", 7)
        self.assertEqual(stream.current_token("w2"), 7)
        self.assertEqual(self.ids.others, {"w2": -7})

    def test_positions_are_those_of_the_ids(self) -> None:
        """The stream takes the writers' positions from its id generator."""
        stream = self.make()
        stream.advance("w2", 7)

        self.assertEqual(stream.current_token("w2"), 7)

    def test_idle_writer_advances_without_query(self) -> None:
        """
        Positions of other writers advance what an idle writer announces, without a
        query.
        """
        stream = self.make()
        self.wait(stream.write([self.row("a", 1)]))
        stream.advance("w2", 7)

        self.assertEqual(stream.minimal_local_current_token(), 7)
        self.assertTrue(stream.has_local_updates(1, 7))
        self.assertFalse(stream.has_local_updates(2, 7))
        self.assertFalse(stream.has_local_updates(2, 2))

    def test_without_a_writer_column(self) -> None:
        """If a table has no writer column, all rows belong to its one writer."""
        self.execute("ALTER TABLE orders DROP COLUMN writer")
        stream = self.make(attrs.evolve(ORDERS, writer_column=None, writers=["w1"]))

        self.wait(stream.write([self.row("a", 1)]))

        self.assertEqual(self.fetch_all(stream, "w1", 0, 2), [(2, ["a", 1])])

    def test_columns_of_any_type(self) -> None:
        """Arrays, JSON, times and unlimited numbers survive the round trip."""
        self.execute(
            "CREATE TABLE things (id bigint, a text[], b jsonb, c timestamptz, "
            "d numeric, e double precision, f json, g bytea)"
        )
        self.execute("SET TIME ZONE 'UTC'")
        things = TableStream(
            name="things",
            table="public.things",
            id_column="id",
            columns=["a", "b", "c", "d", "e", "f", "g"],
            sequence="things_seq",
            writers="w1",
        )
        values = [
            ["x", None],
            {"k": [1, None, "v"]},
            "2026-11-21T03:00:00.5+00:00",
            2**63,
            0.1,
            [True],
            "\\x00ff",
        ]
        stream = self.make(things)

        self.wait(stream.write([things.row_type(*values)]))

        self.assertEqual(self.fetch_all(stream, "w1", 0, 2), [(2, values)])

    def test_a_failed_write_leaves_no_row(self) -> None:
        """If the database rejects one row, no row is written."""
        self.execute("ALTER TABLE orders ADD CHECK (amount < 100)")
        stream = self.make()
        result = stream.write([self.row("a", 1), self.row("b", 100)])

        self.failureResultOf(defer.ensureDeferred(result), psycopg2.IntegrityError)

        self.assertEqual(self.execute("SELECT * FROM orders"), [])

    def test_unwritable_rows_are_rejected(self) -> None:
        """
        Zero rows, or values that JSON cannot express, are rejected before a token is
        taken.
        """
        stream = self.make()
        for rows in ([], [self.row("a", float("nan"))]):
            self.failureResultOf(
                defer.ensureDeferred(stream.write(rows)), LocalProtocolError
            )
        self.assertEqual(self.ids.last, 1)

    def test_character_nul(self) -> None:
        """The error for the character NUL, which cannot be stored, names the column."""
        for item in ("a\0b", "\0"):
            with self.assertRaisesRegex(
                LocalProtocolError, r"orders .* column item has the character NUL"
            ):
                raise self.failureResultOf(
                    defer.ensureDeferred(self.make().write([self.row(item, 1)]))
                ).value
        self.successResultOf(
            defer.ensureDeferred(self.make().write([self.row("a\\u0000", 1)]))
        )

    def test_write_notifies_the_streamer(self) -> None:
        """Each write calls on_write after its commit."""
        seen: list[Any] = []
        stream = self.make(
            on_write=lambda: seen.append(self.execute("SELECT * FROM orders"))
        )

        self.wait(stream.write([self.row("a", 1)]))

        self.assertEqual(seen, [[(2, "w1", "a", 1)]])

    def test_no_table(self) -> None:
        """Catch-up without its table fails with stream, writer, range and reason."""
        self.execute("DROP TABLE orders")
        result = self.make().get_updates_since("w1", 3, 9)

        failure = self.failureResultOf(defer.ensureDeferred(result), CatchUpError)

        message = failure.getErrorMessage()
        self.assertIn("orders written by w1 in (3, 9]", message)
        self.assertIn('"orders" does not exist', message)

    def test_page_rows_is_checked(self) -> None:
        """A page size of zero rows is rejected."""
        self.assertRaises(StreamConfigurationError, self.make, page_rows=0)

    def explain(self, writer: str, after: int, up_to: int) -> str:
        """Return the plan of a page of catch-up, as JSON text."""
        query = declared_query(ORDERS)
        parameters = {
            "instance_name": writer,
            "after": after,
            "up_to": up_to,
            "limit": 1000,
        }
        with self.database.connection as connection, connection.cursor() as cursor:
            cursor.execute("EXPLAIN (FORMAT JSON) " + query.sql, parameters)
            return json.dumps(cursor.fetchall())

    def test_catch_up_walks_an_index(self) -> None:
        """The plan walks the index and sorts at most a short range."""
        self.execute(
            "INSERT INTO orders SELECT n, 'w' || (n % 2 + 1), 'i', n "
            "FROM generate_series(2, 50000) AS n"
        )
        self.execute("ANALYZE orders")

        for after, up_to in ((0, 50_000), (25_000, 25_100), (49_990, 60_000)):
            plan = self.explain("w1", after, up_to)
            self.assertIn("orders_by_writer", plan)
            self.assertNotIn("Seq Scan", plan)
        self.assertNotIn('"Sort"', self.explain("w1", 0, 50_000))
