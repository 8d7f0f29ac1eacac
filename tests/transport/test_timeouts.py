"""Tests for timeouts under a clock that jumps."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.transport.timeouts import CALLS_PER_TIMEOUT, Timeout


class TimeoutTests(SynchronousTestCase):
    """Tests for Timeout."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.calls: list[str] = []
        self.timeout = Timeout(self.clock, 30.0, self.calls.append, "late")

    def test_in_time(self) -> None:
        """The function is called after the timeout."""
        self.clock.pump([1.0] * 29)
        self.assertEqual((self.calls, self.timeout.active()), ([], True))
        self.clock.pump([1.0] * 2)
        self.assertEqual((self.calls, self.timeout.active()), (["late"], False))

    def test_clock_steps(self) -> None:
        """A jump of the clock uses up only one step of the timeout."""
        self.clock.advance(3600.0)
        self.clock.pump([30.0 / CALLS_PER_TIMEOUT] * (CALLS_PER_TIMEOUT - 2))
        self.assertEqual(self.calls, [])
        self.clock.advance(30.0 / CALLS_PER_TIMEOUT)
        self.assertEqual(self.calls, ["late"])

    def test_cancelled(self) -> None:
        """A timeout that is cancelled in any of its steps calls nothing."""
        self.clock.advance(20.0)
        self.timeout.cancel()
        self.clock.pump([10.0] * 10)
        self.assertEqual(self.calls, [])
        self.assertEqual(self.clock.getDelayedCalls(), [])
