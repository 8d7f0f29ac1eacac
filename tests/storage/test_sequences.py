"""Tests for synapse_replication.storage.sequences."""

from __future__ import annotations

import attrs
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import SequenceBehindError
from synapse_replication.storage.id_streams import (
    MAX_SCANNED_BYTES,
    AccessPath,
    IdStream,
    best_access_path,
    read_sequence,
)
from synapse_replication.storage.sequences import (
    MAX_ROWS_AT_START,
    MAX_SKIPPED_IDS,
    fetch_ids,
    load_positions,
    read_stored_positions,
)
from synapse_replication.streams.writer_positions import WriterPositions
from tests.storage.doubles import FOOBAR, ExplainingCursor, PostgresMixin

#: Rows of the big table.
MANY = 1_000_000


class LoadPositionsTests(PostgresMixin, SynchronousTestCase):
    """Tests for the positions with which a process starts."""

    def setUp(self) -> None:
        self.make_database()
        self.addCleanup(self.connection.close)

    def load(
        self, instance_name: str = "reader", stream: IdStream = FOOBAR
    ) -> WriterPositions:
        with self.connection.cursor() as cursor:
            return load_positions(cursor, stream, instance_name)

    def test_fresh(self) -> None:
        """With an unused sequence, every writer starts at 1."""
        positions = self.load("first")
        self.assertEqual((positions.announced, positions.persisted_upto), (1, 1))
        self.assertEqual(self.load().all_positions(), {"first": 1, "second": 1})

    def test_sequence_that_begins_later(self) -> None:
        """If the sequence is set to begin at 100, its only writer starts at 99."""
        self.sql("SELECT setval('foobar_seq', 100, false)")
        only = attrs.evolve(FOOBAR, writers=("first",))
        self.assertEqual(self.load("first", only).announced, 99)

    def test_rows_without_stored_position(self) -> None:
        """If no position was ever stored, all committed rows count as complete."""
        self.write_rows("first", 1, 2, 3)
        self.write_rows("second", 7)
        self.set_sequence(7)
        self.assertEqual(self.load().all_positions(), {"first": 7, "second": 7})

    def test_open_transaction(self) -> None:
        """If 7 is committed and 6 is still open, the position is 5."""
        self.store(first=4, second=5)
        self.write_rows("first", 2, 3, 4)
        self.write_rows("second", 5, 7)
        self.set_sequence(7)
        reader = self.load()
        self.assertEqual(reader.persisted_upto, 5)
        self.assertEqual(reader.all_positions(), {"first": 4, "second": 5})
        self.assertEqual(self.load("first").persisted_upto, 5)

    def test_new_writer(self) -> None:
        """A new writer starts at the persisted position and stores its own position."""
        self.store(first=3, second=7)
        self.write_rows("first", 2, 3)
        self.write_rows("second", 4, 5, 7)
        self.set_sequence(7)
        stream = attrs.evolve(FOOBAR, writers=("first", "second", "new"))
        self.assertEqual(self.load("new", stream).persisted_upto, 5)
        self.assertEqual(self.stored(), {"first": 3, "second": 7, "new": 7})

    def test_removed_writer(self) -> None:
        """
        Loading as a writer deletes the positions of removed writers; a reader does not.
        """
        self.store(first=6, second=8, gone=2)
        self.set_sequence(8)
        self.assertEqual(self.load().persisted_upto, 6)
        self.assertIn("gone", self.stored())
        self.load("first")
        self.assertEqual(self.stored(), {"first": 6, "second": 8})

    def test_rows_of_removed_writer(self) -> None:
        """
        A writer restarts at the last row of a removed writer, which it had announced as
        finished, whatever the index of the table.
        """
        self.store(first=5, second=5)
        self.write_rows("first", 5)
        self.write_rows("gone", 8)
        self.set_sequence(8)
        for index in ("stream_id", "instance_name, stream_id"):
            self.sql("DROP INDEX foobar_id")
            self.sql(f"CREATE INDEX foobar_id ON foobar ({index})")
            self.assertEqual(self.load("first").announced, 8, index)

    def test_ids_without_rows(self) -> None:
        """
        If the sequence is ahead of all rows, its only writer starts at the sequence.
        """
        self.store(first=5)
        self.write_rows("first", 5)
        self.set_sequence(9)
        only = attrs.evolve(FOOBAR, writers=("first",))
        self.assertEqual(self.load("first", only).persisted_upto, 9)
        # With two writers, either may have the ids in flight.
        self.store(second=4)
        self.assertEqual(self.load("first").announced, 5)

    def test_sequence_behind_both(self) -> None:
        """The error reports the greatest of rows and stored positions."""
        self.write_rows("first", 6)
        self.store(first=6, second=8)
        self.set_sequence(5)
        with self.assertRaises(SequenceBehindError) as caught:
            self.load()
        self.assertEqual(
            (caught.exception.value, caught.exception.sequence_value), (8, 5)
        )

    def test_sequence_behind_its_table(self) -> None:
        """
        The error names the sequence, the table, both values and the repairing
        statement.
        """
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
        """
        With raise_to_tables, a sequence is advanced to the rows, and never decreased.
        """
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
        """
        A sequence is moved forward only by a plausible distance, unless it is new.
        """
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
        A writer advances a sequence that is slightly behind the stored positions, and
        continues from its new value; a reader does not change it.
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
        """
        A sequence too far behind the positions is an error with a repairing statement.
        """
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
        """An implausible position is named, and no hint moves the sequence to it."""
        self.store(first=2**62, second=4)
        self.write_rows("second", 4)
        self.set_sequence(5)
        with self.assertRaises(SequenceBehindError) as caught:
            self.load("first")
        text = str(caught.exception)
        self.assertIn("table stream_positions has 4611686018427387904", text)
        self.assertIn(
            "stream_name = 'foobar' AND stream_id = 4611686018427387904", text
        )
        self.assertNotIn("setval", text)
        self.assertEqual(caught.exception.hint, "")
        # A reader assumes that the writer's position is the sequence's value.
        self.assertEqual(self.load().all_positions(), {"first": 5, "second": 4})

    def test_plausible_distance(self) -> None:
        """A position is believed up to the plausible distance and not beyond it."""
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
        """
        An implausible row is named and never moves the sequence, even with
        raise_to_tables.
        """
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
        """The error calls a row suspect only beyond the plausible distance."""
        stream = attrs.evolve(FOOBAR, plausible_distance=10)
        self.set_sequence(5)
        for row, is_suspect in ((15, False), (16, True)):
            self.write_rows("first", row)
            with self.assertRaises(SequenceBehindError) as caught:
                self.load("first", stream)
            self.assertEqual("inspect the row" in str(caught.exception), is_suspect)

    def test_negative(self) -> None:
        """A stream that counts down ignores rows and positions of the wrong sign."""
        stream = attrs.evolve(FOOBAR, negative=True)
        self.write_rows("first", -2, -3, 12)
        self.store(first=-3, second=5)
        self.set_sequence(4)
        self.assertEqual(self.load(stream=stream).all_positions()["first"], 3)
        with self.connection.cursor() as cursor:
            stored = read_stored_positions(cursor, stream)
        self.assertEqual(stored, {"first": 3, "second": 1})

    def test_without_declared_writers(self) -> None:
        """
        Without declared writers, the sequence is the position, and no position is
        stored.
        """
        self.store(first=2)
        self.write_rows("first", 3)
        self.set_sequence(6)
        undeclared = attrs.evolve(FOOBAR, writers=())
        self.assertEqual(self.load("first", undeclared).all_positions(), {"first": 6})
        self.assertEqual(self.stored(), {"first": 2})

    def test_access_path(self) -> None:
        """
        The method of looking up ids depends on the indexes and the size of the table.
        """
        column = FOOBAR.tables[0]
        with self.connection.cursor() as cursor:
            self.assertIs(best_access_path(cursor, column), AccessPath.BY_ID)
            self.sql("DROP INDEX foobar_id")
            self.assertIs(best_access_path(cursor, column), AccessPath.SCAN)
            for index in (
                "(stream_id) WHERE data IS NULL",
                "(lower(data), stream_id)",
                "(data) INCLUDE (stream_id)",
                "USING hash (stream_id)",
            ):
                self.sql(f"CREATE INDEX ON foobar {index}")
                self.assertIs(best_access_path(cursor, column), AccessPath.SCAN, index)
            self.sql(
                "INSERT INTO foobar SELECT 1, 'first', repeat('x', 1900)"
                f" FROM generate_series(1, {MAX_SCANNED_BYTES // 8192 * 4 + 4})"
            )
            self.assertIs(best_access_path(cursor, column), AccessPath.NONE)
            self.assertEqual(self.load("first").announced, 1)
            self.sql("CREATE INDEX ON foobar (instance_name, stream_id)")
            self.assertIs(best_access_path(cursor, column), AccessPath.BY_WRITER)

    def test_big_table_is_never_scanned(self) -> None:
        """
        With either index on a million rows, loading positions scans no table and reads
        few rows, however far behind a position is.
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
    """Tests for fetching ids from a sequence that is behind the known ids."""

    def setUp(self) -> None:
        self.make_database()
        self.addCleanup(self.connection.close)
        self.set_sequence(5)

    def fetch(self, known: int, count: int = 1) -> list[int]:
        with self.connection.cursor() as cursor:
            return fetch_ids(
                cursor,
                attrs.evolve(FOOBAR, plausible_distance=10),
                count,
                lambda ids: [id_ for id_ in ids if id_ > known],
                known,
            )

    def test_plausible(self) -> None:
        """A sequence is moved forward by at most the plausible distance."""
        self.assertEqual(self.fetch(known=16), [17])
        self.set_sequence(5)
        self.assertEqual(self.fetch(known=14, count=2), [15, 16])

    def test_implausible(self) -> None:
        """A greater distance is an error that names the last id fetched."""
        with self.assertRaises(SequenceBehindError) as caught:
            self.fetch(known=18, count=2)
        self.assertEqual(
            (caught.exception.sequence_value, caught.exception.value), (7, 18)
        )
        self.assertIn("another deployment announced 18", str(caught.exception))
