"""Tests for :mod:`scripts.tools.bench.deployment`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.bench.deployment import ROOMS, make_plan, processor_seconds
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


class ProcessorSecondsTests(SynchronousTestCase):
    def test_fields(self) -> None:
        """User and system time are added, whatever the name of the process contains."""
        ticks = os.sysconf("SC_CLK_TCK")
        stat = "7 (a (b) c) S 1 7 7 0 -1 4194560 100 0 0 0 250 150 9 9 20 0 1 0 5 6 7"
        self.assertEqual(processor_seconds(stat), 400 / ticks)

    def test_own_process(self) -> None:
        """The result agrees with the process's own measurement within 0.5 s."""
        found = processor_seconds(Path("/proc/self/stat").read_text("utf-8"))
        self.assertLess(abs(found - time.process_time()), 0.5)
