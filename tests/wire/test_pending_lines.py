"""Tests of lines that wait to be written."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.wire.pending_lines import (
    WRITE_SIZE,
    PendingLimit,
    PendingLines,
)


class PendingLinesTests(SynchronousTestCase):
    def test_limit(self) -> None:
        """``has_room`` respects the limits of lines and of bytes."""
        pending = PendingLines(PendingLimit(3, 10))
        pending.add(1, b"1234\n")
        self.assertTrue(pending.has_room(2, 5))
        self.assertFalse(pending.has_room(3, 5))
        self.assertFalse(pending.has_room(2, 6))

    def test_taken(self) -> None:
        """``take`` returns about one write's worth of data, in order, or everything."""
        big = b"x" * (WRITE_SIZE - 1)
        pending = PendingLines(PendingLimit())
        for data in (big, b"\n", b"a\n", b"b\n"):
            pending.add(1, data)
        self.assertEqual(pending.take(everything=False), big + b"\n")
        self.assertEqual((pending.lines, pending.bytes), (2, 4))
        pending.add(1, big)
        self.assertEqual(pending.take(everything=True), b"a\nb\n" + big)
        self.assertEqual(pending.take(everything=True), b"")
        self.assertEqual((pending.lines, pending.bytes), (0, 0))

    def test_dropped(self) -> None:
        """``clear`` discards all lines."""
        pending = PendingLines(PendingLimit())
        pending.add(1, b"a\n")
        pending.clear()
        self.assertEqual((pending.lines, pending.bytes), (0, 0))
        self.assertEqual(pending.take(everything=True), b"")
