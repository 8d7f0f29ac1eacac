"""Tests of false positions at a reader."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.events import DiscardReason
from synapse_replication.handlers.receiving.context import ReceiverOptions
from tests.handlers.fixtures import Receiving, receiving
from tests.handlers.receiving.live_reader import FAR, live, tokens


class FarTests(SynchronousTestCase):
    """Positions beyond what is plausible are checked against the source."""

    def assert_refuted(self, process: Receiving) -> None:
        self.assertEqual(process.stream.current_token("w"), 5)
        observer = process.host.observer
        self.assertEqual(observer.discards["events", "w", DiscardReason.IMPLAUSIBLE], 1)
        self.assertEqual(observer.refuted, [("events", "w", FAR, 5)])
        process.stream.last_token = 6
        process.receive('RDATA events w 6 ["six"]')
        self.assertEqual(tokens(process), [5, 6])

    def test_plain(self) -> None:
        """An implausible POSITION without a range has no effect."""
        process = live()
        process.receive(f"POSITION events w {FAR} {FAR}")
        self.assert_refuted(process)

    def test_range(self) -> None:
        """A POSITION's empty range is believed only if its token is plausible."""
        process = live()
        process.receive(f"POSITION events w 0 {FAR}")
        self.assert_refuted(process)

    def test_row(self) -> None:
        """If no row exists at an implausible row's token, none is delivered."""
        process = live()
        process.receive(f'RDATA events w {FAR} ["false"]')
        self.assert_refuted(process)

    def test_false_row_among_valid_rows(self) -> None:
        """Valid rows that arrive together with a false row are delivered."""
        process = live()
        process.stream.persist("w", 6, ["six"])
        process.stream.last_token = 6
        process.receive(
            'RDATA events w 6 ["six"]',
            f'RDATA events w {FAR} ["false"]',
            'RDATA events v 7 ["other"]',
        )
        self.assertEqual(tokens(process), [5, 6])
        self.assertEqual(process.stream.current_token("w"), 6)

    def test_row_in_a_batch(self) -> None:
        """A batch that a false row appeared to end is later delivered completely."""
        process = live()
        process.receive('RDATA events w batch ["a"]', f'RDATA events w {FAR} ["false"]')
        process.stream.persist("w", 6, ["a"], ["b"])
        process.stream.last_token = 6
        process.receive('RDATA events w 6 ["b"]')
        self.assertEqual(process.texts()[1:], [("w", 6, ["a", "b"])])

    def test_heartbeat(self) -> None:
        """An implausible position in a heartbeat has no effect."""
        process = live()
        process.handler.writer_reported(process.connection, "w", {"events": FAR})
        self.assert_refuted(process)

    def test_true_positions_remain(self) -> None:
        """True positions announced while the source is queried are still reached."""
        process = live()
        process.stream.is_held = True
        process.receive(f"POSITION events w {FAR} {FAR}", "POSITION events w 9 9")
        process.stream.persist("w", 8, ["eight"])
        process.stream.last_token = 12
        process.receive('RDATA events w 8 ["eight"]')
        process.stream.is_held = False
        process.stream.answer()
        self.assertEqual(tokens(process), [5, 8])
        self.assertEqual(process.stream.current_token("w"), 9)

    def test_false_first_position(self) -> None:
        """A false first position does not make the writer live; a true one does."""
        process = receiving()
        process.stream.persist("w", 3, ["three"])
        process.stream.last_token = 3
        process.receive(f"POSITION events w {FAR} {FAR}")
        # The position before this row is not known.
        process.receive('RDATA events w 3 ["three"]')
        self.assertEqual(tokens(process), [])
        process.receive("POSITION events w 3 3")
        self.assertEqual(tokens(process), [3])

    def test_in_a_full_queue(self) -> None:
        """Rows dropped before a false position are fetched despite it."""
        process = receiving(receiver=ReceiverOptions(max_queue_size=600))
        process.receive("POSITION events w 0 0")
        process.host.rows.is_held = True
        for token in (1, 2, 3, 4):
            text = "x" * 300
            process.stream.persist("w", token, [text])
            process.receive(f'RDATA events w {token} ["{text}"]')
        process.stream.last_token = 4
        process.receive(f"POSITION events w {FAR} {FAR}")
        process.host.rows.is_held = False
        process.host.rows.release()
        process.host.reactor.pump([0.1] * 20)
        self.assertEqual(tokens(process), [1, 2, 3, 4])
        self.assertEqual(process.stream.current_token("w"), 4)

    def test_true_far_position(self) -> None:
        """A long jump that is true costs one query."""
        process = live(500_000)
        process.receive("POSITION events w 5 500000")
        self.assertEqual(process.stream.requests[1:], [("w", 5, 500_000)])
        self.assertEqual(process.stream.current_token("w"), 500_000)


