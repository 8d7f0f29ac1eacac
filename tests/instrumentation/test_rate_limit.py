"""Tests for the limit on similar log lines."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.instrumentation.rate_limit import (
    MAX_KEYS,
    MAX_OF_GROUP,
    RateLimit,
)


class RateLimitTests(SynchronousTestCase):
    def test_repetitions_are_counted(self) -> None:
        """
        The first line of a kind is admitted, then one per minute, with the number of
        suppressed lines.
        """
        clock = Clock()
        limit = RateLimit(clock.seconds)
        self.assertEqual(limit.admit("a"), 0)
        self.assertIsNone(limit.admit("a"))
        self.assertIsNone(limit.admit("a"))
        self.assertEqual(limit.admit("b"), 0)
        clock.advance(60)
        self.assertEqual(limit.admit("a"), 2)
        clock.advance(60)
        self.assertEqual(limit.admit("a"), 0)

    def test_kinds_are_bounded(self) -> None:
        """The number of kinds remembered is bounded; the oldest is forgotten."""
        limit = RateLimit(Clock().seconds)
        for kind in range(MAX_KEYS + 1):
            limit.admit(str(kind), kind)
        self.assertEqual(limit.admit("0", 0), 0)
        self.assertIsNone(limit.admit(str(MAX_KEYS), MAX_KEYS))

    def test_groups_are_bounded(self) -> None:
        """
        A group has a limited number of lines a minute, however many names are made up.
        """
        clock = Clock()
        limit = RateLimit(clock.seconds)
        admitted = [limit.admit("made", f"peer {n}") for n in range(3000)]
        self.assertEqual(admitted.count(0), MAX_OF_GROUP)
        self.assertEqual(limit.admit("lost", "peer 1"), 0)
        clock.advance(60)
        self.assertEqual(limit.admit("made", "another"), 3000 - MAX_OF_GROUP)
