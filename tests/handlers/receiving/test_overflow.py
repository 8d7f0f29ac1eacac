"""Tests of what is kept of a full queue; see test_receiver_overflow.py for what comes of it."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.observer import DiscardReason
from synapse_replication.handlers.receiving.overflow import Item, collapse
from synapse_replication.handlers.receiving.queue import Queued
from synapse_replication.handlers.receiving.writer_state import (
    Collapsed,
    Link,
    NewEpoch,
    Told,
)
from synapse_replication.testing.doubles import MemoryConnection
from synapse_replication.wire.commands.standard import PositionCommand
from synapse_replication.wire.rdata import InterleavedRun, RdataRun


class CollapseTests(SynchronousTestCase):
    """``collapse``"""

    def setUp(self) -> None:
        self.link = Link(MemoryConnection("memory"))
        self.discards: list[tuple[str, DiscardReason, int]] = []

    def collapse(self, *items: Item) -> list[Item]:
        """Collapse items of one link."""
        waiting = [Queued((self.link, item), 1, 100) for item in items]
        kept = collapse(waiting, False, lambda *what: self.discards.append(what))
        self.assertLessEqual(max(queued.size for queued in kept), 100)
        return [queued.item[1] for queued in kept]

    def test_one_is_left_of_each_writer(self) -> None:
        """C57: rows are forgotten, and how far they reach is kept, writer by writer."""
        kept = self.collapse(
            InterleavedRun("s", ["a", "b", "a", "b"], [1, 1, 2, 2], [b"x"] * 4),
            RdataRun("s", "a", [5, None], [b"x", b"y"]),
            PositionCommand("s", "b", 6, 7),
        )
        self.assertEqual(
            kept,
            [
                Collapsed("a", False, 1, 5, ends_in_batch=True),
                Collapsed("b", False, 1, 7, 7, ends_in_batch=False),
            ],
        )
        reason = DiscardReason.CATCHING_UP
        self.assertEqual(self.discards, [("a", reason, 4), ("b", reason, 2)])

    def test_what_a_new_epoch_makes_useless(self) -> None:
        """Of an earlier epoch no rows are fetched, nor does it count what it told."""
        epoch = NewEpoch("a", 3, "e")
        kept = self.collapse(RdataRun("s", "a", [9], [b"x"]), Told("a", 9), epoch)
        self.assertEqual(kept, [epoch])
        self.assertEqual(self.discards, [("a", DiscardReason.CATCHING_UP, 1)])

    def test_what_was_told(self) -> None:
        """The latest that each writer told is kept, behind its rows."""
        kept = self.collapse(
            Told("a", 4), Told("b", 3), RdataRun("s", "a", [5], [b"x"]), Told("a", 5)
        )
        self.assertEqual(
            kept,
            [
                Collapsed("a", False, 5, 5, ends_in_batch=False),
                Told("a", 5),
                Told("b", 3),
            ],
        )

    def test_positions_end_no_batch(self) -> None:
        """Whether a batch goes on is what the last rows say, collapsed before or not."""
        rows = RdataRun("s", "a", [5, None], [b"x", b"y"])
        (once,) = self.collapse(rows, PositionCommand("s", "a", 5, 5))
        assert isinstance(once, Collapsed)
        (twice,) = self.collapse(once, PositionCommand("s", "a", 5, 5))
        assert isinstance(twice, Collapsed)
        self.assertEqual([once.ends_in_batch, twice.ends_in_batch], [True, True])
        (none,) = self.collapse(PositionCommand("s", "a", 5, 5))
        assert isinstance(none, Collapsed)
        self.assertIsNone(none.ends_in_batch)

    def test_epochs_that_are_told_again(self) -> None:
        """However often a writer tells its epoch meanwhile, one word of it is kept."""
        earlier, latest = NewEpoch("a", 3, "e"), NewEpoch("a", 5, "e")
        other = NewEpoch("b", 3, "e")
        kept = self.collapse(
            earlier, PositionCommand("s", "a", 3, 3), other, latest, Told("a", 6)
        )
        self.assertEqual(kept, [latest, other, Told("a", 6)])

    def test_batch_that_may_go_on(self) -> None:
        """C7: that rows before an epoch are of a batch is kept, and where they began."""
        epoch = NewEpoch("a", 3, "e")
        kept = self.collapse(
            PositionCommand("s", "a", 2, 2), RdataRun("s", "a", [None], [b"x"]), epoch
        )
        left = Collapsed("a", False, lowest_position=2, ends_in_batch=True)
        self.assertEqual(kept, [epoch, left])
