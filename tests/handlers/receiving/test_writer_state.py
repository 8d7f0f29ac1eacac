"""Tests of the state of links and their writers."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.receiving.writer_state import (
    MAX_CLAIMS,
    CatchUpState,
    Link,
    LinkedWriter,
)
from synapse_replication.testing.doubles import MemoryConnection


def writer(name: str = "w", catch_up: CatchUpState | None = None) -> LinkedWriter:
    """Make a writer on its own link."""
    made = Link(MemoryConnection()).writer("events", name)
    made.catch_up = catch_up
    return made


class LinkTests(SynchronousTestCase):
    """The lifetime of a link."""

    def test_lost_link_ends_catch_ups(self) -> None:
        """
        A lost link forgets writers that are catching up, and cancels their retries.
        """
        clock = Clock()
        link = Link(MemoryConnection())
        retry = clock.callLater(1, self.fail)
        link.writer("events", "a")
        link.writer("events", "b").catch_up = CatchUpState(0, 1, retry=retry)
        link.writer("events", "c").catch_up = CatchUpState(0, 1)
        link.mark_lost()
        self.assertTrue(link.is_lost)
        self.assertEqual(list(link.writers), [("events", "a")])
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_cancelling_a_retry_that_ran(self) -> None:
        """Cancelling a retry that already ran is harmless."""
        clock = Clock()
        catch_up = CatchUpState(0, 1, retry=clock.callLater(0, lambda: None))
        clock.advance(0)
        catch_up.cancel_retry()
        self.assertIsNone(catch_up.retry)


class LinkedWriterTests(SynchronousTestCase):
    """Tests for whether rows are delivered as they arrive."""

    def test_is_live(self) -> None:
        """A writer is live unless it is catching up or within a batch."""
        self.assertTrue(writer().is_live)
        amid_a_batch = writer()
        amid_a_batch.gather([None], [b"[]"])
        self.assertFalse(amid_a_batch.is_live)
        self.assertEqual(amid_a_batch.drop_pending(), 1)
        self.assertEqual(amid_a_batch.pending, [])
        self.assertFalse(amid_a_batch.is_live)
        self.assertFalse(writer(catch_up=CatchUpState(0, 1)).is_live)

    def test_nothing_to_drop(self) -> None:
        """Without an unfinished batch, nothing is dropped and the writer stays live."""
        live = writer()
        self.assertEqual(live.drop_pending(), 0)
        self.assertTrue(live.is_live)

    def test_rows_that_were_dropped(self) -> None:
        """Rows count as lost if the dropped rows end within a batch."""
        for is_pending, ends_in_batch, has_lost_rows in (
            (False, None, False),
            (True, None, True),
            (False, False, False),
            (True, False, False),
            (False, True, True),
            (True, True, True),
        ):
            dropped = writer()
            dropped.pending = [b"[]"] * is_pending
            dropped.mark_rows_lost(ends_in_batch)
            case = is_pending, ends_in_batch
            self.assertEqual(dropped.has_lost_rows, has_lost_rows, case)
            self.assertEqual(dropped.pending, [], case)
            dropped.has_lost_rows = True
            dropped.mark_rows_lost(ends_in_batch)
            self.assertTrue(dropped.has_lost_rows, case)

    def test_one_writer_per_name(self) -> None:
        """A link has one writer for each stream and name, until it is forgotten."""
        link = Link(MemoryConnection())
        first = link.writer("events", "w")
        self.assertIs(link.writer("events", "w"), first)
        self.assertIsNot(link.writer("receipts", "w"), first)
        first.forget()
        first.forget()
        self.assertEqual(list(link.writers), [("receipts", "w")])

    def test_forgetting_a_silent_writer(self) -> None:
        """A link does not forget a writer that is catching up."""
        link = Link(MemoryConnection())
        link.writer("events", "a").catch_up = CatchUpState(0, 1)
        link.writer("events", "b")
        for name in ("a", "b", "c"):
            link.forget_writer("events", name)
        self.assertEqual(list(link.writers), [("events", "a")])


class CatchUpStateTests(SynchronousTestCase):
    def test_claims(self) -> None:
        """If the target is refuted, the highest claim below replaces it."""
        run = CatchUpState(5, 2**62)
        for token in (8, 7, 8, 9):
            run.add_claim(token)
        self.assertEqual(run.target, 2**62)
        run.refute(8)
        self.assertEqual((run.target, run.is_refuted), (8, False))
        run.refute(6)
        self.assertEqual((run.target, run.is_refuted), (5, True))
        run.add_claim(6)
        self.assertEqual((run.target, run.is_refuted), (6, False))

    def test_too_many_claims(self) -> None:
        """Beyond the limit, the lowest claims are dropped, and no claim replaces a
        refuted target.

        The target is then the cursor and not the sequence's last token, because the
        rows up to that token may not all be committed.
        """
        run = CatchUpState(0, 1)
        for token in range(1000, 1000 + 2 * MAX_CLAIMS):
            run.add_claim(token)
        self.assertEqual(len(run.claims), MAX_CLAIMS)
        self.assertTrue(run.is_incomplete)
        run.refute(500)
        self.assertEqual((run.target, run.is_refuted), (0, True))
