"""Tests for lost rows in combination with false positions and full queues."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.receiving.context import ReceiverOptions
from tests.handlers.fixtures import Receiving, receiving
from tests.handlers.receiving.live_reader import FAR, live, tokens


class LostRowTests(SynchronousTestCase):
    """False positions combined with lost rows."""

    def test_far_row_after_a_lost_one(self) -> None:
        """An implausible row does not count as the next row after a loss."""
        process = live()
        process.receive('RDATA events w x6 ["six"]', f'RDATA events w {FAR} ["false"]')
        self.assertEqual(tokens(process), [5])
        process.stream.persist("w", 6, ["six"])
        process.stream.persist("w", 7, ["seven"])
        process.stream.last_token = 7
        process.receive('RDATA events w 7 ["seven"]')
        self.assertEqual(tokens(process), [5, 6, 7])
        process.receive('RDATA events w 8 ["eight"]')
        self.assertEqual(tokens(process), [5, 6, 7, 8])
        self.assertEqual(process.stream.requests[1:], [("w", 5, FAR), ("w", 5, 7)])

    def test_late_row_after_a_lost_one(self) -> None:
        """A late row does not count as the next row after a loss either."""
        for is_idempotent in (False, True):
            process = live(20, idempotent=is_idempotent)
            process.receive('RDATA events w x6 ["six"]', 'RDATA events w 5 ["five"]')
            process.stream.persist("w", 6, ["six"])
            process.stream.persist("w", 7, ["seven"])
            process.receive('RDATA events w 7 ["seven"]')
            self.assertEqual(tokens(process)[-2:], [6, 7], is_idempotent)

    def test_row_lost_in_skipped_range(self) -> None:
        """A row lost within a skipped range is fetched with the row after it."""
        process = live(20)
        process.receive("POSITION events w 5 9", 'RDATA events w x6 ["six"]')
        process.stream.persist("w", 6, ["six"])
        process.stream.persist("w", 10, ["ten"])
        process.receive('RDATA events w 10 ["ten"]')
        self.assertEqual(tokens(process), [5, 6, 10])
        self.assertEqual(process.stream.requests[1:], [("w", 5, 10)])
        self.assertEqual(process.host.observer.resets, [])

    def test_far_positions_in_a_full_queue(self) -> None:
        """Rows dropped along with refuted positions are fetched nevertheless."""
        process = self.overflowing()
        process.stream.last_token = 3
        process.receive(*[f"POSITION events w {FAR} {FAR}"] * 10)
        self.release(process)
        self.assertEqual(tokens(process), [1, 2, 3])

    def test_full_queue_during_a_catch_up(self) -> None:
        """
        Rows dropped along with refuted positions are also fetched during a catch-up.
        """
        process = receiving(receiver=ReceiverOptions(max_queue_size=400), page_rows=1)
        process.stream.is_held = True
        for token in (1, 2):
            process.stream.persist("w", token, [f"row {token}"])
        process.receive("POSITION events w 2 2")
        self.drop(process, 3, 4)
        process.stream.last_token = 4
        process.receive(*[f"POSITION events w {FAR} {FAR}"] * 10)
        process.stream.is_held = False
        process.stream.answer()
        self.assertEqual(tokens(process), [1, 2, 3, 4])
        self.assertEqual(process.host.observer.refuted, [("events", "w", FAR, 4)])

    def test_late_rows_in_a_full_queue_after_a_lost_one(self) -> None:
        """Dropped late rows do not count as the next row after a loss either."""
        lines = ('RDATA events w x4 ["four"]', 'RDATA events v 2 ["another writer\'s"]')
        for order in (lines, lines[::-1]):
            process = self.overflowing()
            self.release(process)
            process.host.rows.is_held = True
            process.receive(*order)
            self.drop(process, 2, 3)
            self.release(process)
            for token in (4, 5):
                process.stream.persist("w", token, [f"row {token}"])
            process.receive('RDATA events w 5 ["row 5"]')
            self.assertEqual(tokens(process), [1, 2, 3, 4, 5], order)

    def test_two_claims_in_a_full_queue(self) -> None:
        """Rows up to a dropped position are fetched with the next row."""
        process = self.overflowing()
        process.stream.last_token = 150_003
        process.stream.persist("w", 150_003, ["not near, and true"])
        process.receive('RDATA events w 150003 ["not near, and true"]')
        process.receive(*[f"POSITION events w {FAR} {FAR}"] * 10)
        self.release(process)
        self.assertEqual(tokens(process), [1, 2, 3])
        process.stream.persist("w", 150_004, ["next"])
        process.stream.last_token = 150_004
        process.receive('RDATA events w 150004 ["next"]')
        self.assertEqual(tokens(process), [1, 2, 3, 150_003, 150_004])

    def test_false_position_in_the_full_queue_of_a_stream_in_memory(self) -> None:
        """For a stream in memory, the writer's answer decides how far to advance."""
        process = self.overflowing(resettable=True, held_in_memory=True)
        process.stream.last_token = 3
        process.receive(*["POSITION events w 0 30"] * 10)
        self.release(process)
        self.assertEqual(tokens(process), [1, 2, 3])
        self.assertEqual(process.stream.current_token("w"), 3)

    def test_skipped_range_in_full_queue(self) -> None:
        """Rows dropped within a skipped range are fetched."""
        process = self.overflowing()
        process.receive("POSITION events w 3 30")
        self.release(process)
        self.assertEqual(process.stream.current_token("w"), 30)
        process.host.rows.is_held = True
        process.receive('RDATA events v 2 ["of another writer"]')
        self.drop(process, 4, 5, 6)
        self.release(process)
        process.receive('RDATA events w 31 ["31"]')
        self.assertEqual(tokens(process), [1, 2, 3, 4, 5, 6, 31])

    def overflowing(self, **options: bool) -> Receiving:
        """Build a reader whose sink holds a row of the writer v.

        Its queue is full, and rows of the writer w were dropped from it.
        """
        process = receiving(
            receiver=ReceiverOptions(max_queue_size=400),
            **options,  # type: ignore[arg-type]
        )
        process.receive("POSITION events v 0 0", "POSITION events w 0 0")
        process.host.rows.is_held = True
        process.receive('RDATA events v 1 ["of another writer"]')
        self.drop(process, 1, 2, 3)
        return process

    def drop(self, process: Receiving, *dropped: int) -> None:
        for token in dropped:
            row = f'["{token:500}"]'
            process.stream.persist("w", token, [f"{token:500}"])
            process.receive(f"RDATA events w {token} {row}")

    def release(self, process: Receiving) -> None:
        process.host.rows.is_held = False
        process.host.rows.release()
        process.host.reactor.pump([0.1] * 20)
