"""Tests for :mod:`scripts.tools.faults.synapse.evidence`."""

from __future__ import annotations

import json

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.synapse.evidence import read_witness
from scripts.tools.faults.synapse.verdict import Delivery


class ReadWitnessTests(SynchronousTestCase):
    def test_start(self) -> None:
        """The first line has the positions at the start."""
        positions = {"events": {"persister1": 6}}
        line = json.dumps(["start", 12.5, positions])
        self.assertEqual(read_witness(line, []), ("start", 12.5, positions))

    def test_rows(self) -> None:
        """Further lines are deliveries; only streams in memory have eras."""
        starts = [10.0, 20.0]
        for stream, at, era in (
            ("events", 15.0, 0),
            ("typing", 5.0, 0),
            ("typing", 15.0, 1),
            ("typing", 25.0, 2),
        ):
            line = json.dumps(["rows", at, stream, "writer1", 3, []])
            self.assertEqual(
                read_witness(line, starts),
                ("rows", at, (Delivery(stream, 3, era), "writer1")),
            )
