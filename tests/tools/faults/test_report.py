"""Tests for :mod:`scripts.tools.faults.report`."""

from __future__ import annotations

import io
import json

from rich.console import Console
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.report import (
    show_deployments,
    show_deployments_json,
    show_json,
    show_table,
)
from scripts.tools.faults.run import Result
from scripts.tools.faults.synapse.course import DeploymentResult, StreamResult
from scripts.tools.faults.synapse.verdict import StreamTally

RESULTS = [
    Result("redis-killed", 10, 20, catch_ups=4, seconds=1.26, agreed=True),
    Result("main-killed", 10, 18, lost=2),
    Result("disk-full", skipped="only root may mount"),
    Result("reader-killed", error="reader1 ended"),
]


class ShowTests(SynchronousTestCase):
    def test_table(self) -> None:
        """
        The table has a line for each scenario; below it are the reasons for missing
        ones.
        """
        file = io.StringIO()
        show_table(Console(file=file, width=40), RESULTS)
        text = file.getvalue()
        rows = [
            [cell.strip() for cell in line.split("│")[1:-1]]
            for line in text.splitlines()
            if line.startswith("│")
        ]
        self.assertEqual(" ".join(rows[0]), "redis-killed 10 20 0 0 0 0 4 1.3 yes 0 0")
        self.assertEqual(" ".join(rows[1]), "main-killed 10 18 0 2 0 0 0 never no 0 0")
        self.assertIn("disk-full skipped: only root may mount", text)
        self.assertIn("reader-killed failed: reader1 ended", text)

    def test_json(self) -> None:
        """The JSON has the seed, the figures, and whether each scenario was good."""
        value = json.loads(show_json(RESULTS, 7))
        self.assertEqual(value["seed"], 7)
        self.assertEqual(
            [scenario["good"] for scenario in value["scenarios"]],
            [True, False, True, False],
        )
        self.assertEqual(value["scenarios"][0]["seconds"], 1.26)


OURS = StreamTally("events", True, 9, 27, 27, lost=0, duplicated=0)
STOCK = StreamTally("events", False, 9, 9, 8, lost=1, duplicated=0)
DEPLOYMENTS = [
    DeploymentResult(
        "main-ours",
        (),
        (StreamResult(OURS, None, 0.44), StreamResult(STOCK, 2, None, failed_reads=3)),
        lost=("sync1 events 7 of persister1",),
    )
]


class ShowDeploymentsTests(SynchronousTestCase):
    def test_table(self) -> None:
        """
        The table has a line for each stream and kind of process; lost rows are below
        it.
        """
        file = io.StringIO()
        show_deployments(Console(file=file, width=40), DEPLOYMENTS)
        text = file.getvalue()
        rows = [
            [cell.strip() for cell in line.split("│")[2:-1]]
            for line in text.splitlines()
            if line.startswith("│")
        ]
        self.assertEqual(
            rows,
            [
                ["ours", "events", "9", "27", "27", "0", "0", "-", "-", "0.4"],
                ["stock", "events", "9", "9", "8", "1", "0", "2", "3", "never"],
            ],
        )
        self.assertIn("main-ours lost: sync1 events 7 of persister1", text)

    def test_json(self) -> None:
        """
        The JSON has the same figures; rows lost by stock processes do not make the
        result bad.
        """
        value = json.loads(show_deployments_json(DEPLOYMENTS, 7))
        self.assertEqual(value["seed"], 7)
        (deployment,) = value["deployments"]
        self.assertIs(deployment["good"], True)
        self.assertEqual(deployment["streams"][1]["tally"]["lost"], 1)
