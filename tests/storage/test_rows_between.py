"""Tests for the rows between two tokens, on a real table."""

from __future__ import annotations

import runpy
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import psycopg2
from twisted.internet import defer
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.host import PositionsOnlySink
from synapse_replication.app.reader_ids import ReaderIds
from synapse_replication.errors import CatchUpError, StreamConfigurationError
from synapse_replication.handlers.data_handler import ReplicationDataHandler
from synapse_replication.handlers.host_parts import BackgroundProcesses, ReactorClock
from synapse_replication.storage.postgres_stream import (
    PostgresStream,
)
from synapse_replication.storage.schema import prepare_database
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.stream import RowsBetween, TokenStream
from synapse_replication.streams.table import TableStream
from synapse_replication.streams.tokens import (
    MAX_TOKEN,
    MIN_TOKEN,
    MultiWriterStreamToken,
)
from synapse_replication.testing.servers import shared_postgres
from tests.storage.postgres_stream_case import ImmediateDatabase
from tests.support.recording_observer import RecordingObserver

T = TypeVar("T")

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

if TYPE_CHECKING:
    _stream: type[TokenStream] = PostgresStream


class OrdersTestCase(SynchronousTestCase):
    """The manual's orders with two writers, read by this process."""

    def setUp(self) -> None:
        connection = psycopg2.connect(shared_postgres().new_database())
        self.addCleanup(connection.close)
        self.database = ImmediateDatabase(connection)
        with connection.cursor() as txn:
            prepare_database(txn)
        self.execute((EXAMPLES / "orders.sql").read_text())
        self.declaration: TableStream = runpy.run_path(str(EXAMPLES / "orders.py"))[
            "ORDERS"
        ]
        self.stream = self.make(self.declaration)

    def execute(self, sql: str) -> None:
        with self.database.connection as connection, connection.cursor() as cursor:
            cursor.execute(sql)

    def make(self, declaration: TableStream) -> PostgresStream:
        sign = -1 if declaration.negative else 1
        ids = ReaderIds("orders", "me", {}, 1, None, sign=sign)
        return PostgresStream(declaration, self.database, ids, instance_name="me")

    def insert(self, *rows: tuple[int, str]) -> None:
        for id_, writer in rows:
            self.execute(
                "INSERT INTO orders (stream_id, instance_name, order_id, note) "
                f"VALUES ({id_}, '{writer}', 'o{abs(id_)}', NULL)"
            )

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.successResultOf(defer.ensureDeferred(coroutine))


