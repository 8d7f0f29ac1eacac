"""Tests for :mod:`synapse_replication.handlers.waiters`."""

from __future__ import annotations

import gc

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.waiters import Waiters, wait_for_all


class WaitersTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.waiters = Waiters()

    def test_independent(self) -> None:
        """All fire, once; a cancelled one does not affect the others."""
        first, second = self.waiters.add(), self.waiters.add()
        first.cancel()
        self.assertTrue(self.waiters)
        self.waiters.fire()
        self.failureResultOf(first, CancelledError)
        self.successResultOf(second)
        self.assertFalse(self.waiters)
        self.waiters.fire()

    def test_added_meanwhile(self) -> None:
        """What is added by a callback waits for the next event."""
        added = []
        self.waiters.add().addCallback(lambda _: added.append(self.waiters.add()))
        self.waiters.fire()
        (later,) = added
        self.assertNoResult(later)
        self.waiters.fire()
        self.successResultOf(later)

    def test_failure(self) -> None:
        """A failure fails all of them."""
        waiting = [self.waiters.add(), self.waiters.add()]
        self.waiters.fire(Failure(ValueError()))
        for waiter in waiting:
            self.failureResultOf(waiter, ValueError)


class WaitForAllTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.parts: list[Deferred[int]] = [Deferred(), Deferred()]
        self.all = wait_for_all(self.parts)

    def test_none(self) -> None:
        """Without Deferreds, it has fired."""
        self.assertIsNone(self.successResultOf(wait_for_all([])))

    def test_all(self) -> None:
        """It fires when all have fired."""
        self.parts[1].callback(2)
        self.assertNoResult(self.all)
        self.parts[0].callback(1)
        self.assertIsNone(self.successResultOf(self.all))

    def test_failures(self) -> None:
        """It waits for the others, and fails with the error of the first."""
        self.parts[1].errback(KeyError())
        self.assertNoResult(self.all)
        self.parts[0].errback(ValueError())
        self.failureResultOf(self.all, ValueError)

    def test_cancelled(self) -> None:
        """Cancelling it is no success; the errors of its parts are not logged."""
        self.parts[0].callback(1)
        self.all.cancel()
        self.failureResultOf(self.all, CancelledError)
        self.parts.clear()
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])
