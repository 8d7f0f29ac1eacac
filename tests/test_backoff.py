"""Tests for synapse_replication.backoff."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.backoff import Backoff


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
