"""Tests for :mod:`scripts.tools.bench.deployment`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.bench.deployment import ROOMS, make_plan
from scripts.tools.faults.synapse.traffic import WEIGHTS


class MakePlanTests(SynchronousTestCase):
    def test_the_same_for_both_sides(self) -> None:
        """
        The plan is the same each time, with operations of every kind in every room.
        """
        plan = make_plan(300)
        self.assertEqual(plan, make_plan(300))
        self.assertEqual({kind for _, kind in plan}, set(WEIGHTS))
        self.assertEqual({room for room, _ in plan}, set(range(ROOMS)))
