"""Tests for :mod:`scripts.tools.faults.__main__` with one scenario."""

from __future__ import annotations

import json
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

from tests.external import skip_reason

skip = skip_reason("long")


class FaultsTests(SynchronousTestCase):
    """Tests with real processes under load."""

    def test_reader_killed(self) -> None:
        """If a reader is killed and restarted under load, every row arrives once."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "scripts.tools.faults"),
                *("--scenario", "reader-killed", "--rate", "60", "--json"),
            ],
            capture_output=True,
            check=False,
            timeout=110,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        (found,) = json.loads(done.stdout)["scenarios"]
        self.assertGreater(found["written"], 100)
        self.assertGreater(found["catch_ups"], 0)
        self.assertEqual(found["received"], 2 * found["written"])
        self.assertEqual(
            (found["lost"], found["duplicated"], found["reordered"], found["agreed"]),
            (0, 0, 0, True),
        )
