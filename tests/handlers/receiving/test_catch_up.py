"""Tests of catch-ups through the command handler."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import CatchUpError
from synapse_replication.handlers.events import CatchUpEvent, DiscardReason
from synapse_replication.streams.stream import EncodedUpdates, StreamUpdateResult
from tests.handlers.fixtures import receiving


class PageTests(SynchronousTestCase):
    """Pages of fetched rows."""

    def test_pages_to_the_end(self) -> None:
        """A long range is fetched in pages; each row is delivered once and in order."""
        fixture = receiving(page_rows=2)
        for n in range(1, 8):
            fixture.stream.persist("w", n, [str(n)])
        fixture.receive("POSITION events w 7 7")
        self.assertEqual(fixture.host.rows.tokens("w"), list(range(1, 8)))
        self.assertEqual(fixture.host.observer.pages, [(2, 2), (2, 4), (2, 6), (1, 7)])
        self.assertEqual(
            fixture.host.observer.catch_ups,
            [CatchUpEvent("events", "w", start, 7) for start in (0, 2, 4, 6)],
        )

    def test_source_that_answers_at_once(self) -> None:
        """A source need not wait for anything before it returns a page."""
        fixture = receiving()
        fixture.stream.persist("w", 5, ["a"])
        fixture.receive("POSITION events w 5 5")
        self.assertEqual(fixture.texts(), [("w", 5, ["a"])])
        idle = Deferred.fromCoroutine(fixture.handler.wait_until_idle())
        self.successResultOf(idle)

    def test_waits_are_independent(self) -> None:
        """A wait until nothing is being fetched does not end when another one does."""
        fixture = receiving()
        fixture.stream.is_held = True
        fixture.stream.persist("w", 3, ["a"])
        fixture.receive("POSITION events w 3 3")
        first, second = (
            Deferred.fromCoroutine(fixture.handler.wait_until_idle()) for _ in range(2)
        )
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertNoResult(second)
        fixture.stream.answer()
        self.successResultOf(second)
        self.assertEqual(fixture.texts(), [("w", 3, ["a"])])

    def test_rows_of_a_token_stay_together(self) -> None:
        """The rows of one token are delivered together, even across a page boundary."""
        fixture = receiving(page_rows=2)
        fixture.stream.persist("w", 1, ["a"])
        fixture.stream.persist("w", 2, ["b"], ["c"], ["d"])
        fixture.receive("POSITION events w 2 2")
        self.assertEqual(fixture.texts(), [("w", 1, ["a"]), ("w", 2, ["b", "c", "d"])])

    def test_rows_beyond_the_range_are_skipped(self) -> None:
        """Rows that a source returns beyond the requested range are skipped."""
        fixture = receiving()
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 5 5")
        fixture.stream.answer_with(
            StreamUpdateResult([(4, ["a"]), (6, ["c"])], 6, False)
        )
        self.assertEqual(fixture.texts(), [("w", 4, ["a"])])
        self.assertEqual(fixture.stream.current_token("w"), 5)

    def test_sink_accepts_position_slowly(self) -> None:
        """
        Until the sink has accepted the position, rows wait, and the writer is not live.
        """
        fixture = receiving()
        fixture.host.rows.is_held = True
        fixture.receive("POSITION events w 5 5")
        fixture.host.rows.is_held = False
        fixture.receive('RDATA events w 6 ["a"]')
        self.assertEqual((fixture.texts(), fixture.host.observer.connected), ([], []))
        fixture.host.rows.release()
        self.assertEqual(fixture.texts(), [("w", 6, ["a"])])
        self.assertEqual(fixture.stream.current_token("w"), 6)

    def test_host_is_ahead_of_the_target(self) -> None:
        """
        A catch-up does not decrease a position that the host advanced in the meantime.
        """
        fixture = receiving()
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 5 5")
        fixture.stream.advance("w", 7)
        fixture.stream.answer()
        self.assertEqual(fixture.host.rows.positions, [])
        self.assertEqual(fixture.stream.current_token("w"), 7)

    def test_token_above_last_in_memory(self) -> None:
        """A stream held in memory advances only to the token that its writer has."""
        fixture = receiving(resettable=True, held_in_memory=True)
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 6 6")
        fixture.stream.answer_with(StreamUpdateResult([], 6, False, last_token=5))
        self.assertEqual(fixture.stream.current_token("w"), 5)

    def test_encoded_rows(self) -> None:
        """Rows that the source returns as text are decoded and grouped by token."""
        fixture = receiving()
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 5 5")
        updates = EncodedUpdates([(4, '["a"]'), (4, '["b"]'), (5, '["c", 1]')])
        fixture.stream.answer_with(StreamUpdateResult(updates, 5, False))
        self.assertEqual(fixture.texts(), [("w", 4, ["a", "b"]), ("w", 5, ["c"])])

    def test_undecodable_encoded_row(self) -> None:
        """If the text of a row cannot be decoded, only that row is skipped."""
        fixture = receiving()
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 5 5")
        updates = EncodedUpdates([(4, '["a"]'), (4, "[7]"), (5, "["), (5, '["b"]')])
        fixture.stream.answer_with(StreamUpdateResult(updates, 5, False))
        self.assertEqual(fixture.texts(), [("w", 4, ["a"]), ("w", 5, ["b"])])
        self.assertEqual(
            fixture.host.observer.discards["events", "w", DiscardReason.SKIPPED], 2
        )

    def test_rows_received_during_fetch(self) -> None:
        """Rows that arrive during a fetch are delivered after it, and only once."""
        fixture = receiving()
        fixture.stream.is_held = True
        fixture.stream.persist("w", 1, ["a"])
        fixture.receive("POSITION events w 1 1")
        fixture.receive('RDATA events w 2 ["b"]')
        self.assertEqual(fixture.texts(), [])
        fixture.stream.answer()
        self.assertEqual(fixture.texts(), [("w", 1, ["a"]), ("w", 2, ["b"])])
        self.assertEqual(fixture.stream.requests, [("w", 0, 1)])

    def test_new_rows_during_a_long_catch_up(self) -> None:
        """A reader that is far behind reaches the end while new rows arrive."""
        fixture = receiving(page_rows=10)
        for n in range(1, 101):
            fixture.stream.persist("w", n, [str(n)])
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 100 100")
        new = 100
        while fixture.stream.waiting:
            if new < 120:
                new += 1
                fixture.stream.persist("w", new, [str(new)])
                fixture.receive(f'RDATA events w {new} ["{new}"]')
            fixture.stream.answer()
        self.assertEqual(fixture.host.rows.tokens("w"), list(range(1, new + 1)))
        fixture.receive(f'RDATA events w {new + 1} ["live"]')
        self.assertEqual(fixture.texts()[-1], ("w", new + 1, ["live"]))

    def test_rows_of_other_writers(self) -> None:
        """While a page is fetched, rows of other writers are delivered."""
        fixture = receiving(page_rows=1)
        fixture.receive("POSITION events b 0 0")
        fixture.stream.is_held = True
        fixture.stream.persist("a", 1, ["1"])
        fixture.stream.persist("a", 2, ["2"])
        fixture.receive("POSITION events a 2 2")
        fixture.receive('RDATA events b 5 ["b"]')
        self.assertEqual(fixture.texts(), [("b", 5, ["b"])])
        fixture.stream.answer()
        self.assertEqual(fixture.host.rows.tokens("a"), [1])
        fixture.stream.answer()
        self.assertEqual(fixture.host.rows.tokens("a"), [1, 2])

    def test_next_page_is_prefetched(self) -> None:
        """While the sink handles a page, exactly one further page is fetched."""
        fixture = receiving(page_rows=1)
        for n in range(1, 4):
            fixture.stream.persist("w", n, [str(n)])
        fixture.host.rows.is_held = True
        fixture.receive("POSITION events w 3 3")
        self.assertEqual(fixture.stream.requests, [("w", 0, 3), ("w", 1, 3)])
        fixture.host.rows.is_held = False
        fixture.host.rows.release()
        self.assertEqual(fixture.host.rows.tokens("w"), [1, 2, 3])
        self.assertEqual(
            fixture.stream.requests, [("w", 0, 3), ("w", 1, 3), ("w", 2, 3)]
        )

    def test_prefetch_fails(self) -> None:
        """
        The failure of a prefetched page is reported when the page is due, and the fetch
        is then retried.
        """
        fixture = receiving(page_rows=1)
        fixture.stream.persist("w", 1, ["1"])
        fixture.stream.persist("w", 2, ["2"])
        fixture.stream.is_held = True
        fixture.host.rows.is_held = True
        fixture.receive("POSITION events w 2 2")
        fixture.stream.answer()
        fixture.stream.fail(CatchUpError("down"))
        self.assertEqual(fixture.host.observer.catch_up_failures, [])
        fixture.stream.is_held = fixture.host.rows.is_held = False
        fixture.host.rows.release()
        self.assertEqual(len(fixture.host.observer.catch_up_failures), 1)
        self.assertEqual(fixture.host.rows.tokens("w"), [1])
        fixture.host.reactor.advance(1)
        self.assertEqual(fixture.host.rows.tokens("w"), [1, 2])

    def test_prefetched_page_after_failed_page(self) -> None:
        """If the sink fails in a page, the prefetched page is not delivered."""
        fixture = receiving(page_rows=2)
        for n in range(1, 5):
            fixture.stream.persist("w", n, [str(n)])
        fixture.host.rows.failures = [None, ValueError("no")]
        fixture.receive("POSITION events w 4 4")
        self.assertEqual(fixture.host.rows.tokens("w"), [1])
        fixture.host.reactor.advance(1)
        self.assertEqual(fixture.host.rows.tokens("w"), [1, 2, 3, 4])

    def test_late_rows_prevent_prefetch(self) -> None:
        """
        Pages are not prefetched if rows may be committed late (an idempotent stream).
        """
        fixture = receiving(page_rows=1, idempotent=True)
        for n in range(1, 4):
            fixture.stream.persist("w", n, [str(n)])
        fixture.host.rows.is_held = True
        fixture.receive("POSITION events w 3 3")
        self.assertEqual(fixture.stream.requests, [("w", 0, 3)])

    def test_undecodable_row_is_skipped(self) -> None:
        """A row that cannot be decoded even when fetched is counted and skipped."""
        fixture = receiving()
        fixture.stream.persist("w", 1, ["a"], [7], ["b"])
        fixture.stream.persist("w", 2, [8])
        fixture.receive("POSITION events w 2 2")
        self.assertEqual(fixture.texts(), [("w", 1, ["a", "b"])])
        self.assertEqual(fixture.stream.current_token("w"), 2)
        self.assertEqual(
            fixture.host.observer.discards["events", "w", DiscardReason.SKIPPED], 2
        )
        self.assertEqual(len(fixture.host.observer.failures), 2)


class FailureTests(SynchronousTestCase):
    """Sources and sinks that fail."""

    def test_retried_with_back_off(self) -> None:
        """A source that fails is retried with exponential back-off up to a limit."""
        fixture = receiving()
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 5 5")
        for expected in (1, 2, 4, 8, 8):
            fixture.stream.fail(CatchUpError("down"))
            fixture.host.reactor.advance(expected - 0.01)
            self.assertEqual(fixture.stream.waiting, 0)
            fixture.host.reactor.advance(0.01)
            self.assertEqual(fixture.stream.waiting, 1)
        self.assertEqual(fixture.host.observer.connected, [])
        self.assertEqual(
            [retry_in for *_, retry_in in fixture.host.observer.catch_up_failures],
            [1, 2, 4, 8, 8],
        )

    def test_malformed_page(self) -> None:
        """A source that returns no valid page is retried like one that fails."""
        fixture = receiving()
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 5 5")
        no_token: Any = None
        fixture.stream.answer_with(StreamUpdateResult([], no_token, False))
        self.assertEqual(len(fixture.host.observer.catch_up_failures), 1)
        fixture.host.reactor.advance(1)
        self.assertEqual(fixture.stream.waiting, 1)

    def test_failure_does_not_make_writer_live(self) -> None:
        """Rows that arrive after a failed catch-up wait for its successful retry."""
        fixture = receiving()
        fixture.stream.persist("w", 4, ["a"])
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 5 5")
        fixture.stream.fail(CatchUpError("down"))
        fixture.stream.persist("w", 6, ["b"])
        fixture.receive('RDATA events w 6 ["b"]')
        self.assertEqual(fixture.texts(), [])
        fixture.stream.is_held = False
        fixture.host.reactor.advance(1)
        self.assertEqual(fixture.texts(), [("w", 4, ["a"]), ("w", 6, ["b"])])
        self.assertEqual(fixture.stream.requests[-1], ("w", 0, 6))

    def test_other_writers_do_not_wait(self) -> None:
        """While one writer's catch-up fails, rows of other writers are delivered."""
        fixture = receiving()
        fixture.receive("POSITION events b 0 0")
        fixture.stream.is_held = True
        fixture.receive("POSITION events a 5 5")
        fixture.stream.fail(CatchUpError("down"))
        fixture.receive('RDATA events b 1 ["b"]')
        self.assertEqual(fixture.texts(), [("b", 1, ["b"])])

    def test_newer_position_triggers_retry(self) -> None:
        """A newer POSITION of the writer triggers the retry immediately."""
        fixture = receiving()
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 5 5")
        fixture.stream.fail(CatchUpError("down"))
        fixture.receive("POSITION events w 5 7")
        self.assertEqual(fixture.stream.requests, [("w", 0, 5), ("w", 0, 7)])
        fixture.stream.answer()
        fixture.host.reactor.advance(60)
        self.assertEqual(len(fixture.stream.requests), 2)

    def test_ends_with_the_connection(self) -> None:
        """When the connection is lost, its catch-up is not retried."""
        fixture = receiving()
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 5 5")
        fixture.stream.fail(CatchUpError("down"))
        fixture.handler.lost_connection(fixture.connection)
        fixture.host.reactor.advance(60)
        self.assertEqual(len(fixture.stream.requests), 1)
        self.assertEqual(fixture.host.reactor.getDelayedCalls(), [])

    def test_fails_after_the_connection(self) -> None:
        """A catch-up that fails after its connection was lost is not retried."""
        fixture = receiving()
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 5 5")
        fixture.handler.lost_connection(fixture.connection)
        fixture.stream.fail(CatchUpError("down"))
        self.assertEqual(fixture.host.reactor.getDelayedCalls(), [])

    def test_stops_between_pages_when_the_connection_is_lost(self) -> None:
        """When the connection is lost, its catch-up requests no further page."""
        fixture = receiving(page_rows=1)
        fixture.stream.persist("w", 1, ["a"])
        fixture.stream.persist("w", 2, ["b"])
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 2 2", 'RDATA events w 3 ["c"]')
        fixture.handler.lost_connection(fixture.connection)
        fixture.stream.answer()
        self.assertEqual(fixture.stream.waiting, 0)
        self.assertEqual(fixture.host.rows.tokens("w"), [1])

    def test_source_without_progress(self) -> None:
        """A source that makes no progress is retried later, not in a tight loop."""
        fixture = receiving()
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 5 5")
        fixture.stream.answer_with(StreamUpdateResult([], 0, True))
        self.assertEqual(fixture.stream.waiting, 0)
        self.assertEqual(len(fixture.host.observer.catch_up_failures), 1)

    def test_failed_rows_are_redelivered(self) -> None:
        """Rows are fetched again from the first one that the sink rejected."""
        fixture = receiving()
        fixture.receive("POSITION events w 0 0")
        for n in (1, 2, 3):
            fixture.stream.persist("w", n, [str(n)])
        fixture.host.rows.failures = [None, RuntimeError("disk full")]
        fixture.receive(*(f'RDATA events w {n} ["{n}"]' for n in (1, 2, 3)))
        self.assertEqual(fixture.host.rows.tokens("w"), [1])
        self.assertEqual(
            fixture.host.observer.discards["events", "w", DiscardReason.HANDLER_FAILED],
            2,
        )
        fixture.host.reactor.advance(1)
        self.assertEqual(fixture.stream.requests, [("w", 1, 3)])
        self.assertEqual(fixture.host.rows.tokens("w"), [1, 2, 3])

    def test_sink_fails_during_catch_up(self) -> None:
        """A catch-up in which the sink failed resumes after the last row delivered."""
        fixture = receiving()
        for n in (1, 2, 3):
            fixture.stream.persist("w", n, [str(n)])
        fixture.host.rows.failures = [None, RuntimeError("disk full")]
        fixture.receive("POSITION events w 3 3")
        fixture.host.reactor.advance(1)
        self.assertEqual(fixture.stream.requests, [("w", 0, 3), ("w", 1, 3)])
        self.assertEqual(fixture.host.rows.tokens("w"), [1, 2, 3])

    def test_rejected_position_is_retried(self) -> None:
        """A position that the sink rejected is offered again."""
        fixture = receiving()
        fixture.host.rows.failures = [RuntimeError("disk full")]
        fixture.receive("POSITION events w 0 3")
        self.assertEqual(fixture.host.observer.connected, [])
        fixture.host.reactor.advance(1)
        self.assertEqual(fixture.host.rows.positions, [("events", "w", 3)])
        self.assertEqual(fixture.stream.requests, [])

    def test_sink_fails_with_late_row(self) -> None:
        """A late row that the sink rejected during a catch-up is fetched."""
        fixture = receiving(idempotent=True)
        fixture.receive("POSITION events w 0 9")
        fixture.stream.persist("w", 5, ["late"])
        fixture.stream.persist("w", 12, ["new"])
        fixture.stream.is_held = True
        fixture.receive("POSITION events w 12 12")
        fixture.stream.fail(CatchUpError("down"))
        fixture.host.rows.failures = [RuntimeError("disk full")]
        fixture.receive('RDATA events w 5 ["late"]')
        fixture.stream.is_held = False
        fixture.host.reactor.advance(2)
        self.assertEqual(fixture.texts(), [("w", 5, ["late"]), ("w", 12, ["new"])])
        self.assertEqual(len(fixture.host.observer.catch_up_failures), 2)
