"""Tests for synapse_replication.storage.removed_writer_search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs
import psycopg2
import psycopg2.extensions
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import CatchUpError
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.storage import id_streams, removed_writer_search
from synapse_replication.storage.id_streams import AccessPath, IdStream
from synapse_replication.storage.open_transactions import MAX_WAIT, POLL_SECONDS
from synapse_replication.storage.removed_writer_search import (
    RemovedWriterFinder,
    WriterSurvey,
)
from synapse_replication.storage.sequences import load_positions
from synapse_replication.storage.transactions import connect
from synapse_replication.streams.stream import RemovedWriter
from tests.storage.doubles import FOOBAR, ExplainingCursor, PostgresMixin

T = TypeVar("T")

MANY = 300_000

MOVED_STREAM = attrs.evolve(FOOBAR, writers=("new",))


class RemovedWritersTestCase(PostgresMixin, SynchronousTestCase):
    """A stream that was moved to the writer ``new``."""

    def setUp(self) -> None:
        self.make_database()
        self.addCleanup(self.connection.close)
        self.clock = Clock()
        self.is_down = False
        self.queries: list[str] = []
        self.cursor: ExplainingCursor | None = None

    def transact(
        self, description: str, func: Callable[[Any], T], *, autocommit: bool = False
    ) -> Deferred[T]:
        if self.is_down:
            return fail(psycopg2.OperationalError("the server is gone"))
        self.queries.append(description)
        with self.connection.cursor() as cursor:
            return succeed(func(self.cursor or cursor))

    def make_finder(
        self,
        delivered: Mapping[str, int],
        unknown: int = 1,
        stream: IdStream = MOVED_STREAM,
        *,
        is_new: bool = False,
    ) -> RemovedWriterFinder:
        return RemovedWriterFinder(
            self,
            ReactorClock(self.clock),
            stream,
            "reader",
            lambda: delivered,
            unknown,
            is_new=is_new,
        )

    def index_by_writer(self) -> None:
        self.sql(
            "DROP INDEX foobar_id; "
            "CREATE INDEX foobar_writer ON foobar (instance_name, stream_id)"
        )

    def survey(
        self,
        delivered: Mapping[str, int],
        unknown: int = 1,
        stream: IdStream = MOVED_STREAM,
        *,
        is_new: bool = False,
    ) -> WriterSurvey:
        finder = self.make_finder(delivered, unknown, stream, is_new=is_new)
        return self.successResultOf(Deferred.fromCoroutine(finder.survey()))


class SurveyWritersTests(RemovedWritersTestCase):
    """Tests for the survey of the database."""

    def check_each_index(self, check: Callable[[], None]) -> None:
        check()
        self.index_by_writer()
        check()

    def test_moved(self) -> None:
        """Only the rows of writers without a stored position are found."""
        self.write_rows("old", 2, 3, 6)
        self.write_rows("older", 4)
        self.write_rows("new", 5, 7)
        self.write_rows("reader", 8)
        self.set_sequence(9)
        self.store(new=7)

        def check() -> None:
            survey = self.survey({"old": 3, "new": 5, "gone": 2})
            self.assertEqual(survey.greatest, {"old": 6, "older": 4})
            self.assertEqual(survey.absent, {"old", "older", "gone"})
            self.assertEqual((survey.upto, survey.stored), (9, {"new": 7}))
            self.assertEqual(self.survey({"old": 6, "older": 4}).greatest, {})
            self.assertEqual(self.survey({}, unknown=6).greatest, {})

        self.check_each_index(check)

    def test_stream_that_counts_down(self) -> None:
        """Ids below zero are returned as tokens above zero."""
        self.write_rows("old", -2, -3)
        self.set_sequence(3)
        self.store(new=-3)
        stream = attrs.evolve(MOVED_STREAM, negative=True)
        self.check_each_index(
            lambda: self.assertEqual(
                self.survey({"old": 2}, stream=stream).greatest, {"old": 3}
            )
        )

    def test_rows_without_writer_and_beyond_the_sequence(self) -> None:
        """
        Rows without a writer are ignored, and an id beyond the sequence counts as the
        sequence's value.
        """
        self.sql("ALTER TABLE foobar ALTER instance_name DROP NOT NULL")
        self.sql("INSERT INTO foobar VALUES (5, NULL, '')")
        self.write_rows("old", 4, 2**40)
        self.set_sequence(9)
        self.check_each_index(
            lambda: self.assertEqual(self.survey({"old": 3}).greatest, {"old": 9})
        )

    def test_sequence_that_was_set_back(self) -> None:
        """Rows above a sequence that a failover set back are found."""
        self.write_rows("old", 2, 8)
        self.set_sequence(5)
        self.store(new=3)
        self.check_each_index(
            lambda: self.assertEqual(self.survey({"old": 3}).greatest, {"old": 8})
        )

    def test_walks_an_index_page_by_page(self) -> None:
        """All rows above the reader's positions are found, a page at a time."""
        self.patch(removed_writer_search, "WALKED_ROWS", 2)
        self.write_rows("old", 2, 4, 6, 8)
        self.write_rows("older", 3, 5)
        self.set_sequence(8)
        self.assertEqual(self.survey({"old": 4}).greatest, {"old": 8, "older": 5})

    def test_bounded_walk(self) -> None:
        """
        A bounded walk finds unknown writers among the last ids only; an index by writer
        finds all of them.
        """
        self.write_rows("older", 3)
        self.write_rows("old", 8)
        self.set_sequence(9)
        self.patch(removed_writer_search, "REMOVED_WRITERS_LOOK_BACK", 4)
        self.assertEqual(self.survey({}, is_new=True).greatest, {"old": 8})
        self.index_by_writer()
        self.assertEqual(self.survey({}, is_new=True).greatest, {"old": 8, "older": 3})

    def test_big_table(self) -> None:
        """A big table is only read through an index."""
        self.sql(
            "DROP INDEX foobar_id; INSERT INTO foobar SELECT i, CASE WHEN i < 1000 "
            "THEN 'old' WHEN i % 2 = 0 THEN 'new' ELSE 'newer' END, 'x' "
            f"FROM generate_series(1, {MANY}) AS i"
        )
        self.set_sequence(MANY)
        self.store(new=MANY)
        stream = attrs.evolve(MOVED_STREAM, writers=("new", "newer"))
        for index in ("stream_id", "instance_name, stream_id"):
            self.sql(f"CREATE INDEX big ON foobar ({index}); ANALYZE foobar")
            with self.connection.cursor() as cursor:
                explaining = ExplainingCursor(cursor, "WITH", "SELECT")
                self.cursor = explaining
                survey = self.survey({"old": 900}, MANY - 100, stream)
            self.sql("DROP INDEX big")
            self.assertEqual(survey.greatest["old"], 999)
            plans = "\n".join(explaining.plans)
            self.assertNotRegex(plans, "Seq Scan on foobar( |$)")
            self.assertRegex(plans, "Index (Only )?Scan .*using big on foobar")

    def test_big_table_without_index(self) -> None:
        """A big table without an index is not read."""
        self.patch(
            id_streams, "find_access_paths", lambda txn, column: {AccessPath.NONE}
        )
        self.write_rows("old", 2)
        self.assertEqual(self.survey({}).greatest, {})


