"""Tests for :mod:`synapse_replication.pipeline.bootstrap`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.bootstrap import (
    Change,
    Found,
    PlannedChange,
    check_sequences,
    plan_positions,
)
from synapse_replication.storage.consistency import (
    ConsistencyReport,
    Problem,
    ProblemKind,
    StreamState,
    WriterState,
)
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.streams.id_column import IdColumn

STATE = StreamState(
    name="foo",
    stream=IdStream(
        stream_name="foo_stream",
        sequence="foo_seq",
        tables=(IdColumn("foo", "stream_id", "instance_name"),),
        writers=("first", "second"),
    ),
    sequence_value=9,
    farthest={"foo": 8},
    writers=(),
)


def state(
    stored: Mapping[str, int] = MappingProxyType({}), *, negative: bool = False
) -> StreamState:
    """Return the state of the stream with these stored positions."""
    stream = attrs.evolve(STATE.stream, negative=negative)
    writers = [WriterState(name, True, id_, 0) for name, id_ in stored.items()]
    return attrs.evolve(STATE, stream=stream, writers=writers)


def rows(**found: int) -> list[Found]:
    """Return the greatest tokens of writers in the stream's table."""
    return [("foo", "foo", writer, token) for writer, token in found.items()]


class PlanTests(SynchronousTestCase):
    """Tests for the plan, without a database."""

    def plan(
        self,
        found: list[Found],
        declared: Sequence[str] = ("first", "second"),
        **stored: int,
    ) -> list[tuple[str, int | None, PlannedChange]]:
        plan = plan_positions([state(stored)], found, {"foo": tuple(declared)})
        return [(change.instance_name, change.new, change.treatment) for change in plan]

    def test_empty_stream(self) -> None:
        """A stream without rows gets no positions."""
        self.assertEqual(self.plan([]), [])

    def test_undeclared(self) -> None:
        """
        An instance that is no longer a writer gets no position; a position that it has
        is unchanged.
        """
        self.assertEqual(
            self.plan(rows(first=8, old=5), older=3),
            [
                ("first", 8, PlannedChange.NEW),
                ("old", None, PlannedChange.UNDECLARED),
                ("older", 3, PlannedChange.UNDECLARED),
                ("second", 8, PlannedChange.NEW),
            ],
        )

    def test_each_at_its_own(self) -> None:
        """
        The position of a writer is its last row, or the greatest id if it has no rows.
        """
        self.assertEqual(
            self.plan([*rows(first=5), ("foo", "more", None, 8)]),
            [("first", 5, PlannedChange.NEW), ("second", 8, PlannedChange.NEW)],
        )

    def test_never_rewinds(self) -> None:
        """A stored position at or beyond the last row is unchanged."""
        self.assertEqual(
            self.plan(rows(first=8), first=8, second=9),
            [("first", 8, PlannedChange.KEPT), ("second", 9, PlannedChange.KEPT)],
        )
        self.assertEqual(
            self.plan(rows(first=8), first=7, second=8),
            [("first", 8, PlannedChange.FORWARD), ("second", 8, PlannedChange.KEPT)],
        )

    def test_writers_unknown(self) -> None:
        """
        Without a configuration, each instance with rows or a position is a writer.
        """
        self.assertEqual(
            self.plan(rows(first=8), declared=(), third=3),
            [("first", 8, PlannedChange.NEW), ("third", 8, PlannedChange.FORWARD)],
        )

    def test_found(self) -> None:
        """The rows of several tables are combined in any order."""
        found: list[Found] = [
            *rows(first=6, second=4),
            ("foo", "more", "first", 3),
            ("foo", "more", None, 7),
            ("bar", "bar", "first", 90),
        ]
        self.assertEqual(
            [(name, new) for name, new, _ in self.plan(found, ("first", "third"))],
            [("first", 6), ("second", None), ("third", 7)],
        )

    def test_sequence_behind(self) -> None:
        """A sequence may be at the last row, but not behind it."""
        report = ConsistencyReport([state(negative=True)], [])
        check_sequences(report, rows(first=9))
        error = self.assertRaises(
            PipelineError, check_sequences, report, rows(first=10)
        )
        self.assertIn("foo is at 9, but table foo has the id -10", str(error))

    def test_sequence_behind_several_writers(self) -> None:
        """A table is named once, with the greatest id of all writers."""
        found = rows(first=10, second=12)
        report = ConsistencyReport([state()], [])
        error = self.assertRaises(PipelineError, check_sequences, report, found)
        self.assertEqual(str(error).count("table foo"), 1)
        self.assertIn("foo is at 9, but table foo has the id 12", str(error))

    def test_wrong_sign(self) -> None:
        """The initial position 1 of a stream with negative ids is replaced."""
        stored = state({"first": 1}, negative=True)
        (change,) = plan_positions([stored], rows(first=8), {})
        self.assertEqual(
            change, Change("foo", "foo_stream", "first", 1, -8, PlannedChange.FORWARD)
        )

    def test_position_beyond_sequence(self) -> None:
        """A position beyond the sequence is an error; other problems are not."""
        problems = [
            Problem(kind, "foo", f"is {kind.name}", ())
            for kind in (ProblemKind.UNKNOWN_WRITER, ProblemKind.POSITION_AHEAD)
        ]
        check_sequences(ConsistencyReport([state()], problems[:1]), [])
        error = self.assertRaises(
            PipelineError, check_sequences, ConsistencyReport([state()], problems), []
        )
        self.assertIn("foo: is POSITION_AHEAD. Stop all writers", str(error))
