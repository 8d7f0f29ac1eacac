"""Tests for :mod:`scripts.tools.faults.synapse.meter`."""

from __future__ import annotations

import json

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.synapse.meter import read_findings


def line(stream: str, writer: str, token: int, *, is_announced: bool = False) -> str:
    """Return a line of the meter's output."""
    return json.dumps(
        {
            "stream_name": stream,
            "instance_name": writer,
            "token": token,
            "seconds": 15.2,
            "is_announced": is_announced,
        }
    )


class ReadFindingsTests(SynchronousTestCase):
    def test_findings(self) -> None:
        """
        The lost rows are listed in order, without those that were announced late.
        """
        output = "\n".join(
            [
                line("events", "w2", 12),
                line("events", "w1", 7),
                line("caches", "w1", 7),
                line("events", "w2", 12, is_announced=True),
                json.dumps({"summary": {"lost": 2}}),
            ]
        )
        self.assertEqual(read_findings(output), ("caches 7 of w1", "events 7 of w1"))

    def test_nothing(self) -> None:
        """If only the summary was printed, no row was lost."""
        self.assertEqual(read_findings(json.dumps({"summary": {}}) + "\n"), ())
