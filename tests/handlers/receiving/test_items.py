"""Tests of the items in a stream's queue."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.receiving.items import DroppedRange, LostRow
from synapse_replication.wire.commands.standard import PositionCommand
from synapse_replication.wire.rdata import RdataRun


def run(*tokens: int | None) -> RdataRun:
    """Make a run of rows, one for each token."""
    return RdataRun("events", "w", list(tokens), [b"[]"] * len(tokens))


def position(token: int) -> PositionCommand:
    """Make a POSITION whose range is empty."""
    return PositionCommand("events", "w", token, token)


class DroppedRangeTests(SynchronousTestCase):
    """The summary of items that were dropped from a queue."""

    def coalesce(
        self, *items: RdataRun | PositionCommand | LostRow | DroppedRange
    ) -> DroppedRange:
        dropped = DroppedRange(
            "w", resettable=True, is_plausible=lambda token: token < 1000
        )
        for item in items:
            if isinstance(item, RdataRun):
                dropped.add_rows(item)
            elif isinstance(item, PositionCommand):
                dropped.add_position(item)
            elif isinstance(item, DroppedRange):
                dropped.add_range(item)
            else:
                dropped.add_lost_row()
        return dropped

    def test_rows(self) -> None:
        """The lowest and highest token and the number of rows are retained."""
        self.assertEqual(
            self.coalesce(run(5, 3), run(None, 9)),
            DroppedRange("w", True, lowest=3, upto=9, rows=4, ends_in_batch=False),
        )

    def test_an_unfinished_batch(self) -> None:
        """A range records whether the dropped rows end within a batch."""
        self.assertEqual(
            self.coalesce(run(5, None)),
            DroppedRange("w", True, lowest=5, upto=5, rows=2, ends_in_batch=True),
        )
        self.assertFalse(self.coalesce(run(5, None), run(6)).ends_in_batch)

    def test_only_the_beginning_of_a_batch(self) -> None:
        """If only rows without a token are dropped, no range is set."""
        self.assertEqual(
            self.coalesce(run(None)),
            DroppedRange("w", True, rows=1, ends_in_batch=True),
        )

    def test_a_lost_row(self) -> None:
        """An undecodable row is recorded, whether or not rows follow."""
        before = DroppedRange("w", True, lowest=5, upto=5, rows=1, ends_in_batch=False)
        before.has_lost_row = True
        self.assertEqual(self.coalesce(run(5), LostRow("w")), before)
        self.assertEqual(self.coalesce(LostRow("w"), run(5)), before)
        self.assertTrue(self.coalesce(before, run(6)).has_lost_row)

    def test_positions(self) -> None:
        """A position extends the range; the lowest position is retained."""
        self.assertEqual(
            self.coalesce(position(4), position(7)),
            DroppedRange("w", True, upto=7, lowest_position=4),
        )

    def test_far_tokens(self) -> None:
        """
        The highest implausible token is stored separately from the plausible ones.
        """
        self.assertEqual(
            self.coalesce(run(5, 3000, 7), run(2000), position(8)),
            DroppedRange(
                "w",
                True,
                lowest=5,
                upto=8,
                lowest_position=8,
                ends_in_batch=False,
                rows=4,
                implausible_upto=3000,
            ),
        )
        far = DroppedRange("w", True, lowest_position=4000, implausible_upto=4000)
        self.assertEqual(self.coalesce(position(4000)), far)
        dropped = self.coalesce(run(5), far, run(2000))
        self.assertEqual((dropped.upto, dropped.implausible_upto), (5, 4000))

    def test_a_reset(self) -> None:
        """A range that contains a reset covers only tokens after the reset."""
        self.assertEqual(
            self.coalesce(run(90), position(2), run(3)),
            DroppedRange(
                "w",
                True,
                lowest=3,
                upto=3,
                lowest_position=2,
                was_reset=True,
                ends_in_batch=False,
                rows=2,
            ),
        )

    def test_a_stream_that_cannot_be_reset(self) -> None:
        """
        A lower position of a stream that is not resettable does not count as a reset.
        """
        dropped = DroppedRange("w", resettable=False)
        dropped.add_rows(run(90))
        dropped.add_position(position(2))
        self.assertEqual((dropped.upto, dropped.was_reset), (90, False))

    def test_coalescing_again(self) -> None:
        """A range that was coalesced earlier is merged at its position in the queue."""
        before = self.coalesce(run(90), position(2), run(3))
        self.assertEqual(
            self.coalesce(run(80), before, run(4)),
            DroppedRange(
                "w",
                True,
                lowest=3,
                upto=4,
                lowest_position=2,
                was_reset=True,
                ends_in_batch=False,
                rows=4,
            ),
        )
        self.assertEqual(
            self.coalesce(self.coalesce(run(5)), run(6)),
            DroppedRange("w", True, lowest=5, upto=6, rows=2, ends_in_batch=False),
        )
