"""Tests for synapse_replication.backoff."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.backoff import Backoff


class BackoffTests(SynchronousTestCase):
    """The wait after a failure."""

    def test_grows_up_to_a_bound(self) -> None:
        """The wait doubles with each failure, and is bounded."""
        backoff = Backoff(1.0, 5.0, jitter=lambda: 0.0)
        self.assertEqual([backoff.delay(n) for n in (1, 2, 3, 4)], [1, 2, 4, 5])
        self.assertEqual(backoff.delay(10_000), 5)

    def test_factor(self) -> None:
        """It grows by the factor."""
        backoff = Backoff(0.5, 5.0, 3.0, lambda: 0.0)
        self.assertEqual([backoff.delay(n) for n in (1, 2, 3, 4)], [0.5, 1.5, 4.5, 5])

    def test_jitter(self) -> None:
        """At random, the wait is between half and all of that."""
        self.assertEqual(Backoff(1.0, 5.0, jitter=lambda: 1.0).delay(3), 2)
        self.assertEqual(Backoff(1.0, 5.0, jitter=lambda: 0.5).delay(3), 3)
        delays = {Backoff(1.0, 5.0).delay(3) for _ in range(100)}
        self.assertGreater(len(delays), 50)
        self.assertTrue(all(2 < delay <= 4 for delay in delays))
