"""Simulates more clusters than the tests in :mod:`tests.simulation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from twisted.trial.unittest import SynchronousTestCase

from tests.external import skip_reason
from tests.simulation import test_discards, test_replaces, test_runner
from tests.simulation.bugs import FOUND_BY
from tests.simulation.long import PERIOD, LongRun

skip = skip_reason("long")


class SimulateTests(test_runner.SimulateTests):
    """The first seeds, and those that find known bugs."""

    seeds: ClassVar[Sequence[int]] = sorted({*range(40), *FOUND_BY.values()})


class ReplacesTests(test_replaces.ReplacesTests):
    """Writers are suspended and replaced."""

    seeds: ClassVar[Sequence[int]] = range(20)


class DiscardsTests(test_discards.DiscardsTests):
    """Writers discard rows."""

    seeds: ClassVar[Sequence[int]] = range(20)


class LongRunTests(SynchronousTestCase):
    """A cluster runs for an hour."""

    def test_periods(self) -> None:
        """Faults recur, and the invariants hold in each period."""
        periods = round(3600 / PERIOD)
        run = LongRun(5, periods)
        run.run_days(lambda sample: None)
        self.assertGreater(run.cluster.counts.faults.total(), 2 * periods)
