"""Tests of the rate limit for catch-ups."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.receiving.claim_rate import (
    INTERVAL,
    MAX_BURST,
    ClaimRate,
)


class ClaimRateTests(SynchronousTestCase):
    """Tests for :class:`ClaimRate`."""

    def test_burst(self) -> None:
        """
        Beyond the burst, each catch-up of a writer is delayed longer; other writers are
        not delayed.
        """
        rate = ClaimRate()
        waits = [rate.wait_before("w", 5.0) for _ in range(MAX_BURST + 2)]
        self.assertEqual(waits[:MAX_BURST], [0.0] * MAX_BURST)
        self.assertAlmostEqual(waits[-2], INTERVAL)
        self.assertAlmostEqual(waits[-1], 2 * INTERVAL)
        self.assertEqual(rate.wait_before("v", 5.0), 0.0)

    def test_time_passes(self) -> None:
        """After enough time, a full burst is allowed again."""
        rate = ClaimRate()
        for _ in range(MAX_BURST):
            rate.wait_before("w", 5.0)
        now = 5.0 + MAX_BURST * INTERVAL
        waits = [rate.wait_before("w", now) for _ in range(MAX_BURST)]
        self.assertEqual(waits, [0.0] * MAX_BURST)
