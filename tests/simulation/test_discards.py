"""Tests of the simulated cluster with writers that discard rows, seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from twisted.trial.unittest import SynchronousTestCase

from tests.simulation.runner import Run, simulate


class DiscardsTests(SynchronousTestCase):
    """Tests with a few seeds; ``scripts/simulate --discards`` runs more of them."""

    seeds: ClassVar[Sequence[int]] = range(4)

    def test_invariants(self) -> None:
        """Each discarded row arrives in order or late, once, at every process."""
        failures = [
            f"scripts/simulate --discards --seed {seed} -v: {result.failure}"
            for seed in self.seeds
            if (result := simulate(seed, discards=True)).failure is not None
        ]
        self.assertEqual(failures, [])

    def test_rows_are_discarded(self) -> None:
        """Rows are discarded, and some of them arrive late."""
        run = Run(41, discards=True)
        run.run()
        self.assertGreater(run.cluster.ledger.discarded_tokens, 0)
        self.assertGreater(run.cluster.ledger.late_tokens, 0)
