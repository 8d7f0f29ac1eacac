"""Tests for :mod:`scripts.tools.faults.soak`."""

from __future__ import annotations

from itertools import islice

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.attacks import false_messages
from scripts.tools.faults.scenarios import SCENARIOS
from scripts.tools.faults.soak import FAULTS, NEXT_ROW_TIMEOUT, Findings


class FindingsTests(SynchronousTestCase):
    def test_good(self) -> None:
        """Memory may grow during the warm-up and vary a little afterwards."""
        found = Findings(4, 80, (2.0, "redis-killed"), {"w": [50.0, 80.0, 90.0, 82.0]})
        self.assertEqual(found.problems(), [])
        self.assertIn("80 MiB after the warm-up, 90 at most", found.lines()[-1])

    def test_problems(self) -> None:
        """Growing memory, and rows that arrive late, are reported."""
        found = Findings(
            4, 80, (NEXT_ROW_TIMEOUT, "redis-killed"), {"w": [50.0, 80.0, 85.0, 90.0]}
        )
        self.assertEqual(
            found.problems(),
            [
                "after redis-killed, a writer's next row took 15 s",
                "the memory of w grew from 80 to 90 MiB",
            ],
        )

    def test_parts_exist(self) -> None:
        """Each fault is a scenario, and each kind of message has enough messages."""
        self.assertLessEqual(set(FAULTS), SCENARIOS.keys())
        for _, messages, count in false_messages():
            self.assertEqual(len(list(islice(messages, count))), count)
