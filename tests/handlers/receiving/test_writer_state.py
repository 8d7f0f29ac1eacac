"""Tests of what is remembered of writers on a connection."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.receiving.writer_state import (
    MAX_CLAIMS,
    CatchUpState,
    DroppedRange,
    Link,
    LostRow,
    WriterState,
)
from synapse_replication.testing.doubles import MemoryConnection
from synapse_replication.wire.commands.standard import PositionCommand
from synapse_replication.wire.rdata import RdataRun


def run(*tokens: int | None) -> RdataRun:
    """Make a run of rows."""
    return RdataRun("events", "w", list(tokens), [b"[]"] * len(tokens))


def position(token: int) -> PositionCommand:
    """Make a first announcement."""
    return PositionCommand("events", "w", token, token)


class LinkTests(SynchronousTestCase):
    """The life of a connection."""

    def test_losing_it_ends_catch_ups(self) -> None:
        """Writers that catch up are forgotten, with their retries; others stay."""
        clock = Clock()
        link = Link(MemoryConnection())
        retry = clock.callLater(1, self.fail)
        link.writers["events", "a"] = WriterState()
        link.writers["events", "b"] = WriterState(
            catch_up=CatchUpState(0, 1, retry=retry)
        )
        link.writers["events", "c"] = WriterState(catch_up=CatchUpState(0, 1))
        link.lose()
        self.assertTrue(link.is_lost)
        self.assertEqual(list(link.writers), [("events", "a")])
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_a_retry_that_was_made_is_not_cancelled(self) -> None:
        """Cancelling is safe after the retry."""
        clock = Clock()
        catch_up = CatchUpState(0, 1, retry=clock.callLater(0, lambda: None))
        clock.advance(0)
        catch_up.cancel_retry()
        self.assertIsNone(catch_up.retry)


class WriterStateTests(SynchronousTestCase):
    """Whether rows are delivered as they come."""

    def test_is_live(self) -> None:
        """A writer is live when it neither catches up nor is amid a batch."""
        self.assertTrue(WriterState().is_live)
        self.assertFalse(WriterState(pending=[b"[]"]).is_live)
        self.assertFalse(WriterState(has_lost_rows=True).is_live)
        self.assertFalse(WriterState(catch_up=CatchUpState(0, 1)).is_live)


class CatchUpRunTests(SynchronousTestCase):
    def test_claims(self) -> None:
        """What remains of a target that is refuted is the greatest claim below."""
        run = CatchUpState(5, 2**62)
        for token in (8, 7, 8, 9):
            run.want(token)
        self.assertEqual(run.target, 2**62)
        run.refute(8)
        self.assertEqual((run.target, run.is_refuted), (8, False))
        run.refute(6)
        self.assertEqual((run.target, run.is_refuted), (5, True))
        run.want(6)
        self.assertEqual((run.target, run.is_refuted), (6, False))

    def test_too_many_claims(self) -> None:
        """Beyond a bound the least are forgotten, and no refutation loses rows."""
        run = CatchUpState(0, 1)
        for token in range(1000, 1000 + 2 * MAX_CLAIMS):
            run.want(token)
        self.assertEqual(len(run.claims), MAX_CLAIMS)
        run.refute(500)
        self.assertEqual((run.target, run.is_refuted), (500, False))


class CollapsedTests(SynchronousTestCase):
    """What is left of items that found no room."""

    def coalesce(
        self, *items: RdataRun | PositionCommand | LostRow | DroppedRange
    ) -> DroppedRange:
        collapsed = DroppedRange("w", resettable=True)
        for item in items:
            collapsed.add(item)
        return collapsed

    def test_rows(self) -> None:
        """The lowest and highest token of rows are kept, and their number."""
        self.assertEqual(
            self.coalesce(run(5, 3), run(None, 9)),
            DroppedRange("w", True, lowest=3, upto=9, rows=4, ends_in_batch=False),
        )

    def test_an_unfinished_batch(self) -> None:
        """Rows of a batch that is not finished are remembered as such."""
        self.assertEqual(
            self.coalesce(run(5, None)),
            DroppedRange("w", True, lowest=5, upto=5, rows=2, ends_in_batch=True),
        )
        self.assertFalse(self.coalesce(run(5, None), run(6)).ends_in_batch)

    def test_only_the_beginning_of_a_batch(self) -> None:
        """Rows without a token reach nothing."""
        self.assertEqual(
            self.coalesce(run(None)),
            DroppedRange("w", True, rows=1, ends_in_batch=True),
        )

    def test_a_lost_row(self) -> None:
        """A row that could not be read makes the next token be fetched."""
        self.assertTrue(self.coalesce(run(5), LostRow("w")).ends_in_batch)

    def test_positions(self) -> None:
        """A position is reached like a token; the lowest is kept."""
        self.assertEqual(
            self.coalesce(position(4), position(7)),
            DroppedRange("w", True, upto=7, lowest_position=4),
        )

    def test_a_reset(self) -> None:
        """After a stream began again only what follows counts."""
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
        """A lower position of any other stream changes nothing."""
        collapsed = DroppedRange("w", resettable=False)
        collapsed.add(run(90))
        collapsed.add(position(2))
        self.assertEqual((collapsed.upto, collapsed.was_reset), (90, False))

    def test_collapsing_again(self) -> None:
        """What was collapsed before is taken in, in its place."""
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
