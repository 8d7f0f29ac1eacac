"""Tests of the simulated cluster whose writers are suspended and replaced."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.redis.fencing import NameFence
from tests.simulation.database import SimulatedDatabase
from tests.simulation.runner import Run, simulate

#: The greatest number of seeds needed to find a bug.
MAX_SEEDS = 20


class ReplacesTests(SynchronousTestCase):
    """Tests with a few seeds; ``scripts/simulate --replaces`` runs more of them."""

    seeds: ClassVar[Sequence[int]] = range(4)

    def test_invariants(self) -> None:
        """
        Neither what a replaced writer had in progress nor what it announces when it
        resumes hides a row of its successor.
        """
        failures = [
            f"scripts/simulate --replaces --seed {seed} -v: {result.failure}"
            for seed in self.seeds
            if (result := simulate(seed, replaces=True)).failure is not None
        ]
        self.assertEqual(failures, [])

    def test_writers_are_replaced(self) -> None:
        """Writers are replaced, and end when they resume."""
        run = Run(2, replaces=True)
        run.run()
        self.assertGreater(run.cluster.counts.faults["replace"], 0)
        self.assertEqual(run.cluster.replaced, [])

    def check_bug(self, first: int, bug: AbstractContextManager[object]) -> None:
        """Check that the simulation finds a bug, from the seed ``first`` on."""
        seeds = range(first, first + MAX_SEEDS)
        with bug:
            self.assertTrue(any(simulate(n, replaces=True).failure for n in seeds))

    def test_predecessors_connections_stay(self) -> None:
        """The simulation finds that a replaced writer may still publish."""
        self.check_bug(7, patch.object(NameFence, "enter", lambda self: None))

    def test_commits_are_not_checked(self) -> None:
        """The simulation finds that a replaced writer may still commit."""
        unchecked = patch.object(SimulatedDatabase, "check_name", lambda *args: None)
        self.check_bug(0, unchecked)