class FloodTests(SynchronousTestCase):
    """Many positions that each require a query."""

    def test_gaps(self) -> None:
        """
        A few positions are queried immediately, the others together a moment later.
        """
        process = live(10_000)
        process.stream.persist("w", 700, ["a row among them"])
        process.receive(*(f"POSITION events w {n} {n}" for n in range(6, 1000)))
        self.assertLess(len(process.stream.requests), 30)
        process.host.reactor.advance(0.2)
        self.assertEqual(process.stream.current_token("w"), 999)
        self.assertEqual(tokens(process), [5, 700])
        self.assertLess(len(process.stream.requests), 30)

    def test_far(self) -> None:
        """Refuted tokens cost few queries, and later rows are delivered."""
        process = live()
        process.receive(*(f'RDATA events w {FAR + n} ["false"]' for n in range(1000)))
        self.assertLess(len(process.stream.requests), 30)
        process.stream.persist("w", 6, ["six"])
        process.stream.last_token = 6
        process.receive('RDATA events w 6 ["six"]')
        process.host.reactor.advance(0.2)
        self.assertEqual(tokens(process), [5, 6])


class NearTests(SynchronousTestCase):
    """Tests for plausible positions that are believed and turn out to be false."""

    def test_row_in_skipped_range(self) -> None:
        """Rows within a skipped range are delivered once."""
        process = live()
        process.receive("POSITION events w 5 9")
        self.assertEqual(process.stream.current_token("w"), 9)
        for token in (6, 7):
            process.stream.persist("w", token, [f"row {token}"])
            process.stream.last_token = token
            process.receive(f'RDATA events w {token} ["row {token}"]')
        self.assertEqual(tokens(process), [5, 6, 7])
        process.receive("POSITION events w 7 12", 'RDATA events w 13 ["13"]')
        self.assertEqual(tokens(process), [5, 6, 7, 13])

    def test_writer_announces_lower_position(self) -> None:
        """A reader that is ahead of its writer rewinds, and delivers the next row."""
        for report in (
            lambda process: process.receive("POSITION events w 5 5"),
            lambda process: process.handler.writer_reported(
                process.connection, "w", {"events": 5}
            ),
        ):
            process = live()
            process.receive("POSITION events w 5 9")
            report(process)
            self.assertEqual(process.stream.current_token("w"), 5)
            observer = process.host.observer
            self.assertEqual(observer.lowered, [("events", "w", 9, 5)])
            self.assertEqual(observer.resets, [])
            process.receive('RDATA events w 6 ["six"]')
            self.assertEqual(tokens(process), [5, 6])
            self.assertEqual(process.host.observer.ahead, [])

    def test_announced_below_last_delivered(self) -> None:
        """A position below the last delivered row duplicates no row."""
        process = live()
        process.receive("POSITION events w 5 9", "POSITION events w 0 0")
        self.assertEqual(process.stream.current_token("w"), 5)
        process.receive("POSITION events w 0 0", 'RDATA events w 6 ["six"]')
        self.assertEqual(tokens(process), [5, 6])

    def test_cannot_rewind_below_delivered(self) -> None:
        """
        A reader that delivered a row beyond its writer's position reports that it is
        ahead.
        """
        process = live()
        process.receive('RDATA events w 9 ["false"]', "POSITION events w 5 5")
        self.assertEqual(process.stream.current_token("w"), 9)
        self.assertEqual(process.host.observer.ahead, [("events", "w", 9, 5)])

    def test_an_old_row_that_was_delivered(self) -> None:
        """A row that arrives a second time is discarded, even after a skipped range."""
        process = live()
        process.receive("POSITION events w 5 9", 'RDATA events w 5 ["five"]')
        self.assertEqual(tokens(process), [5])
        self.assertEqual(process.stream.current_token("w"), 9)

    def test_in_memory(self) -> None:
        """
        A stream held in memory rewinds, too, if its writer reports a lower position.
        """
        process = live(resettable=True, held_in_memory=True)
        process.receive("POSITION events w 5 9")
        process.handler.writer_reported(process.connection, "w", {"events": 5})
        self.assertEqual(process.stream.current_token("w"), 5)
        process.receive('RDATA events w 6 ["six"]')
        self.assertEqual(process.stream.current_token("w"), 6)

    def test_later_rows_wait_for_missed_rows(self) -> None:
        """A row is delivered after an earlier missed row, and only once."""
        process = live(20)
        process.receive("POSITION events w 5 7")
        for token in (6, 8):
            process.stream.persist("w", token, [f"row {token}"])
        process.receive('RDATA events w 6 ["row 6"]', 'RDATA events w 8 ["row 8"]')
        self.assertEqual(tokens(process), [5, 6, 8])

    def test_writer_confirms_a_false_position(self) -> None:
        """If the writer confirms a position, the rows below it are fetched."""
        process = live(20)
        process.receive("POSITION events w 5 9")
        process.stream.persist("w", 7, ["seven"])
        process.receive("POSITION events w 9 9")
        self.assertEqual(tokens(process), [5, 7])
        self.assertEqual(process.stream.current_token("w"), 9)

    def test_confirmed_often(self) -> None:
        """A confirmed position is queried at most once a second."""
        process = live(20)
        process.receive("POSITION events w 5 9")
        for _ in range(3):
            process.receive("POSITION events w 9 9")
        self.assertEqual(process.stream.requests[1:], [("w", 5, 9)])
        process.host.reactor.advance(1)
        process.receive("POSITION events w 9 9")
        self.assertEqual(process.stream.requests[1:], [("w", 5, 9)] * 2)

    def test_confirmed_after_a_row(self) -> None:
        """A confirmed position that was reached by a row costs no query."""
        process = live(20)
        process.receive("POSITION events w 5 5", "POSITION events w 5 5")
        self.assertEqual(process.stream.requests[1:], [])

    def test_prefetched_before_commit(self) -> None:
        """A page prefetched before one of its rows was committed is fetched again."""
        process = live(20)
        process.stream.page_rows = 1
        for token in (6, 7):
            process.stream.persist("w", token, [f"row {token}"])
        process.stream.is_held = True
        process.receive("POSITION events w 20 20")
        process.host.rows.is_held = True
        process.stream.answer()  # row 6, whose delivery waits
        process.stream.answer()  # row 7, up to 20: row 8 is not committed yet
        process.stream.persist("w", 8, ["eight"])
        process.receive('RDATA events w 8 ["eight"]')
        process.stream.is_held = process.host.rows.is_held = False
        process.host.rows.release()
        self.assertEqual(tokens(process), [5, 6, 7, 8])

    def test_fetched_once(self) -> None:
        """Rows that a catch-up found in a skipped range are not fetched again."""
        process = live(20)
        process.receive("POSITION events w 5 9")
        process.stream.persist("w", 7, ["seven"])
        process.receive("POSITION events w 12 12", "POSITION events w 15 15")
        self.assertEqual(tokens(process), [5, 7])
        self.assertEqual(process.stream.requests[1:], [("w", 5, 12), ("w", 7, 15)])
