"""Tests for :mod:`scripts.tools.faults.synapse.verdict`."""

from __future__ import annotations

from collections import Counter

import attrs
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.synapse.verdict import (
    Committed,
    Delivery,
    Life,
    StreamTally,
    compare,
    missing_rows,
)

#: Two persisters' rows; both were written after everything was up.
ROWS = [
    Committed("events", 7, "persister1", at=20.0),
    Committed("events", 8, "persister2", at=21.0),
]
BOTH = {"events": {row.delivery for row in ROWS}}


def life(
    process: str, *tokens: int, started: float = 10.0, is_ours: bool = True
) -> Life:
    """Return a process that had read up to 6 and was then given some tokens."""
    return Life(
        process,
        is_ours,
        started,
        {"events": {"persister1": 6, "persister2": 6}},
        deliveries=Counter(Delivery("events", token) for token in tokens),
    )


def lost(
    *lives: Life, present: dict[str, set[Delivery]] = BOTH
) -> list[tuple[str, int]]:
    return [(one.process, row.token) for one, row in missing_rows(ROWS, lives, present)]


class MissingRowsTests(SynchronousTestCase):
    def test_each_reader_needs_each_row(self) -> None:
        """A row that one of two readers was not given is missing there."""
        self.assertEqual(lost(life("sync1", 7, 8), life("sync2", 7)), [("sync2", 8)])

    def test_own_rows(self) -> None:
        """Nobody is given the rows that it wrote."""
        self.assertEqual(lost(life("persister1", 8)), [])

    def test_read_at_the_start(self) -> None:
        """What a process had read from the database when it started is not due."""
        late = life("sync1", started=30.0)
        late.positions = {"events": {"persister1": 7, "persister2": 8}}
        self.assertEqual(lost(late), [])

    def test_positions_that_are_too_far(self) -> None:
        """
        Of what was written after its start, a process cannot say that it had read it
        before: a position that is too far hides nothing.
        """
        early = life("sync1", 7)
        early.positions = {"events": {"persister1": 9, "persister2": 9}}
        self.assertEqual(lost(early), [("sync1", 8)])

    def test_committed_before_the_start_and_not_read(self) -> None:
        """What was written before the start, beyond what was read then, is due."""
        late = life("sync1", 7, started=30.0)
        self.assertEqual(lost(late), [("sync1", 8)])

    def test_replaced_rows(self) -> None:
        """A row that is not there any more cannot be fetched."""
        present = {"events": {ROWS[0].delivery}}
        self.assertEqual(lost(life("sync1"), present=present), [("sync1", 7)])

    def test_ended_processes(self) -> None:
        """A process that was killed needs what was written while it was judged."""
        killed = life("sync1")
        killed.is_running = False
        self.assertEqual(lost(killed), [])
        killed.judged_until = 20.5
        self.assertEqual(lost(killed), [("sync1", 7)])

    def test_eras(self) -> None:
        """A token of before the writer's restart stands for another row."""
        row = Committed("typing", 3, "writer1", at=20.0, era=1)
        reader = life("sync1")
        reader.deliveries[Delivery("typing", 3, 0)] += 1
        self.assertEqual(missing_rows([row], [reader], {}), [(reader, row)])
        reader.deliveries[Delivery("typing", 3, 1)] += 1
        self.assertEqual(missing_rows([row], [reader], {}), [])


class CompareTests(SynchronousTestCase):
    def test_counts(self) -> None:
        """Processes on ours and stock ones are counted by themselves."""
        found = compare(
            ROWS,
            [
                life("sync1", 7, 8),
                life("sync2", 7, 7, 8),
                life("stock1", 7, is_ours=False),
            ],
            BOTH,
            ["events", "caches"],
        )
        self.assertEqual(
            found,
            [
                StreamTally("events", True, 2, 4, 4, lost=0, doubled=1),
                StreamTally("caches", True, 0, 0, 0, lost=0, doubled=0),
                StreamTally("events", False, 2, 2, 1, lost=1, doubled=0),
                StreamTally("caches", False, 0, 0, 0, lost=0, doubled=0),
            ],
        )

    def test_replaced_rows_are_not_lost(self) -> None:
        """They were due and not delivered, and that is no fault."""
        (found,) = compare(ROWS, [life("sync1", 7)], {"events": set()}, ["events"])
        self.assertEqual((found.due, found.delivered, found.lost), (2, 1, 0))

    def test_starts_of_one_process(self) -> None:
        """A process that was started again may be given what it was given before."""
        first = life("sync1", 7)
        first.is_running = False
        (found,) = compare(ROWS, [first, life("sync1", 7, 8)], BOTH, ["events"])
        self.assertEqual((found.due, found.lost, found.doubled), (2, 0, 0))
        # Doubled counts for a process that was killed later, too.
        first.deliveries[ROWS[0].delivery] += 1
        (found,) = compare(ROWS, [first, life("sync1", 7, 8)], BOTH, ["events"])
        self.assertEqual(attrs.evolve(found, doubled=0).lost, 0)
        self.assertEqual(found.doubled, 1)
