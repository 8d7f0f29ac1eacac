"""Tests for :mod:`synapse_replication.pipeline.bootstrap.plan`."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.bootstrap.plan import (
    Change,
    PlannedChange,
    StreamHistory,
    check_histories,
    plan_positions,
)
from synapse_replication.streams.table import IdColumn

HISTORY = StreamHistory(
    name="foo",
    positions_name="foo_stream",
    sequence="foo_seq",
    tables=(IdColumn("foo", "stream_id", "instance_name"),),
    negative=False,
    writers=("first", "second"),
    sequence_value=9,
    stored={},
    farthest={"foo": 8},
    found={"first": 8},
)


class PlanTests(SynchronousTestCase):
    """Tests for the plan, without a database."""

    def plan(self, **changes: Any) -> list[tuple[str, int | None, PlannedChange]]:
        plan = plan_positions([attrs.evolve(HISTORY, **changes)])
        return [(change.instance_name, change.new, change.treatment) for change in plan]

    def test_empty_stream(self) -> None:
        """A stream without rows gets no positions."""
        self.assertEqual(self.plan(farthest={}, found={}), [])

    def test_undeclared(self) -> None:
        """
        An instance that is no longer a writer gets no position; a position that it has
        is unchanged.
        """
        self.assertEqual(
            self.plan(found={"first": 8, "old": 5}, stored={"older": 3}),
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
            self.plan(found={"first": 5}),
            [("first", 5, PlannedChange.NEW), ("second", 8, PlannedChange.NEW)],
        )

    def test_never_rewinds(self) -> None:
        """A stored position at or beyond the last row is unchanged."""
        self.assertEqual(
            self.plan(stored={"first": 8, "second": 9}),
            [("first", 8, PlannedChange.KEPT), ("second", 9, PlannedChange.KEPT)],
        )
        self.assertEqual(
            self.plan(stored={"first": 7, "second": 8}),
            [("first", 8, PlannedChange.FORWARD), ("second", 8, PlannedChange.KEPT)],
        )

    def test_writers_unknown(self) -> None:
        """
        Without a configuration, each instance with rows or a position is a writer.
        """
        self.assertEqual(
            self.plan(writers=None, stored={"third": 3}),
            [("first", 8, PlannedChange.NEW), ("third", 8, PlannedChange.FORWARD)],
        )

    def test_found(self) -> None:
        """Results from several parts of tables are combined in any order."""
        history = HISTORY.with_found(
            [
                ("foo", "foo", "first", 6),
                ("foo", "foo", "second", 4),
                ("foo", "foo", "first", 3),
                ("foo", "more", None, 7),
                ("bar", "bar", "first", 90),
            ]
        )
        self.assertEqual(history.farthest, {"foo": 6, "more": 7})
        self.assertEqual(history.found, {"first": 6, "second": 4})

    def test_sequence_behind(self) -> None:
        """A sequence may be at the last row, but not behind it."""
        check_histories([attrs.evolve(HISTORY, sequence_value=8)])
        error = self.assertRaises(
            PipelineError,
            check_histories,
            [attrs.evolve(HISTORY, sequence_value=7, negative=True)],
        )
        self.assertIn("foo is at 7, but table foo has the id -8", str(error))

    def test_wrong_sign(self) -> None:
        """The initial position 1 of a stream with negative ids is replaced."""
        (change, _) = plan_positions(
            [attrs.evolve(HISTORY, negative=True, stored={"first": 1})]
        )
        self.assertEqual(
            change, Change("foo", "foo_stream", "first", 1, -8, PlannedChange.FORWARD)
        )

    def test_position_beyond_sequence(self) -> None:
        """A position beyond the sequence is an error, except the initial one."""
        no_rows = attrs.evolve(HISTORY, sequence_value=0, farthest={})
        check_histories([attrs.evolve(no_rows, stored={"first": 1})])
        check_histories([attrs.evolve(HISTORY, stored={"first": 9})])
        error = self.assertRaises(
            PipelineError,
            check_histories,
            [attrs.evolve(HISTORY, stored={"first": 10})],
        )
        self.assertIn("foo is at 9, but the stored position of first is 10", str(error))
