"""Tests for synapse_replication.storage.consistency."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import StorageError, StreamConfigurationError
from synapse_replication.storage.consistency import (
    ConsistencyReport,
    Problem,
    ProblemKind,
    WriterState,
    examine,
    repair,
)
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.sequences import load_positions
from synapse_replication.streams.id_column import IdColumn
from tests.storage.doubles import PostgresMixin

FOOBAR = IdStream(
    stream_name="foobar",
    sequence="foobar_seq",
    tables=(IdColumn("foobar", "stream_id", "instance_name"),),
    writers=("first", "second"),
)
NEGATIVE = attrs.evolve(FOOBAR, negative=True)


class PositionsTests(PostgresMixin, SynchronousTestCase):
    """Tests for each kind of damage, on a real database."""

    def setUp(self) -> None:
        self.make_database()
        self.addCleanup(self.connection.close)
        self.write_rows("first", 5)
        self.write_rows("second", 7)
        self.set_sequence(7)
        self.store(first=5, second=7)

    def examine(self, stream: IdStream = FOOBAR) -> ConsistencyReport:
        with self.connection.cursor() as cursor:
            return examine(cursor, {"foo": stream})

    def only_problem(self, stream: IdStream = FOOBAR) -> Problem:
        """Return the only problem, after checking that its hint repairs it."""
        (problem,) = self.examine(stream).problems
        self.connection.autocommit = False
        with self.connection.cursor() as cursor:
            for statement in problem.statements:
                cursor.execute(statement)
            self.assertEqual(examine(cursor, {"foo": stream}).problems, [])
        self.connection.rollback()
        self.connection.autocommit = True
        return problem

    def repair(self, stream: IdStream = FOOBAR) -> list[Problem]:
        self.connection.autocommit = False
        with self.connection.cursor() as cursor:
            repaired, report = repair(cursor, {"foo": stream})
        self.connection.commit()
        self.connection.autocommit = True
        self.assertEqual(report.problems, [])
        self.assertEqual(self.examine(stream).problems, [])
        return repaired

    def sequence(self) -> int:
        return int(self.sql("SELECT last_value FROM foobar_seq")[0][0])

    def test_healthy(self) -> None:
        """Ids without rows are not a problem, and the report contains all values."""
        self.set_sequence(9)
        self.sql("DELETE FROM foobar WHERE stream_id = 7")
        report = self.examine()
        self.assertEqual(report.problems, [])
        (state,) = report.streams
        self.assertEqual((state.sequence_value, state.farthest), (9, {"foobar": 5}))
        self.assertEqual(
            state.writers,
            [WriterState("first", True, 5, 4), WriterState("second", True, 7, 2)],
        )
        self.assertEqual(self.repair(), [])

    def test_sequence_behind_its_table(self) -> None:
        """
        A sequence behind its table is reported with both values and moved forward.
        """
        self.write_rows("first", 20)
        problem = self.only_problem()
        self.assertIs(problem.kind, ProblemKind.SEQUENCE_BEHIND)
        self.assertIn("foobar_seq is at 7, but table foobar contains 20", problem.text)
        # The statements tried above are not rolled back, because changes of sequences
        # never are.
        self.set_sequence(7)
        self.repair()
        self.assertEqual(self.sequence(), 20)

    def test_sequence_options(self) -> None:
        """A sequence that does not allocate ids in order is reported and corrected."""
        for option, text in (
            ("CACHE 50", "foobar_seq has CACHE 50: each session allocates 50 ids"),
            ("INCREMENT -1 MINVALUE -9", "foobar_seq has INCREMENT -1"),
            ("CYCLE", "foobar_seq has CYCLE"),
        ):
            self.sql(f"ALTER SEQUENCE foobar_seq {option}")
            problem = self.only_problem()
            self.assertIs(problem.kind, ProblemKind.SEQUENCE_UNORDERED)
            self.assertIn(text, problem.text)
            with (
                self.connection.cursor() as cursor,
                self.assertRaises(StreamConfigurationError) as caught,
            ):
                load_positions(cursor, FOOBAR, "first")
            self.assertIn(text, str(caught.exception))
            self.assertIn("ALTER SEQUENCE", str(caught.exception))
            self.repair()

    def test_position_ahead(self) -> None:
        """For a position beyond the sequence, the sequence is moved forward."""
        self.sql("UPDATE stream_positions SET stream_id = 30 WHERE stream_id = 5")
        problem = self.only_problem()
        self.assertIs(problem.kind, ProblemKind.POSITION_AHEAD)
        self.assertIn("first is stored at 30", problem.text)
        self.set_sequence(7)
        self.repair()
        self.assertEqual((self.sequence(), self.stored()["first"]), (30, 30))

    def test_position_implausibly_far_ahead(self) -> None:
        """
        A position that was never allocated is set back; the sequence does not change.
        """
        self.sql(
            "UPDATE stream_positions SET stream_id = 4611686018427387904 "
            "WHERE instance_name = 'second'"
        )
        problem = self.only_problem()
        self.assertEqual(problem.kind, ProblemKind.POSITION_AHEAD)
        self.assertNotIn("setval", problem.statements[0])
        self.repair()
        self.assertEqual(self.stored(), {"first": 5, "second": 7})
        self.assertEqual(self.examine().streams[0].sequence_value, 7)

    def test_row_implausibly_far_ahead(self) -> None:
        """An implausible row is reported, and no hint moves a sequence to it."""
        self.write_rows("first", 2**62)
        (problem,) = self.examine().problems
        self.assertEqual(problem.statements, ())
        self.assertIn(
            'FROM "foobar" WHERE "stream_id" = 4611686018427387904', problem.text
        )
        self.assertNotIn("setval", problem.text)

    def test_unknown_writer(self) -> None:
        """The position of an instance that is not a writer is deleted."""
        for name in ("it's gone", "two\nlines"):
            self.store(**{name: 2})
            problem = self.only_problem()
            self.assertIs(problem.kind, ProblemKind.UNKNOWN_WRITER)
            self.assertIn("the writers are first, second", problem.text)
            self.repair()
            self.assertEqual(self.stored(), {"first": 5, "second": 7})

    def test_wrong_sign(self) -> None:
        """A position with the wrong sign is negated."""
        self.sql("UPDATE stream_positions SET stream_id = -5 WHERE stream_id = 5")
        self.assertIs(self.only_problem().kind, ProblemKind.WRONG_SIGN)
        self.repair()
        self.assertEqual(self.stored(), {"first": 5, "second": 7})

    def test_wrong_sign_of_a_negative_stream(self) -> None:
        """In a stream that counts down, a positive position is made negative."""
        self.sql("UPDATE foobar SET stream_id = -stream_id")
        self.sql("UPDATE stream_positions SET stream_id = -7 WHERE stream_id = 7")
        self.assertIs(self.only_problem(NEGATIVE).kind, ProblemKind.WRONG_SIGN)
        self.repair(NEGATIVE)
        self.assertEqual(self.stored(), {"first": -5, "second": -7})
        self.assertEqual(self.examine(NEGATIVE).streams[0].farthest, {"foobar": 7})

    def test_index_missing(self) -> None:
        """
        A writer's duplicate positions are merged into the greatest; then an index is
        created.
        """
        self.sql("DROP INDEX stream_positions_idx")
        self.store(first=4)
        self.store(first=5)
        self.assertIs(self.only_problem().kind, ProblemKind.INDEX_MISSING)
        self.repair()
        self.assertEqual(self.stored(), {"first": 5, "second": 7})
        count = self.sql("SELECT count(*) FROM stream_positions")
        self.assertEqual(count, [(2,)])

    def test_table_missing(self) -> None:
        """A missing table is created, also by the statement in one line."""
        self.sql("DROP TABLE stream_positions")
        problem = self.only_problem()
        self.assertIs(problem.kind, ProblemKind.TABLE_MISSING)
        (statement,) = problem.statements
        self.sql(" ".join(statement.split()))
        self.store(first=5)
        self.sql("DROP TABLE stream_positions")
        self.repair()
        self.store(first=5)

    def test_all_at_once(self) -> None:
        """Damage of several kinds is repaired together, and no position decreases."""
        self.sql("DROP INDEX stream_positions_idx")
        self.write_rows("first", 20)
        self.store(first=40, gone=3, second=-7)
        self.assertGreaterEqual(len(self.repair()), 4)
        self.assertEqual((self.sequence(), self.stored()["first"]), (40, 40))
        self.assertEqual(abs(self.stored()["second"]), 7)

    def test_permanent_error(self) -> None:
        """
        If a problem remains after the repair, nothing is committed and an error is
        raised.
        """
        self.sql("CREATE RULE keep AS ON DELETE TO stream_positions DO INSTEAD NOTHING")
        self.store(gone=3)
        with self.assertRaises(StorageError) as caught:
            self.repair()
        self.assertIn("gone is stored at 3", str(caught.exception))

    def test_absent_stream(self) -> None:
        """A stream without its sequence is reported as absent and not as a problem."""
        stream = attrs.evolve(FOOBAR, sequence="newer_seq")
        report = self.examine(stream)
        self.assertEqual(report.problems, [])
        self.assertIsNone(report.streams[0].sequence_value)

    def test_without_declared_writers(self) -> None:
        """The positions of a stream without declared writers are ignored."""
        undeclared = attrs.evolve(FOOBAR, writers=())
        self.assertEqual(self.examine(undeclared).streams[0].writers, [])

    def test_no_rows(self) -> None:
        """A stream without rows may be stored at 1, ahead of an unused sequence."""
        self.sql("TRUNCATE foobar, stream_positions; DROP SEQUENCE foobar_seq")
        self.sql("CREATE SEQUENCE foobar_seq")
        self.store(first=1)
        report = self.examine()
        self.assertEqual(report.problems, [])
        self.assertEqual(
            report.streams[0].writers[1], WriterState("second", True, None, None)
        )
