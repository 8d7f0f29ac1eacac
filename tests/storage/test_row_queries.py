"""Tests for :mod:`synapse_replication.storage.row_queries`."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.storage.id_streams import row_stream_of
from synapse_replication.storage.row_pages import query_page
from synapse_replication.storage.row_queries import STANDARD_QUERIES
from synapse_replication.storage.transactions import Transaction
from synapse_replication.streams.standard.registry import STANDARD_STREAMS
from synapse_replication.streams.stream import StreamUpdateResult
from synapse_replication.testing.servers import shared_postgres
from tests.storage.synapse_extract import ON_THE_WIRE, ROWS, SCHEMA


@functools.cache
def extract_dsn() -> str:
    """Create a database with the extract, once for all tests."""
    dsn = shared_postgres().new_database()
    with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(SCHEMA)
        cursor.execute(ROWS)
    connection.close()
    return dsn


class StandardQueriesTests(SynchronousTestCase):
    """Tests for the rows read from Synapse's tables."""

    def setUp(self) -> None:
        connection = psycopg2.connect(extract_dsn())
        self.addCleanup(connection.close)
        self.txn = connection.cursor(cursor_factory=Transaction)

    def test_all_streams_with_tables(self) -> None:
        """Every standard stream is either read from tables or held in memory."""
        in_memory = {
            name
            for name, stream in STANDARD_STREAMS.items()
            if stream.description.held_in_memory
        }

        self.assertEqual(STANDARD_STREAMS.keys() - STANDARD_QUERIES.keys(), in_memory)
        self.assertEqual({name for name, _ in ON_THE_WIRE}, STANDARD_QUERIES.keys())

    def test_tables_of_ids(self) -> None:
        """The rows are read from those tables in which their ids are checked."""
        for name, found in STANDARD_QUERIES.items():
            tables = {each.ids for each in found}
            stream = row_stream_of(STANDARD_STREAMS[name], ())
            self.assertEqual(tables, set(stream.tables), name)
            signs = {each.negative for each in found}
            self.assertEqual(signs, {stream.negative}, name)

    def test_rows_are_as_on_the_wire(self) -> None:
        """The queries return the rows that the writer sends, in the writer's order."""
        for (name, writer), expected in ON_THE_WIRE.items():
            with self.subTest(stream=name, writer=writer):
                result, _ = query_page(
                    self.txn, STANDARD_QUERIES[name], writer, 0, 100, 1000
                )
                self.assertEqual(list(result.updates), expected)
                self.assertEqual((result.upto_token, result.limited), (100, False))

    def test_rows_have_the_streams_type(self) -> None:
        """Fetched rows survive a round trip through the codec of their stream."""
        for (name, _), updates in ON_THE_WIRE.items():
            codec = STANDARD_STREAMS[name].description.codec
            for _, row in updates:
                self.assertEqual(codec.to_json(codec.from_json(row)), row)

    def test_any_pages_make_the_whole(self) -> None:
        """For every stream and range, pages of one row add up to all rows."""
        for (name, writer), expected in ON_THE_WIRE.items():
            for after in range(10):
                updates: list[tuple[int, Any]] = []
                at = after
                while True:
                    page, _ = query_page(
                        self.txn, STANDARD_QUERIES[name], writer, at, 9, 1
                    )
                    self.assertTrue(
                        all(at < t <= page.upto_token for t, _ in page.updates)
                    )
                    self.assertEqual(page.limited, page.upto_token < 9)
                    updates += page.updates
                    at = page.upto_token
                    if not page.limited:
                        break
                self.assertEqual(updates, [(t, r) for t, r in expected if t > after])

    def test_bounds(self) -> None:
        """
        Even for ids below zero, the lower bound is exclusive and the upper one
        inclusive.
        """
        for name, writer in ON_THE_WIRE:
            expected = [
                update for update in ON_THE_WIRE[name, writer] if 2 < update[0] <= 4
            ]
            result, _ = query_page(self.txn, STANDARD_QUERIES[name], writer, 2, 4, 1000)
            self.assertEqual(list(result.updates), expected, name)

    def test_deleted_event_does_not_end_a_page(self) -> None:
        """A page ends at its last id even if that id's event is deleted."""
        self.txn.execute(
            "INSERT INTO ex_outlier_stream VALUES (20, '$gone', 'p9'), "
            "(21, '$bad', 'p9')"
        )

        page, _ = query_page(self.txn, STANDARD_QUERIES["events"], "p9", 0, 30, 1)
        self.assertEqual(page, StreamUpdateResult([], 20, True))
        page, _ = query_page(self.txn, STANDARD_QUERIES["events"], "p9", 20, 30, 1)
        self.assertEqual([token for token, _ in page.updates], [21])

    def test_catch_up_walks_an_index(self) -> None:
        """Every query walks an index, except those of account data."""
        self.txn.execute("SET LOCAL enable_seqscan = off")
        self.txn.execute("SET LOCAL enable_bitmapscan = off")
        parameters = {"instance_name": "w", "after": 5, "up_to": 900, "limit": 10}
        scanned = set()
        for name, queries in STANDARD_QUERIES.items():
            for query in queries:
                self.txn.execute("EXPLAIN (FORMAT JSON) " + query.sql, parameters)
                plan = json.dumps(self.txn.fetchone())
                if "Seq Scan" in plan or not re.search(
                    r'"Index Cond": "[^"]*(stream_id|stream_ordering|id) >', plan
                ):
                    scanned.add(name)

        self.assertEqual(scanned, {"account_data"})

    def test_tables_are_not_read_whole_for_a_page(self) -> None:
        """In a larger database, the events of a page are looked up one by one."""
        self.txn.execute(
            "INSERT INTO events SELECT n, '$m' || n, '!r', 'm', FALSE, 'w' "
            "FROM generate_series(1000, 21000) AS n; "
            "INSERT INTO state_events SELECT '$m' || n, '' "
            "FROM generate_series(1000, 21000) AS n; "
            "ANALYZE events; ANALYZE state_events"
        )
        parameters = {"instance_name": "w", "after": 1, "up_to": 21000, "limit": 2000}
        for name in ("events", "backfill"):
            for query in STANDARD_QUERIES[name]:
                self.txn.execute("EXPLAIN " + query.sql, parameters)
                plan = "\n".join(line for (line,) in self.txn.fetchall())
                self.assertNotRegex(plan, "Seq Scan on (events|state_events)|Hash")
