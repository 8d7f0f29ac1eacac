"""Tests for tests.simulation.long."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tests.simulation.long import PERIOD, LongRun, Sample, simulate_days, why_growing


class LongRunTests(SynchronousTestCase):
    def test_periods(self) -> None:
        """Faults recur, and the invariants hold in each period."""
        run = LongRun(5, 2)
        run.run_days(lambda sample: None)
        counts = run.cluster.counts
        self.assertGreater(counts.faults.total(), 4)
        self.assertGreater(run.cluster.clock.rightNow, 2 * PERIOD)
        self.assertGreater(
            run.cluster.database.sequences["receipts_seq"], 2**53 - 20000
        )

    def test_violations_are_found(self) -> None:
        """A violation is reported with the time of its period."""
        self.patch(LongRun, "_write_slowly", lambda run: run.cluster.crash("main"))
        failure = simulate_days(5, PERIOD / 86_400, lambda sample: None)
        assert failure is not None
        self.assertIn("main is not up", failure)

    def test_growth(self) -> None:
        """More than a tenth since the first day is growth."""
        first = Sample(1, 100.0, 1000, 50, 1, 1, 1)
        last = attrs.evolve(first, day=7, memory=109.0, objects=1101)
        self.assertIn("objects grew", why_growing([first, last]) or "")
        self.assertIsNone(why_growing([first, attrs.evolve(last, objects=1000)]))
