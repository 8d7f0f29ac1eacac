"""Tests for :mod:`synapse_replication.handlers.waiters`."""

from __future__ import annotations

from twisted.internet.defer import CancelledError
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.waiters import Waiters


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
