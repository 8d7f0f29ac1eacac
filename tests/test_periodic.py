"""Tests for synapse_replication.periodic."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.periodic import AFTER_HEARTBEATS, until_next


class UntilNextTests(SynchronousTestCase):
    def test_moments(self) -> None:
        """Work takes place some time after each multiple, and not twice for one."""
        reactor = Clock()
        clock = ReactorClock(reactor)
        for now, expected in (
            (12.0, 15.0),
            (15.2, 15.0),
            # A timer that fires slightly too early, and one that fires late.
            (15.0 + AFTER_HEARTBEATS - 0.01, 20.0),
            (15.0 + AFTER_HEARTBEATS + 0.3, 20.0),
        ):
            reactor.rightNow = now
            due = now + until_next(clock, 5.0)
            self.assertAlmostEqual(due, expected + AFTER_HEARTBEATS)
