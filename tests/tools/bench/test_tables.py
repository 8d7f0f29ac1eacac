"""Tests for :mod:`scripts.tools.bench.tables`."""

from __future__ import annotations

import contextlib
from typing import Any

import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.bench.tables import fill_events, make_generator_tables
from scripts.tools.bench.traffic import WRITER, row_of
from synapse_replication.storage.row_pages import query_page
from synapse_replication.storage.row_queries import STANDARD_QUERIES
from synapse_replication.testing.servers import shared_postgres


class TablesTests(SynchronousTestCase):
    """Tests for the tables that both sides read."""

    def setUp(self) -> None:
        self.dsn = shared_postgres().new_database()

    def read(self, rows: int) -> list[tuple[int, Any]]:
        """Read the rows of ``events`` as this package does."""
        with (
            contextlib.closing(psycopg2.connect(self.dsn)) as connection,
            connection.cursor() as cursor,
        ):
            page, _ = query_page(
                cursor,  # type: ignore[arg-type]
                STANDARD_QUERIES["events"],
                WRITER,
                0,
                rows,
                rows + 1,
            )
            return list(page.updates)

    def test_messages(self) -> None:
        """The rows in the tables are the rows that the other tasks send."""
        fill_events(self.dsn, 20)
        self.assertEqual(self.read(20), [(n, row_of(n)) for n in range(1, 21)])

    def test_all_kinds(self) -> None:
        """
        With ``varied``, a third of the events have a state key, and all kinds occur.
        """
        fill_events(self.dsn, 1000, varied=True)
        rows = [row for _, row in self.read(1000)]
        fields = [row[1] for row in rows]
        counts = [
            sum(bool(f[index] or f[index] == "") for f in fields)
            for index in (3, 4, 5, 6, 7)
        ]
        self.assertEqual(counts, [333, 20, 200, 166, 1])

    def test_generator_tables_are_empty(self) -> None:
        """The tables of an id generator exist and are empty."""
        make_generator_tables(self.dsn)
        with (
            contextlib.closing(psycopg2.connect(self.dsn)) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("SELECT count(*) FROM events, stream_positions")
            self.assertEqual(cursor.fetchone(), (0,))