class RowsBetweenTests(OrdersTestCase):
    """Tests for get_rows_between and current_stream_token."""

    def test_edges(self) -> None:
        """Rows and ranges at the edges of 64 bits are read as any others."""
        self.insert((5, "writer1"), (MAX_TOKEN, "writer1"))
        self.execute(f"SELECT setval('orders_stream_seq', {MAX_TOKEN})")
        edges = [MIN_TOKEN, MIN_TOKEN + 1, -1, 0, 4, 5, 2**53, MAX_TOKEN - 1, MAX_TOKEN]
        for low in edges:
            for high in edges:
                expected = [each for each in (5, MAX_TOKEN) if low < each <= high]
                page = self.wait(self.stream.get_updates_since("writer1", low, high))
                self.assertEqual([token for token, _ in page.updates], expected)
                if 0 <= low <= high:
                    found = self.wait(
                        self.stream.get_rows_between(
                            MultiWriterStreamToken(low), MultiWriterStreamToken(high)
                        )
                    )
                    self.assertEqual(
                        [row.position.stream for row in found.rows], expected
                    )

    def test_page_bytes(self) -> None:
        """A page ends before an id that does not fit; a larger row has its own page."""
        for id_, writer, mib in ((2, "a", 3), (3, "b", 3), (4, "a", 20), (5, "b", 1)):
            self.execute(
                "INSERT INTO orders (stream_id, instance_name, order_id, note) VALUES "
                f"({id_}, '{writer}', 'o{id_}', repeat('x', {mib * 1024 * 1024}))"
            )
        high = MultiWriterStreamToken(5, {"a": 5, "b": 5})
        upto = MultiWriterStreamToken(1)
        ends = []
        while upto != high:
            page: RowsBetween = self.wait(self.stream.get_rows_between(upto, high))
            self.assertEqual(page.limited, page.upto != high)
            ends.append([each.position.stream for each in page.rows])
            upto = page.upto
        self.assertEqual(ends, [[2], [3], [4], [5]])

    def between(
        self,
        low: MultiWriterStreamToken | None,
        high: MultiWriterStreamToken | None,
        **more: int,
    ) -> list[tuple[str, int, str]]:
        page: RowsBetween = self.wait(self.stream.get_rows_between(low, high, **more))
        self.assertFalse(page.limited)
        self.assertEqual(page.upto, high or self.stream.current_stream_token())
        return self.texts(page)

    def texts(self, page: RowsBetween) -> list[tuple[str, int, str]]:
        return [
            (each.position.instance_name, each.position.stream, each.row.order_id)
            for each in page.rows
        ]

    def test_between(self) -> None:
        """
        For each writer, exactly the rows between its positions in both tokens are
        returned.
        """
        self.insert((2, "writer1"), (3, "writer2"), (4, "writer1"), (5, "writer2"))
        low = MultiWriterStreamToken(2, {"writer2": 3})
        high = MultiWriterStreamToken(3, {"writer2": 5})
        self.assertEqual(self.between(low, high), [("writer2", 5, "o5")])
        self.assertEqual(
            self.between(MultiWriterStreamToken(2), MultiWriterStreamToken(4)),
            [("writer2", 3, "o3"), ("writer1", 4, "o4")],
        )
        self.assertEqual(self.between(high, low.copy_and_advance(high)), [])

    def test_one_bound(self) -> None:
        """
        Without a lower bound, rows begin with the first one; without an upper bound,
        they end with the last delivered one.
        """
        self.insert((2, "writer1"), (3, "writer2"), (4, "writer1"), (5, "writer2"))
        self.stream.advance("writer1", 4)
        self.stream.advance("writer2", 3)
        self.assertEqual(
            self.stream.current_stream_token(),
            MultiWriterStreamToken(3, {"writer1": 4}),
        )
        two, four = ("writer1", 2, "o2"), ("writer1", 4, "o4")
        three = ("writer2", 3, "o3")
        self.assertEqual(self.between(None, MultiWriterStreamToken(2)), [two])
        self.assertEqual(self.between(MultiWriterStreamToken(2), None), [three, four])
        self.assertEqual(self.between(None, None), [two, three, four])

    def test_pages(self) -> None:
        """Whatever the bounds, pages add up to all rows, and no id is split."""
        self.insert(*((n, f"writer{n % 2 + 1}") for n in range(2, 30)))
        self.insert((7, "writer2"), (7, "writer2"))
        low = MultiWriterStreamToken(3, {"writer1": 8})
        high = MultiWriterStreamToken(20, {"writer2": 25})
        expected = self.between(low, high)
        self.assertGreater(len(expected), 15)
        for limit in (1, 2, 3, 7):
            found, upto, limited = [], low, True
            while limited:
                page: RowsBetween = self.wait(
                    self.stream.get_rows_between(upto, high, limit=limit)
                )
                found += self.texts(page)
                upto, limited = page.upto, page.limited
            self.assertEqual(found, expected)
            self.assertEqual(upto, high)

    def test_ids_below_zero(self) -> None:
        """Rows of a stream that counts down have positive tokens."""
        self.stream = self.make(attrs.evolve(self.declaration, negative=True))
        self.insert((-2, "writer1"), (-3, "writer2"), (-4, "writer1"), (-5, "writer2"))
        self.assertEqual(
            self.between(
                MultiWriterStreamToken(2),
                MultiWriterStreamToken(3, {"writer2": 5}),
            ),
            [("writer2", 3, "o3"), ("writer2", 5, "o5")],
        )

    def test_one_writer(self) -> None:
        """Rows of a table without a writer column belong to its declared writer."""
        self.stream = self.make(
            attrs.evolve(self.declaration, writer_column=None, writers=["solo"])
        )
        self.insert((2, "x"), (3, "y"), (4, "z"))
        self.assertEqual(
            self.between(
                MultiWriterStreamToken(2), MultiWriterStreamToken(2, {"solo": 3})
            ),
            [("solo", 3, "o3")],
        )

    def test_no_table(self) -> None:
        """A database error is raised as an error that the caller can retry."""
        self.execute("DROP TABLE orders")
        reading = defer.ensureDeferred(self.stream.get_rows_between(None, None))
        error = self.failureResultOf(reading, CatchUpError).value
        self.assertIn('relation "orders" does not exist', str(error))

    def test_standard_stream(self) -> None:
        """get_rows_between is rejected for a stream without a declaration."""
        ids = ReaderIds("events", "me", {}, 1, None)
        events = PostgresStream(
            STANDARD_STREAMS["events"], self.database, ids, instance_name="me"
        )
        reading = defer.ensureDeferred(events.get_rows_between(None, None))
        self.failureResultOf(reading, StreamConfigurationError)


class PusherExampleTests(OrdersTestCase):
    """Tests for the manual's example, on a real table."""

    def start(self) -> None:
        self.reactor = Clock()
        observer = RecordingObserver()
        self.rows = ReplicationDataHandler(
            {"orders": self.stream}, PositionsOnlySink(), ReactorClock(self.reactor)
        )
        host = SimpleNamespace(
            streams=SimpleNamespace(get_streams=lambda: {"orders": self.stream}),
            rows=self.rows,
            run_as_background_process=BackgroundProcesses(observer),
        )
        self.pushed: list[int] = []
        pusher = runpy.run_path(str(EXAMPLES / "pusher.py"))["Pusher"](
            host, lambda each: self.pushed.append(each.position.stream)
        )
        pusher.startService()
        self.addCleanup(pusher.stopService)

    def deliver(self, writer: str, token: int) -> None:
        self.rows.on_rdata("orders", writer, token, [])
        self.reactor.pump([0, 0])

    def test_a_slow_writer(self) -> None:
        """Rows that a slow writer commits late are pushed once and in order."""
        self.start()
        self.insert((2, "writer1"))
        self.deliver("writer1", 2)
        self.rows.on_position("orders", "writer2", 2)
        self.reactor.pump([0, 0])
        self.assertEqual(self.pushed, [2])
        # The transaction with id 3 is still open when 4 and 5 arrive.
        self.insert((4, "writer1"), (5, "writer1"))
        self.deliver("writer1", 4)
        self.deliver("writer1", 5)
        self.assertEqual(self.pushed, [2])
        self.insert((3, "writer2"))
        self.deliver("writer2", 3)
        # All ids up to 5 are settled, although writer2 is only known to be at 3.
        self.assertEqual(self.pushed, [2, 3, 4, 5])
