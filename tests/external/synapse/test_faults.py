"""Tests that the checker of real deployments finds lost rows, on a real Synapse."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.external import skip_reason

skip = skip_reason("synapse")

COMMAND = [
    *(sys.executable, "-m", "scripts.tools.faults", "--json"),
    *("--host", "synapse", "--deployment", "ours", "--nemesis", "miss-one-events"),
]


class CheckerTests(SynchronousTestCase):
    """Tests with five processes on ours, whose reader misses one event per round."""

    def check(self, *arguments: str) -> tuple[int, int, Any]:
        """Return the exit status, the number of lost rows, and the tally of events."""
        done = subprocess.run(
            [*COMMAND, *arguments], capture_output=True, check=False, timeout=400
        )
        self.assertIn(done.returncode, (0, 1), done.stderr)
        (found,) = json.loads(done.stdout)["deployments"]
        self.assertEqual(found["error"], "")
        tallies = {one["tally"]["stream"]: one["tally"] for one in found["streams"]}
        return done.returncode, len(found["lost"]), tallies["events"]

    def test_nothing_is_lost(self) -> None:
        """Each missed event is fetched and shown."""
        status, lost, events = self.check("--rounds", "3")
        self.assertEqual((status, lost), (0, 0))
        self.assertEqual(events["delivered"], events["due"])
        self.assertGreaterEqual(events["committed"], 3)

    def test_deliberate_bug(self) -> None:
        """
        A reader that drops what it fetched loses the missed events, and the checker
        names them.
        """
        bug = "scripts.tools.faults.synapse.bugs.drop_fetched_events"
        status, lost, events = self.check(
            "--rounds", "3", "--patience", "4", "--bug", bug
        )
        self.assertEqual(status, 1)
        self.assertGreater(lost, 0)
        self.assertEqual(events["lost"], lost)