class RemovedWriterFinderTests(RemovedWritersTestCase):
    """Tests for the removed writers that a reader has to drain."""

    def setUp(self) -> None:
        super().setUp()
        self.delivered = {"old": 3}
        self.finder = self.make_finder(self.delivered)

    def begin(self) -> Deferred[dict[str, RemovedWriter]]:
        return Deferred.fromCoroutine(self.finder.find())

    def find(self) -> dict[str, RemovedWriter]:
        return self.successResultOf(self.begin())

    def test_removed_while_the_reader_runs(self) -> None:
        """
        A writer is reported as deleted, at its last row, once its position is deleted.
        """
        self.store(old=4)
        self.write_rows("old", 2, 4, 6)
        self.set_sequence(6)
        # Unknown to this stream, the writer may still be writing.
        self.assertEqual(self.find(), {"old": RemovedWriter(4, is_deleted=False)})
        with self.connection.cursor() as cursor:
            load_positions(cursor, MOVED_STREAM, "new")
        self.assertEqual(self.find(), {"old": RemovedWriter(6, is_deleted=True)})
        self.delivered["old"] = 6
        # The writer stays reported even when none of its rows is missing.
        self.assertEqual(self.find(), {"old": RemovedWriter(6, is_deleted=True)})

    def test_writer_declared_again(self) -> None:
        """A writer that is declared again is no longer reported."""
        stream = attrs.evolve(MOVED_STREAM, writers=("old", "new"))
        finder = self.make_finder(self.delivered, stream=stream)
        self.write_rows("old", 6)
        self.set_sequence(6)
        found = self.successResultOf(Deferred.fromCoroutine(finder.find()))
        self.assertEqual(found, {"old": RemovedWriter(6, is_deleted=True)})
        self.store(old=6)
        found = self.successResultOf(Deferred.fromCoroutine(finder.find()))
        self.assertEqual(found, {})

    def test_rows_are_walked_once(self) -> None:
        """A writer that was found is remembered until its rows are delivered."""
        self.write_rows("old", 6)
        self.write_rows("unheard", 7)
        self.set_sequence(9)
        expected = {
            "old": RemovedWriter(6, is_deleted=True),
            "unheard": RemovedWriter(7, is_deleted=True),
        }
        self.assertEqual(self.find(), expected)
        self.sql("DELETE FROM foobar")
        self.assertEqual(self.find(), expected)
        self.delivered.update(old=6, unheard=7)
        self.assertEqual(self.find(), {})

    def test_idle_writer_costs_nothing(self) -> None:
        """A declared writer that is far behind does not make later walks longer."""
        self.write_rows("new", *range(2, 9))
        self.set_sequence(9)
        self.store(new=2)
        self.delivered.clear()
        self.delivered["new"] = 2
        self.assertEqual(self.find(), {})
        self.write_rows("old", 10)
        self.set_sequence(10)
        seen: list[object] = []
        survey = removed_writer_search._walk

        def recording_walk(*args: Any) -> dict[str, int]:
            seen.append(args[-1])
            return survey(*args)

        self.patch(removed_writer_search, "_walk", recording_walk)
        self.assertEqual(self.find(), {"old": RemovedWriter(10, is_deleted=True)})
        self.assertEqual(seen, [9])

    def open_transaction(self) -> psycopg2.extensions.connection:
        """Return the connection of a transaction that has added row 7 of 'old'."""
        self.write_rows("old", 6)
        self.set_sequence(7)
        session = connect(self.dsn)
        self.addCleanup(session.close)
        with session.cursor() as cursor:
            cursor.execute("INSERT INTO foobar VALUES (7, 'old', '')")
        return session

    def test_waits_for_open_transactions(self) -> None:
        """find() waits for a commit that was under way when its writer was killed."""
        connection = self.open_transaction()
        finding = self.begin()
        for _ in range(3):
            self.clock.advance(POLL_SECONDS)
        self.assertNoResult(finding)
        connection.commit()
        self.clock.advance(MAX_WAIT)
        self.assertEqual(
            self.successResultOf(finding), {"old": RemovedWriter(7, is_deleted=True)}
        )

    def test_transaction_that_stays_open(self) -> None:
        """
        After 10 s, the search fails with the session's name; its queries back off.
        """
        connection = self.open_transaction()
        finding = self.begin()
        self.clock.pump([POLL_SECONDS] * round(MAX_WAIT / POLL_SECONDS))
        self.assertLess(len(self.queries), 30)
        self.clock.pump([POLL_SECONDS] * 20)
        error = self.failureResultOf(finding, CatchUpError).value
        pid = connection.info.backend_pid
        self.assertIn("rows of a removed writer to foobar has not ended", str(error))
        self.assertIn(f"pg_terminate_backend({pid})", str(error))
        connection.rollback()
        self.assertEqual(self.find(), {"old": RemovedWriter(6, is_deleted=True)})

    def test_prepared_transaction(self) -> None:
        """A transaction without a session is described, too."""
        self.patch(removed_writer_search, "find_session", lambda *_: None)
        transactions = frozenset({"1/1"})
        self.patch(
            removed_writer_search, "read_open_transactions", lambda *_: transactions
        )
        finding = self.begin()
        self.clock.pump([POLL_SECONDS] * round(2 * MAX_WAIT / POLL_SECONDS))
        error = self.failureResultOf(finding, CatchUpError).value
        self.assertIn("see pg_prepared_xacts", str(error))

    def test_database_is_down(self) -> None:
        """If the database is down, the error is one that the caller can retry."""
        self.is_down = True
        error = self.failureResultOf(self.begin(), CatchUpError).value
        self.assertIn("removed writers of foobar", str(error))

    def test_no_declared_writers(self) -> None:
        """Without declared writers no writer counts as removed."""
        finder = self.make_finder(
            self.delivered, stream=attrs.evolve(FOOBAR, writers=())
        )
        self.write_rows("old", 6)
        found = self.successResultOf(Deferred.fromCoroutine(finder.find()))
        self.assertEqual(found, {})
