"""Tests for synapse_replication.storage.sequences and .queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import SequenceBehindError
from synapse_replication.storage.id_streams import MAX_SCANNED_BYTES
from synapse_replication.storage.sequences import (
    MAX_ROWS_AT_START,
    MAX_SKIPPED_IDS,
    IdStream,
    Lookup,
    best_lookup,
    fetch_ids,
    load_positions,
    read_sequence,
    read_stored_positions,
)
from synapse_replication.streams.positions import WriterPositions
from synapse_replication.streams.table import IdColumn
from tests.storage.doubles import PostgresMixin

FOOBAR = IdStream(
    stream_name="foobar",
    sequence="foobar_seq",
    tables=[IdColumn("foobar", "stream_id", "instance_name")],
    writers=["first", "second"],
)

#: Rows of the big table.
MANY = 1_000_000


class ExplainingCursor:
    """A cursor that keeps the plan of each statement that reads rows.

    :param verbs: how such statements begin.
    """

    def __init__(self, cursor: Any, *verbs: str) -> None:
        self._cursor = cursor
        self._verbs = verbs or ("SELECT",)
        self.plans: list[str] = []

    def execute(self, sql: str, parameters: Mapping[str, Any] | None = None) -> None:
        if sql.lstrip().startswith(self._verbs) and "pg_" not in sql:
            self._cursor.execute("EXPLAIN " + sql, parameters)
            self.plans.append("\n".join(line for (line,) in self._cursor.fetchall()))
        self._cursor.execute(sql, parameters)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return list(self._cursor.fetchall())

    def fetchone(self) -> tuple[Any, ...]:
        row: tuple[Any, ...] = self._cursor.fetchone()
        return row


class LoadPositionsTests(PostgresMixin, SynchronousTestCase):
    """Where a stream stands when a process starts."""

    def setUp(self) -> None:
        self.make_database()
        self.addCleanup(self.connection.close)

    def load(
        self, instance_name: str = "reader", stream: IdStream = FOOBAR
    ) -> WriterPositions:
        with self.connection.cursor() as cursor:
            return load_positions(cursor, stream, instance_name)

    def test_fresh(self) -> None:
        """A sequence that was never used gives no position nobody wrote."""
        positions = self.load("first")
        self.assertEqual((positions.announced, positions.persisted_upto), (1, 1))
        self.assertEqual(self.load().all_positions(), {"first": 1, "second": 1})

    def test_sequence_that_begins_later(self) -> None:
        """A sequence made to begin at 100 puts its writer just below."""
        self.sql("SELECT setval('foobar_seq', 100, false)")
        only = attrs.evolve(FOOBAR, writers=["first"])
        self.assertEqual(self.load("first", only).announced, 99)

    def test_rows_before_positions_were_kept(self) -> None:
        """A database whose positions were never kept: its rows are complete."""
        self.write_rows("first", 1, 2, 3)
        self.write_rows("second", 7)
        self.set_sequence(7)
        self.assertEqual(self.load().all_positions(), {"first": 7, "second": 7})

    def test_open_transaction(self) -> None:
        """7 is committed and 6 open: the position is 5."""
        self.store(first=4, second=5)
        self.write_rows("first", 2, 3, 4)
        self.write_rows("second", 5, 7)
        self.set_sequence(7)
        reader = self.load()
        self.assertEqual(reader.persisted_upto, 5)
        self.assertEqual(reader.all_positions(), {"first": 4, "second": 5})
        self.assertEqual(self.load("first").persisted_upto, 5)

    def test_new_writer(self) -> None:
        """A new writer starts at what is persisted, and stores that."""
        self.store(first=3, second=7)
        self.write_rows("first", 2, 3)
        self.write_rows("second", 4, 5, 7)
        self.set_sequence(7)
        stream = attrs.evolve(FOOBAR, writers=["first", "second", "new"])
        self.assertEqual(self.load("new", stream).persisted_upto, 5)
        self.assertEqual(self.stored(), {"first": 3, "second": 7, "new": 7})

    def test_removed_writer(self) -> None:
        """A writer forgets who is none any more; a reader changes nothing."""
        self.store(first=6, second=8, gone=2)
        self.set_sequence(8)
        self.assertEqual(self.load().persisted_upto, 6)
        self.assertIn("gone", self.stored())
        self.load("first")
        self.assertEqual(self.stored(), {"first": 6, "second": 8})

    def test_ids_without_rows(self) -> None:
        """The sequence is ahead, and its only writer starts there."""
        self.store(first=5)
        self.write_rows("first", 5)
        self.set_sequence(9)
        only = attrs.evolve(FOOBAR, writers=["first"])
        self.assertEqual(self.load("first", only).persisted_upto, 9)
        # Of two writers one may have the ids in flight.
        self.store(second=4)
        self.assertEqual(self.load("first").announced, 5)

    def test_sequence_behind_both(self) -> None:
        """The hint covers stored positions, too: they count as finished."""
        self.write_rows("first", 6)
        self.store(first=6, second=8)
        self.set_sequence(5)
        with self.assertRaises(SequenceBehindError) as caught:
            self.load()
        self.assertEqual(
            (caught.exception.value, caught.exception.sequence_value), (8, 5)
        )

    def test_sequence_behind_its_table(self) -> None:
        """An error that names the sequence, the table, both values and the hint."""
        self.write_rows("first", 9)
        self.set_sequence(5)
        with self.assertRaises(SequenceBehindError) as caught:
            self.load("first")
        error = caught.exception
        self.assertEqual(
            (error.sequence_name, error.source, error.sequence_value, error.value),
            ("foobar_seq", "table foobar", 5, 9),
        )
        self.sql(error.hint)
        self.assertEqual(self.load("first").announced, 9)

    def test_sequence_raised_to_tables(self) -> None:
        """A host that asks for it has a sequence brought forward, never back."""
        self.write_rows("first", 9)
        for stands_at, announced in ((5, 9), (9, 9), (12, 9)):
            self.set_sequence(stands_at)
            with capturedLogs() as logged, self.connection.cursor() as cursor:
                positions = load_positions(
                    cursor, FOOBAR, "first", raise_to_tables=True
                )
                self.assertEqual(positions.announced, announced)
                self.assertEqual(read_sequence(cursor, "foobar_seq"), max(stands_at, 9))
            self.assertEqual(len(logged), stands_at < 9)

    def test_sequence_raised_over_a_plausible_distance(self) -> None:
        """A sequence is brought forward as far as is plausible; a new one further."""
        stream = attrs.evolve(FOOBAR, plausible_distance=10)
        for stands_at, row, is_raised in (
            (8, 18, True),
            (18, 29, False),
            (1, 40, True),
        ):
            self.sql("TRUNCATE foobar")
            self.write_rows("first", row)
            self.set_sequence(stands_at)
            with self.connection.cursor() as cursor:
                if not is_raised:
                    with self.assertRaises(SequenceBehindError):
                        load_positions(cursor, stream, "first", raise_to_tables=True)
                    continue
                load_positions(cursor, stream, "first", raise_to_tables=True)
                self.assertEqual(read_sequence(cursor, "foobar_seq"), row)

    def test_sequence_behind_positions(self) -> None:
        """
        A writer brings a sequence forward that is a little behind what is
        stored, and goes on from there; a reader leaves it alone.
        """
        self.store(first=40, second=38)
        self.write_rows("second", 7)
        self.set_sequence(8)
        self.load()
        with self.connection.cursor() as cursor:
            self.assertEqual(read_sequence(cursor, "foobar_seq"), 8)
            self.assertEqual(self.load("first").announced, 40)
            self.assertEqual(read_sequence(cursor, "foobar_seq"), 40)

    def test_sequence_far_behind_positions(self) -> None:
        """Too far behind is an error with the statement that repairs it."""
        self.store(second=5 + MAX_SKIPPED_IDS)
        self.set_sequence(5)
        self.load("second")
        self.store(first=MAX_SKIPPED_IDS + 10)
        self.set_sequence(5)
        with self.assertRaises(SequenceBehindError) as caught:
            self.load("first")
        self.sql(caught.exception.hint)
        self.assertEqual(self.load("first").announced, MAX_SKIPPED_IDS + 10)

    def test_sequence_implausibly_far_behind_positions(self) -> None:
        """One bad row is named; nothing advises to move the sequence there."""
        self.store(first=2**62, second=4)
        self.write_rows("second", 4)
        self.set_sequence(5)
        with self.assertRaises(SequenceBehindError) as caught:
            self.load("first")
        text = str(caught.exception)
        self.assertIn("table stream_positions holds 4611686018427387904", text)
        self.assertIn(
            "stream_name = 'foobar' AND stream_id = 4611686018427387904", text
        )
        self.assertNotIn("setval", text)
        self.assertEqual(caught.exception.hint, "")
        # A reader takes the writer to be where the sequence is.
        self.assertEqual(self.load().all_positions(), {"first": 5, "second": 4})

    def test_the_most_that_is_plausible(self) -> None:
        """A position is believed up to the plausible distance, and not beyond."""
        most = 2 * MAX_SKIPPED_IDS
        stream = attrs.evolve(FOOBAR, plausible_distance=most)
        for position, seen in ((5 + most, 5 + most), (6 + most, 5)):
            self.sql("DELETE FROM stream_positions")
            self.store(first=position, second=4)
            self.set_sequence(5)
            self.assertEqual(self.load(stream=stream).all_positions()["first"], seen)
            with self.assertRaises(SequenceBehindError) as caught:
                self.load("first", stream)
            self.assertEqual(bool(caught.exception.hint), seen == position)

    def test_sequence_implausibly_far_behind_its_table(self) -> None:
        """The row is named, also for a host that has sequences brought forward."""
        self.write_rows("first", 2**62)
        self.set_sequence(5)
        for raise_to_tables in (False, True):
            with (
                self.connection.cursor() as cursor,
                self.assertRaises(SequenceBehindError) as caught,
            ):
                load_positions(cursor, FOOBAR, "first", raise_to_tables=raise_to_tables)
            text = str(caught.exception)
            self.assertIn('FROM "foobar" WHERE "stream_id" = 4611686018427387904', text)
            self.assertNotIn("setval", text)

    def test_row_at_a_plausible_distance(self) -> None:
        """A row is called suspect only beyond the plausible distance."""
        stream = attrs.evolve(FOOBAR, plausible_distance=10)
        self.set_sequence(5)
        for row, is_suspect in ((15, False), (16, True)):
            self.write_rows("first", row)
            with self.assertRaises(SequenceBehindError) as caught:
                self.load("first", stream)
            self.assertEqual("inspect the row" in str(caught.exception), is_suspect)

    def test_negative(self) -> None:
        """Rows and positions below zero; one of the wrong sign counts as none."""
        stream = attrs.evolve(FOOBAR, negative=True)
        self.write_rows("first", -2, -3, 12)
        self.store(first=-3, second=5)
        self.set_sequence(4)
        self.assertEqual(self.load(stream=stream).all_positions()["first"], 3)
        with self.connection.cursor() as cursor:
            stored = read_stored_positions(cursor, stream)
        self.assertEqual(stored, {"first": 3, "second": 1})

    def test_without_declared_writers(self) -> None:
        """Positions are neither read nor stored; the sequence says where we are."""
        self.store(first=2)
        self.write_rows("first", 3)
        self.set_sequence(6)
        anybody = attrs.evolve(FOOBAR, writers=[])
        self.assertEqual(self.load("first", anybody).all_positions(), {"first": 6})
        self.assertEqual(self.stored(), {"first": 2})

    def test_lookup(self) -> None:
        """The index that a table has decides how its ids are looked up."""
        column = FOOBAR.tables[0]
        with self.connection.cursor() as cursor:
            self.assertIs(best_lookup(cursor, column), Lookup.BY_ID)
            self.sql("DROP INDEX foobar_id")
            self.assertIs(best_lookup(cursor, column), Lookup.SCAN)
            self.sql("CREATE INDEX ON foobar (stream_id) WHERE data IS NULL")
            self.assertIs(best_lookup(cursor, column), Lookup.SCAN)
            self.sql(
                "INSERT INTO foobar SELECT 1, 'first', repeat('x', 1900)"
                f" FROM generate_series(1, {MAX_SCANNED_BYTES // 8192 * 4 + 4})"
            )
            self.assertIs(best_lookup(cursor, column), Lookup.NONE)
            self.assertEqual(self.load("first").announced, 1)
            self.sql("CREATE INDEX ON foobar (instance_name, stream_id)")
            self.assertIs(best_lookup(cursor, column), Lookup.BY_WRITER)

    def test_big_table_is_never_scanned(self) -> None:
        """
        Over a million rows, with either index, no statement of the start
        scans the table, and few rows are read, however far behind a position is.
        """
        self.sql(
            "ALTER TABLE foobar SET UNLOGGED; DROP INDEX foobar_id;"
            "INSERT INTO foobar SELECT i, CASE i % 2 WHEN 0 THEN 'first' ELSE 'second'"
            f" END FROM generate_series(1, {MANY}) AS i"
        )
        self.set_sequence(MANY)
        self.store(first=2, second=MANY)
        for index in ("stream_id", "instance_name, stream_id"):
            self.sql(f"CREATE INDEX big ON foobar ({index}); ANALYZE foobar")
            with self.connection.cursor() as cursor:
                explaining = ExplainingCursor(cursor)
                positions = load_positions(explaining, FOOBAR, "reader")
            self.sql("DROP INDEX big")
            self.assertGreaterEqual(positions.persisted_upto, MAX_ROWS_AT_START)
            plans = "\n".join(explaining.plans)
            self.assertNotIn("Seq Scan on foobar\n", plans + "\n")
            self.assertNotIn("Seq Scan on foobar ", plans.replace("foobar_seq", "seq"))
            self.assertRegex(plans, "Index (Only )?Scan .*using big on foobar")


class FetchIdsTests(PostgresMixin, SynchronousTestCase):
    """What a sequence gives that is behind what a process knows."""

    def setUp(self) -> None:
        self.make_database()
        self.addCleanup(self.connection.close)
        self.set_sequence(5)

    def fetch(self, known: int, count: int = 1) -> list[int]:
        with self.connection.cursor() as cursor:
            return fetch_ids(
                cursor,
                "foobar_seq",
                count,
                lambda ids: [id_ for id_ in ids if id_ > known],
                known,
                plausible_distance=10,
            )

    def test_plausible(self) -> None:
        """It is brought forward over the most that is plausible."""
        self.assertEqual(self.fetch(known=16), [17])
        self.set_sequence(5)
        self.assertEqual(self.fetch(known=14, count=2), [15, 16])

    def test_implausible(self) -> None:
        """Further than that is an error with the last id that it gave."""
        with self.assertRaises(SequenceBehindError) as caught:
            self.fetch(known=18, count=2)
        self.assertEqual(
            (caught.exception.sequence_value, caught.exception.value), (7, 18)
        )
        self.assertIn("no table contains it", str(caught.exception))
