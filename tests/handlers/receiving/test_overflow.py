"""Tests of coalescing a full queue.

The catch-ups that follow are tested in test_receiver_overflow.py.
"""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.observer import DiscardReason
from synapse_replication.handlers.receiving.items import (
    DroppedRange,
    Item,
    LostRow,
    NewEpoch,
    ReportedPosition,
)
from synapse_replication.handlers.receiving.overflow import coalesce
from synapse_replication.handlers.receiving.queue import Queued
from synapse_replication.handlers.receiving.writer_state import Link
from synapse_replication.testing.doubles import MemoryConnection
from synapse_replication.wire.commands.standard import PositionCommand
from synapse_replication.wire.rdata import InterleavedRun, RdataRun


class CoalesceTests(SynchronousTestCase):
    """Tests for :func:`coalesce`."""

    def setUp(self) -> None:
        self.link = Link(MemoryConnection("memory"))
        self.discards: list[tuple[str, DiscardReason, int]] = []

    def coalesce(self, *items: Item) -> list[Item]:
        """Coalesce items of one link."""
        waiting = [Queued((self.link, item), 1, 100) for item in items]
        coalesced = coalesce(
            waiting,
            False,
            lambda *what: self.discards.append(what),
            lambda _, token: token < 100,
        )
        self.assertLessEqual(max(queued.size for queued in coalesced), 100)
        return [queued.item[1] for queued in coalesced]

    def test_one_range_per_writer(self) -> None:
        """The rows of each writer are discarded, and become one range."""
        coalesced = self.coalesce(
            InterleavedRun("s", ["a", "b", "a", "b"], [1, 1, 2, 2], [b"x"] * 4),
            RdataRun("s", "a", [5, None], [b"x", b"y"]),
            PositionCommand("s", "b", 6, 7),
        )
        self.assertEqual(
            coalesced,
            [
                DroppedRange("a", False, 1, 5, ends_in_batch=True),
                DroppedRange("b", False, 1, 7, 7, ends_in_batch=False),
            ],
        )
        reason = DiscardReason.CATCHING_UP
        self.assertEqual(self.discards, [("a", reason, 4), ("b", reason, 2)])

    def test_far_tokens(self) -> None:
        """Implausible tokens are stored separately from plausible ones."""
        (left,) = self.coalesce(
            RdataRun("s", "a", [5, 100], [b"x", b"y"]), PositionCommand("s", "a", 7, 99)
        )
        assert isinstance(left, DroppedRange)
        self.assertEqual((left.upto, left.implausible_upto), (99, 100))

    def test_rows_before_new_epoch_are_discarded(self) -> None:
        """Rows and reports before a new epoch are discarded."""
        epoch = NewEpoch("a", 3, "e")
        coalesced = self.coalesce(
            RdataRun("s", "a", [9], [b"x"]), ReportedPosition("a", 9), epoch
        )
        self.assertEqual(coalesced, [epoch])
        self.assertEqual(self.discards, [("a", DiscardReason.CATCHING_UP, 1)])

    def test_reported_positions_are_retained(self) -> None:
        """The latest reported position of each writer is retained, after its rows."""
        coalesced = self.coalesce(
            ReportedPosition("a", 4),
            ReportedPosition("b", 3),
            RdataRun("s", "a", [5], [b"x"]),
            ReportedPosition("a", 5),
        )
        self.assertEqual(
            coalesced,
            [
                DroppedRange("a", False, 5, 5, ends_in_batch=False),
                ReportedPosition("a", 5),
                ReportedPosition("b", 3),
            ],
        )

    def test_positions_end_no_batch(self) -> None:
        """Positions do not change whether a range ends within a batch."""
        rows = RdataRun("s", "a", [5, None], [b"x", b"y"])
        (once,) = self.coalesce(rows, PositionCommand("s", "a", 5, 5))
        assert isinstance(once, DroppedRange)
        (twice,) = self.coalesce(once, PositionCommand("s", "a", 5, 5))
        assert isinstance(twice, DroppedRange)
        self.assertEqual([once.ends_in_batch, twice.ends_in_batch], [True, True])
        (none,) = self.coalesce(PositionCommand("s", "a", 5, 5))
        assert isinstance(none, DroppedRange)
        self.assertIsNone(none.ends_in_batch)

    def test_repeated_epochs_are_merged(self) -> None:
        """Repeated reports of an epoch are merged into the latest one."""
        earlier, latest = NewEpoch("a", 3, "e"), NewEpoch("a", 5, "e")
        other = NewEpoch("b", 3, "e")
        coalesced = self.coalesce(
            earlier,
            PositionCommand("s", "a", 3, 3),
            other,
            latest,
            ReportedPosition("a", 6),
        )
        self.assertEqual(coalesced, [latest, other, ReportedPosition("a", 6)])

    def test_unfinished_batch_is_retained(self) -> None:
        """An unfinished batch or a lost row before a new epoch is retained."""
        epoch = NewEpoch("a", 3, "e")
        for row in (RdataRun("s", "a", [None], [b"x"]), LostRow("a")):
            coalesced = self.coalesce(PositionCommand("s", "a", 2, 2), row, epoch)
            left = DroppedRange("a", False, lowest_position=2, ends_in_batch=True)
            self.assertEqual(coalesced, [epoch, left])
