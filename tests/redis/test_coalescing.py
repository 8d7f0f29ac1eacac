"""Tests of collecting publishes into one write."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.redis.publish_ledger import Publish
from synapse_replication.redis.sender import COALESCE_WINDOW, Coalescer

_ROWS = Publish("RDATA", b"hs", [b"12", b"345"])


class CoalescerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.flushed: list[list[Publish]] = []
        self.waiting = Coalescer(
            self.clock, lambda: self.flushed.append(self.waiting.take())
        )

    def test_one_flush_a_turn(self) -> None:
        """All publishes of a turn are flushed once, at its end, in order."""
        for _ in range(2):
            self.waiting.add(_ROWS)
            self.waiting.flush_later()
        self.assertEqual((self.flushed, self.waiting.size), ([], 10))
        self.clock.advance(0)
        self.assertEqual((self.flushed, self.waiting.size), ([[_ROWS, _ROWS]], 0))
        self.clock.advance(0)
        self.assertEqual(len(self.flushed), 1)
        self.waiting.flush_later()
        self.clock.advance(0)
        self.assertEqual(len(self.flushed), 2)

    def test_taken_before(self) -> None:
        """Publishes that were taken earlier need no flush."""
        self.waiting.add(_ROWS)
        self.waiting.flush_later()
        self.assertEqual(self.waiting.take(), [_ROWS])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_quiet(self) -> None:
        """The coalescer is quiet at first, and again some time after a write."""
        self.assertTrue(self.waiting.is_quiet())
        self.waiting.record_write()
        self.clock.advance(COALESCE_WINDOW)
        self.assertFalse(self.waiting.is_quiet())
        self.clock.advance(COALESCE_WINDOW / 100)
        self.assertTrue(self.waiting.is_quiet())
