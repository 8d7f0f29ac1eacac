"""Tests of the verification of what was delivered, and of late rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import CatchUpError
from synapse_replication.handlers.receiving import late_rows
from synapse_replication.handlers.receiving.late_rows import LATE_RETRY
from synapse_replication.streams import token_ledger
from tests.handlers.fixtures import Receiving, Row, receiving


class LateRowsTests(SynchronousTestCase):
    """A reader that is live at token 5, and verifies what ``w`` announces."""

    def setUp(self) -> None:
        self.late: list[tuple[str, str, int, list[Any]]] = []
        self.process = self.live()
        self.assertEqual(self.range_to_verify(5), (0, 5))
        self.verify([5], 5)

    def live(
        self, *, accepts_late_rows: bool = True, resettable: bool = False
    ) -> Receiving:
        process = receiving(resettable=resettable)
        if accepts_late_rows:
            process.host.rows.on_late_rdata = lambda *late: self.late.append(late)  # type: ignore[attr-defined]
        process.handler.receivers["events"].record_tokens({"v", "w"})
        process.stream.persist("w", 5, ["five"])
        process.receive("POSITION events w 4 4", 'RDATA events w 5 ["five"]')
        return process

    def range_to_verify(self, stored: int) -> tuple[int, int] | None:
        return self.process.handler.receivers["events"].range_to_verify("w", stored)

    def verify(self, committed: Sequence[int], upto: int) -> None:
        self.process.handler.receivers["events"].verify("w", committed, upto)

    def test_nothing_missing(self) -> None:
        """Rows that arrived, in any way, are not delivered again."""
        stream = self.process.stream
        for token in (6, 7, 8, 9):
            stream.persist("w", token, ["row"])
        self.process.receive('RDATA events w 6 ["row"]')
        self.process.receive("POSITION events w 8 8", 'RDATA events w 9 ["row"]')
        self.assertEqual(self.range_to_verify(9), (5, 9))
        self.verify([6, 7, 8, 9], 9)
        self.assertIsNone(self.range_to_verify(9))
        observer = self.process.host.observer
        self.assertEqual((self.late, observer.unannounced_rows), ([], []))

    def test_interleaved(self) -> None:
        """Rows that arrived among those of other writers are not delivered again."""
        self.process.receive("POSITION events v 4 4")
        self.process.receive(
            'RDATA events w 6 ["a"]', 'RDATA events v 7 ["b"]', 'RDATA events w 8 ["c"]'
        )
        self.assertEqual(self.range_to_verify(8), (5, 8))
        self.verify([6, 8], 8)
        self.assertEqual(self.process.host.observer.unannounced_rows, [])

    def test_batch(self) -> None:
        """The rows of a batch are not delivered again."""
        self.process.receive('RDATA events w batch ["a"]', 'RDATA events w 6 ["b"]')
        self.verify([6], 6)
        self.assertEqual(self.process.host.observer.unannounced_rows, [])

    def test_missing(self) -> None:
        """A missing row is delivered late, marked as such, and once."""
        self.process.stream.persist("w", 6, ["six"])
        self.process.receive('RDATA events w 7 ["seven"]')
        self.verify([6, 7], 7)
        self.assertEqual(self.late, [("events", "w", 6, [Row("six")])])
        observer = self.process.host.observer
        self.assertEqual(observer.unannounced_rows, [("events", "w", (6,))])
        self.assertEqual(observer.late_rows, [("events", "w", (6,))])
        self.assertEqual(self.process.stream.current_token("w"), 7)
        self.assertIsNone(self.range_to_verify(7))

    def test_sink_without_late_rows(self) -> None:
        """A sink that does not accept late rows receives none; they are reported."""
        self.process = self.live(accepts_late_rows=False)
        self.verify([5], 5)
        self.process.receive('RDATA events w 7 ["seven"]')
        self.verify([6, 7], 7)
        observer = self.process.host.observer
        self.assertEqual(observer.unannounced_rows, [("events", "w", (6,))])
        self.assertEqual(observer.late_rows, [])

    def test_bounds(self) -> None:
        """Only what is stored and delivered is verified, and not during a catch-up."""
        self.process.receive('RDATA events w 9 ["nine"]')
        self.assertEqual(self.range_to_verify(7), (5, 7))
        self.assertEqual(self.range_to_verify(12), (5, 9))
        self.process.stream.is_held = True
        self.process.receive("POSITION events w 11 11")
        self.assertIsNone(self.range_to_verify(12))

    def test_extension(self) -> None:
        """A writer that speaks the extension is not verified."""
        receiver = self.process.handler.receivers["events"]
        receiver.record_tokens(set())
        self.process.receive('RDATA events w 7 ["seven"]')
        self.assertIsNone(self.range_to_verify(7))
        self.verify([6, 7], 7)
        self.assertEqual(self.late, [])
        # If it stops speaking the extension, later rows are verified.
        receiver.record_tokens({"w"})
        self.assertIsNone(self.range_to_verify(7))
        self.process.stream.persist("w", 8, ["eight"])
        self.process.receive('RDATA events w 9 ["nine"]')
        self.assertEqual(self.range_to_verify(9), (7, 9))
        self.verify([8, 9], 9)
        self.assertEqual([token for _, _, token, _ in self.late], [8])

    def test_writer_that_is_not_verified(self) -> None:
        """No token is recorded of a new writer that nobody verifies."""
        receiver = self.process.handler.receivers["events"]
        for name in ("u", "v"):
            self.process.receive(f"POSITION events {name} 4 4")
            for token in range(5, 105):
                self.process.receive(f'RDATA events {name} {token} ["row"]')
        self.assertFalse(receiver.writer("u").late.is_recording)
        self.assertIsNone(receiver.range_to_verify("u", 104))
        self.assertEqual(receiver.range_to_verify("v", 104), (0, 104))

    def test_more_than_are_recorded(self) -> None:
        """
        If more rows arrive than are recorded, none of them is delivered again, and
        later ones are verified.
        """
        self.patch(token_ledger, "MAX_RECORDED", 3)
        receiver = self.process.handler.receivers["events"]
        tokens = list(range(6, 13))
        for token in tokens:
            self.process.stream.persist("w", token, ["row"])
            self.process.receive(f'RDATA events w {token} ["row"]')
        # A read returns a limited number of tokens.
        self.verify(tokens[:3], 8)
        receiver.record_tokens({"w"})
        self.verify(tokens[3:], 12)
        self.assertEqual(self.late, [])
        self.process.stream.persist("w", 13, ["lost"])
        self.process.receive('RDATA events w 14 ["row"]')
        self.assertEqual(self.range_to_verify(14), (12, 14))
        self.verify([13, 14], 14)
        self.assertEqual([token for _, _, token, _ in self.late], [13])

    def test_page_that_fails(self) -> None:
        """Rows of a failed page that were delivered are not delivered again."""
        stream, rows = self.process.stream, self.process.host.rows
        stream.persist("w", 6, ["six"])
        stream.persist("w", 7, ["seven"])
        rows.failures = [None, ValueError("busy")]
        self.process.receive("POSITION events w 7 7")
        self.process.host.reactor.advance(10)
        self.assertEqual(self.range_to_verify(7), (5, 7))
        self.verify([6, 7], 7)
        self.assertEqual(self.late, [])

    def test_moved_back(self) -> None:
        """
        If a process began above the writer's position, what follows the position is
        verified.
        """
        self.process = self.live(resettable=True)
        self.process.stream.persist("w", 8, ["eight"])
        self.process.receive('RDATA events w 8 ["eight"]')
        self.verify([5, 8], 8)
        self.process.receive("POSITION events w 6 6")
        self.process.stream.persist("w", 7, ["seven"])
        self.process.receive('RDATA events w 9 ["nine"]')
        self.assertEqual(self.range_to_verify(9), (6, 9))
        self.verify([7, 9], 9)
        self.assertEqual([token for _, _, token, _ in self.late], [7])

    def find_row_in_empty_range(self) -> None:
        """Find the late row 8 in the range that POSITION said to be empty."""
        self.process.receive("POSITION events w 5 9")
        self.process.stream.persist("w", 8, ["eight"])
        self.verify([8], 9)

    def check_that_row_is_delivered(self, late: list[int]) -> None:
        self.process.receive('RDATA events w 8 ["eight"]')
        self.process.host.reactor.advance(LATE_RETRY)
        delivered = [token for _, _, token, _ in self.process.host.rows.rows]
        self.assertEqual(delivered, [5, 8])
        self.assertEqual([token for _, _, token, _ in self.late], late)

    def test_rewind_fetches_it(self) -> None:
        """A row that a catch-up fetches after a rewind is not delivered late, too."""
        self.process.stream.is_held = True
        self.find_row_in_empty_range()
        self.process.stream.fail(CatchUpError("away"))
        self.process.stream.is_held = False
        self.check_that_row_is_delivered(late=[])

    def test_arrives_after_it_was_delivered(self) -> None:
        """
        A late row in a range that was said to be empty is delivered again in order if
        it arrives, since that shows that the range is not empty.
        """
        self.find_row_in_empty_range()
        self.check_that_row_is_delivered(late=[8])

    def test_arrives_below_a_delivered_row(self) -> None:
        """A late row below a row that was delivered is old if it arrives."""
        self.process.stream.persist("w", 8, ["eight"])
        self.process.receive('RDATA events w 9 ["nine"]')
        self.verify([8, 9], 9)
        self.process.receive('RDATA events w 8 ["eight"]')
        delivered = [token for _, _, token, _ in self.process.host.rows.rows]
        self.assertEqual(delivered, [5, 9])
        self.assertEqual([token for _, _, token, _ in self.late], [8])

    def test_many(self) -> None:
        """A limited number of rows is delivered late at once."""
        self.patch(late_rows, "MAX_LATE", 2)
        for token in (6, 7, 8):
            self.process.stream.persist("w", token, ["row"])
        self.process.receive('RDATA events w 9 ["nine"]')
        self.verify([6, 7, 8, 9], 9)
        self.assertEqual([token for _, _, token, _ in self.late], [6, 7])
        self.assertEqual(self.range_to_verify(9), (7, 9))
        self.verify([8, 9], 9)
        self.assertEqual([token for _, _, token, _ in self.late], [6, 7, 8])

    def test_many_that_fail(self) -> None:
        """While many rows wait to be delivered late, no others are looked for."""
        self.patch(late_rows, "MAX_LATE", 2)
        for token in (6, 7, 8):
            self.process.stream.persist("w", token, ["row"])
        self.process.receive('RDATA events w 9 ["nine"]')
        stream = self.process.stream
        stream.is_held = True
        self.verify([6, 7, 8, 9], 9)
        self.assertIsNone(self.range_to_verify(9))
        stream.fail(CatchUpError("away"))
        self.assertIsNone(self.range_to_verify(9))
        stream.is_held = False
        self.process.host.reactor.advance(LATE_RETRY)
        self.assertEqual({token for _, _, token, _ in self.late}, {6, 7})
        self.assertEqual(self.range_to_verify(9), (7, 9))

    def begin_to_fetch(self) -> None:
        """Find the late row 6, and hold the answer of the source."""
        stream = self.process.stream
        stream.persist("w", 6, ["six"])
        stream.is_held = True
        self.process.receive('RDATA events w 7 ["seven"]')
        self.verify([6, 7], 7)

    def check_failure_without_a_link(self) -> None:
        """Check that only the next link repeats a failed fetch."""
        stream, connection = self.process.stream, self.process.connection
        stream.fail(CatchUpError("away"))
        stream.is_held = False
        self.process.handler.lost_connection(connection)
        self.assertEqual(self.process.host.reactor.getDelayedCalls(), [])
        self.process.handler.new_connection(connection)
        self.assertEqual([token for _, _, token, _ in self.late], [6])

    def test_source_fails(self) -> None:
        """If the rows cannot be fetched, the attempt is repeated."""
        stream = self.process.stream
        self.begin_to_fetch()
        stream.fail(CatchUpError("away"))
        stream.is_held = False
        self.assertEqual(self.late, [])
        self.process.host.reactor.advance(LATE_RETRY)
        self.assertEqual([token for _, _, token, _ in self.late], [6])

    def test_source_fails_without_a_link(self) -> None:
        """Without a link, nothing is repeated until the next link comes up."""
        self.begin_to_fetch()
        self.check_failure_without_a_link()

    def test_writer_is_evicted_meanwhile(self) -> None:
        """A writer whose late rows are being fetched is not forgotten."""
        self.begin_to_fetch()
        self.process.handler.receivers["events"].forget_writer("w")
        self.check_failure_without_a_link()

    def test_sink_never_handles_a_row(self) -> None:
        """Later rows are delivered late although the sink always fails for one."""
        late: list[int] = []

        def on_late_rdata(
            stream: str, writer: str, token: int, rows: list[Any]
        ) -> None:
            if token == 6:
                raise ValueError("not that row")
            late.append(token)

        self.process.host.rows.on_late_rdata = on_late_rdata  # type: ignore[attr-defined]
        for missing, arrived in ((6, 7), (8, 9)):
            self.process.stream.persist("w", missing, ["missing"])
            self.process.receive(f'RDATA events w {arrived} ["arrived"]')
            self.verify([missing, arrived], arrived)
        for _ in range(3):
            self.process.host.reactor.advance(LATE_RETRY)
        self.assertEqual(late, [8])
        observer = self.process.host.observer
        self.assertEqual(observer.late_rows, [("events", "w", (8,))])
