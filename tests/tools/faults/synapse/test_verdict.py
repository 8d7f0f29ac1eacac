"""Tests for :mod:`scripts.tools.faults.synapse.verdict`."""

from __future__ import annotations

from collections import Counter

import attrs
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.synapse.verdict import (
    Committed,
    Delivery,
    Epoch,
    StreamTally,
    compare,
    missing_rows,
    received_by_none,
)

#: Rows of two persisters, both written after every process was up.
ROWS = [
    Committed("events", 7, "persister1", at=20.0),
    Committed("events", 8, "persister2", at=21.0),
]
ALL_PRESENT = {"events": {row.delivery for row in ROWS}}


def epoch(
    process: str, *tokens: int, started: float = 10.0, is_ours: bool = True
) -> Epoch:
    """Return a process that had read up to 6 and then received the tokens."""
    return Epoch(
        process,
        is_ours,
        started,
        {"events": {"persister1": 6, "persister2": 6}},
        deliveries=Counter(Delivery("events", token) for token in tokens),
        received_at={Delivery("events", token): 22.0 for token in tokens},
    )


def lost(
    *epochs: Epoch, present: dict[str, set[Delivery]] = ALL_PRESENT
) -> list[tuple[str, int]]:
    return [
        (one.process, row.token) for one, row in missing_rows(ROWS, epochs, present)
    ]


class LateTests(SynchronousTestCase):
    def test_late(self) -> None:
        """A row is late if a greater one of its writer was delivered before it."""
        reader = epoch("sync1")
        for token, writer in ((7, "a"), (9, "a"), (8, "b"), (8, "a"), (7, "a")):
            reader.deliver(Delivery("events", token + (writer == "b")), writer, 9.0)
        self.assertEqual(reader.late, [Delivery("events", 8)])
        self.assertEqual(reader.deliveries[Delivery("events", 7)], 2)


class ReceivedByNoneTests(SynchronousTestCase):
    def test_rows(self) -> None:
        """
        A row counts if no process that had to receive it did; its writer does not have
        to.
        """
        writer = epoch("persister2")
        self.assertEqual(
            received_by_none(ROWS, [writer, epoch("sync1", 7), epoch("sync2")]),
            [ROWS[1]],
        )
        self.assertEqual(received_by_none(ROWS[1:], [writer]), [])
        # A row that a process received too late counts, too.
        reader = epoch("sync1", 7, 8)
        self.assertEqual(received_by_none(ROWS, [reader]), [])
        self.assertEqual(received_by_none(ROWS, [reader], 1.5), [ROWS[0]])
        self.assertEqual(str(ROWS[1]), "events 8 of persister2")


class MissingRowsTests(SynchronousTestCase):
    def test_each_reader_needs_each_row(self) -> None:
        """
        A row that was not delivered to one of two readers is missing at this reader.
        """
        self.assertEqual(lost(epoch("sync1", 7, 8), epoch("sync2", 7)), [("sync2", 8)])

    def test_own_rows(self) -> None:
        """A process does not need its own rows."""
        self.assertEqual(lost(epoch("persister1", 8)), [])

    def test_read_at_the_start(self) -> None:
        """Rows that a process had read from the database at its start are not due."""
        late = epoch("sync1", started=30.0)
        late.positions = {"events": {"persister1": 7, "persister2": 8}}
        self.assertEqual(lost(late), [])

    def test_positions_that_are_too_far(self) -> None:
        """
        A process cannot have read rows at its start that were written later: a position
        that is too far hides nothing.
        """
        early = epoch("sync1", 7)
        early.positions = {"events": {"persister1": 9, "persister2": 9}}
        self.assertEqual(lost(early), [("sync1", 8)])

    def test_committed_before_the_start_and_not_read(self) -> None:
        """
        Rows written before the start, but beyond the positions read then, are due.
        """
        late = epoch("sync1", 7, started=30.0)
        self.assertEqual(lost(late), [("sync1", 8)])

    def test_replaced_rows(self) -> None:
        """
        A row that is no longer in the table cannot be fetched, and is not missing.
        """
        present = {"events": {ROWS[0].delivery}}
        self.assertEqual(lost(epoch("sync1"), present=present), [("sync1", 7)])

    def test_ended_processes(self) -> None:
        """A killed process needs the rows written while it was judged."""
        killed = epoch("sync1")
        killed.is_running = False
        self.assertEqual(lost(killed), [])
        killed.judged_until = 20.5
        self.assertEqual(lost(killed), [("sync1", 7)])

    def test_eras(self) -> None:
        """A token from before the writer's restart is a different row."""
        row = Committed("typing", 3, "writer1", at=20.0, era=1)
        reader = epoch("sync1")
        reader.deliveries[Delivery("typing", 3, 0)] += 1
        self.assertEqual(missing_rows([row], [reader], {}), [(reader, row)])
        reader.deliveries[Delivery("typing", 3, 1)] += 1
        self.assertEqual(missing_rows([row], [reader], {}), [])


class CompareTests(SynchronousTestCase):
    def test_counts(self) -> None:
        """Processes on ours and stock ones are counted separately."""
        found = compare(
            ROWS,
            [
                epoch("sync1", 7, 8),
                epoch("sync2", 7, 7, 8),
                epoch("stock1", 7, is_ours=False),
            ],
            ALL_PRESENT,
            ["events", "caches"],
        )
        self.assertEqual(
            found,
            [
                StreamTally("events", True, 2, 4, 4, lost=0, duplicated=1),
                StreamTally("caches", True, 0, 0, 0, lost=0, duplicated=0),
                StreamTally("events", False, 2, 2, 1, lost=1, duplicated=0),
                StreamTally("caches", False, 0, 0, 0, lost=0, duplicated=0),
            ],
        )

    def test_replaced_rows_are_not_lost(self) -> None:
        """Replaced rows were due and not delivered, but are not lost."""
        (found,) = compare(ROWS, [epoch("sync1", 7)], {"events": set()}, ["events"])
        self.assertEqual((found.due, found.delivered, found.lost), (2, 1, 0))

    def test_starts_of_one_process(self) -> None:
        """A restarted process may be delivered the same rows again."""
        first = epoch("sync1", 7)
        first.is_running = False
        (found,) = compare(ROWS, [first, epoch("sync1", 7, 8)], ALL_PRESENT, ["events"])
        self.assertEqual((found.due, found.lost, found.duplicated), (2, 0, 0))
        # Doubled rows count even if the process is killed later.
        first.deliveries[ROWS[0].delivery] += 1
        (found,) = compare(ROWS, [first, epoch("sync1", 7, 8)], ALL_PRESENT, ["events"])
        self.assertEqual(attrs.evolve(found, duplicated=0).lost, 0)
        self.assertEqual(found.duplicated, 1)
