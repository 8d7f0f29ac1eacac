"""Tests for synapse_replication.handlers.receiving.silent_moves."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.receiving.silent_moves import (
    MAX_WRITERS,
    WINDOW_SECONDS,
    SilentMoves,
)


class SilentMovesTests(SynchronousTestCase):
    def test_no_recorded_range(self) -> None:
        """
        If no range up to a position is recorded, the start of the range is the position
        itself.
        """
        self.assertEqual(SilentMoves().start_of("w", 5), 5)

    def test_adjacent_ranges_join(self) -> None:
        """Adjacent ranges join, back to the last row delivered."""
        moves = SilentMoves()
        moves.moved("w", 5, 7, 0.0)
        moves.moved("w", 7, 9, 1.0)
        self.assertEqual(moves.start_of("w", 9), 5)
        # A row was delivered between 9 and 12.
        self.assertEqual(moves.start_of("w", 12), 12)
        moves.moved("w", 12, 15, 2.0)
        self.assertEqual(moves.start_of("w", 15), 12)
        moves.forget("w")
        self.assertEqual(moves.start_of("w", 15), 15)

    def test_old_ranges_expire(self) -> None:
        """For an idle writer, the range reaches back for a limited time."""
        moves = SilentMoves()
        for second in range(600):
            moves.moved("w", second, second + 1, float(second))
        start = moves.start_of("w", 600)
        self.assertGreaterEqual(600 - start, WINDOW_SECONDS)
        self.assertLessEqual(600 - start, 2 * WINDOW_SECONDS + 2)

    def test_bounded(self) -> None:
        """Beyond the limit of writers, only the oldest ones are evicted."""
        moves = SilentMoves()
        for number in range(MAX_WRITERS + 1):
            moves.moved(f"w{number}", 1, 2, 0.0)
        self.assertEqual(moves.start_of("w0", 2), 2)
        self.assertEqual(moves.start_of("w1", 2), 1)

    def test_rows_delivered_late(self) -> None:
        """A range begins after the highest row delivered within it."""
        moves = SilentMoves()
        moves.moved("w", 5, 9, 0.0)
        moves.delivered("w", 7)
        moves.delivered("w", 6)
        moves.delivered("v", 6)
        self.assertEqual(moves.start_of("w", 9), 7)

    def test_checked(self) -> None:
        """A range is checked at most once a second."""
        moves = SilentMoves()
        moves.moved("w", 5, 9, 0.0)
        self.assertEqual(moves.start_to_check("w", 8, 2.0), 8)
        self.assertEqual(moves.start_to_check("w", 9, 2.0), 5)
        self.assertEqual(moves.start_to_check("w", 9, 2.5), 9)
        self.assertEqual(moves.start_to_check("w", 9, 3.0), 5)
