"""Tests for :mod:`scripts.tools.faults.soak`."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.attacks import false_messages
from scripts.tools.faults.deployment import FaultDeployment
from scripts.tools.faults.scenarios import SCENARIOS
from scripts.tools.faults.soak import FAULTS, NEXT_ROW_TIMEOUT, POOLS, Findings
from scripts.tools.faults.writer import delayed_calls_file


class FindingsTests(SynchronousTestCase):
    def test_good(self) -> None:
        """Everything may grow during the warm-up and vary a little afterwards."""
        found = Findings(4, 80, (2.0, "redis-killed"))
        for value in (50.0, *[80.0] * 10, 90.0, 83.0):
            found.measure("w", "memory", value)
            found.measure("w", "delayed calls", 3 + (value == 90.0))
        self.assertEqual(found.problems(), [])
        self.assertIn(
            "memory of w: 80.0 after the warm-up, 90.0 at most, 80.0 at the end (+0.0",
            found.lines()[2],
        )
        self.assertEqual(found.latest(), "w 83.0 MiB/3")

    def test_momentary_calls(self) -> None:
        """Calls that exist for a moment do not count, even if most samples have one."""
        found = Findings(4, 80, (2.0, "redis-killed"))
        for number in range(48):
            is_last = number >= 36
            found.measure("w", "delayed calls", 3 + (number % 3 < 1 + is_last))
        self.assertEqual(found.problems(), [])

    def test_problems(self) -> None:
        """
        Growth, more than a pool's bound, and rows that arrive late are reported.
        """
        found = Findings(4, 80, (NEXT_ROW_TIMEOUT, "redis-killed"))
        for number in range(24):
            found.measure("w", "memory", 80.0 + number)
            found.measure("w", "delayed calls", 3 + (number > 12))
            found.measure("w", "threads", POOLS["threads"] - 1 + (number > 12))
            found.measure("v", "threads", POOLS["threads"] + (number > 12))
        self.assertEqual(
            found.problems(),
            [
                "after redis-killed, a writer's next row took 15 s",
                "memory of w: 86.0 after the warm-up, 95.0 at the end",
                "delayed calls of w: 3.0 after the warm-up, 4.0 at the end",
                f"threads of v: {POOLS['threads'] + 1} at the end, {POOLS['threads']} "
                "allowed",
            ],
        )

    def test_file_that_is_being_written(self) -> None:
        """A file of delayed calls that is empty for a moment is no sample."""
        folder = Path(self.mktemp())
        folder.mkdir()
        process = SimpleNamespace(pid=os.getpid())
        deployment: Any = SimpleNamespace(processes={"w": process}, directory=folder)
        for text, expected in (("", None), ("7", 7)):
            delayed_calls_file(folder, "w").write_text(text)
            counts = FaultDeployment.counts_of(deployment, "w")
            self.assertEqual(counts.get("delayed calls"), expected)

    def test_parts_exist(self) -> None:
        """Each fault is a scenario, and each kind of message has enough messages."""
        self.assertLessEqual(set(FAULTS), SCENARIOS.keys())
        for _, messages, count in false_messages():
            self.assertEqual(len(list(islice(messages, count))), count)
