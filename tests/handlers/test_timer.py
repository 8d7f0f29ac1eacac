"""Tests for synapse_replication.handlers.timer."""

from __future__ import annotations

import gc

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.timer import (
    AFTER_HEARTBEATS,
    Backoff,
    Repeater,
    until_next,
)


class BackoffTests(SynchronousTestCase):
    """Tests for the delay after a failure."""

    def test_grows_up_to_a_bound(self) -> None:
        """The delay doubles with each failure, up to a bound."""
        backoff = Backoff(1.0, 5.0, jitter=lambda: 0.0)
        self.assertEqual([backoff.delay(n) for n in (1, 2, 3, 4)], [1, 2, 4, 5])
        self.assertEqual(backoff.delay(10_000), 5)

    def test_factor(self) -> None:
        """The delay grows by the given factor."""
        backoff = Backoff(0.5, 5.0, 3.0, lambda: 0.0)
        self.assertEqual([backoff.delay(n) for n in (1, 2, 3, 4)], [0.5, 1.5, 4.5, 5])

    def test_jitter(self) -> None:
        """
        With jitter, the delay is between half of the full delay and the full delay.
        """
        self.assertEqual(Backoff(1.0, 5.0, jitter=lambda: 1.0).delay(3), 2)
        self.assertEqual(Backoff(1.0, 5.0, jitter=lambda: 0.5).delay(3), 3)
        delays = {Backoff(1.0, 5.0).delay(3) for _ in range(100)}
        self.assertGreater(len(delays), 50)
        self.assertTrue(all(2 < delay <= 4 for delay in delays))


class RepeaterTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.reactor = Clock()
        self.begun = 0
        self.working: Deferred[None] | None = None
        self.repeater = Repeater(ReactorClock(self.reactor), 5.0, self.work)

    def work(self) -> Deferred[None] | None:
        self.begun += 1
        return self.working

    def test_interval(self) -> None:
        """Work begins at once, and then an interval after it has ended."""
        self.working = Deferred()
        self.repeater.start()
        self.reactor.advance(20)
        self.assertEqual(self.begun, 1)
        self.working.callback(None)
        self.working = None
        self.reactor.advance(4.9)
        self.assertEqual(self.begun, 1)
        self.reactor.pump([0.1, 5, 5])
        self.assertEqual(self.begun, 4)

    def test_stop(self) -> None:
        """Nothing begins after the stop, whether or not something is in progress."""
        self.repeater.start()
        self.repeater.stop()
        self.repeater.hurry()
        self.assertEqual(self.reactor.getDelayedCalls(), [])
        self.working = Deferred()
        self.repeater.start()
        self.repeater.stop()
        self.working.callback(None)
        self.assertEqual(self.reactor.getDelayedCalls(), [])
        self.assertEqual(self.begun, 2)

    def test_hurry(self) -> None:
        """Work that waits for its time begins at once; other work does not."""
        self.repeater.start()
        self.working = Deferred()
        self.repeater.hurry()
        self.assertEqual(self.begun, 2)
        self.repeater.hurry()
        self.assertEqual(self.begun, 2)

    def test_unexpected_failure(self) -> None:
        """A failure that the work does not handle is logged; the work is repeated."""
        self.working = Deferred()
        self.repeater.start()
        self.working.errback(ValueError("unexpected"))
        self.working = None
        gc.collect()
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.reactor.advance(5)
        self.assertEqual(self.begun, 2)


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
