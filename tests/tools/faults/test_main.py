"""Tests for :mod:`scripts.tools.faults.__main__` with one scenario."""

from __future__ import annotations

import json
import subprocess
import sys

from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.__main__ import faults


class FaultsTests(SynchronousTestCase):
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

    def test_unknown_scenario(self) -> None:
        """An unknown scenario is rejected with a list of scenarios."""
        done = CliRunner().invoke(faults, ["--scenario", "flood"])
        self.assertEqual(done.exit_code, 2)
        self.assertIn("disk-full", done.output)

    def test_options_of_the_other_host(self) -> None:
        """An option of another host is rejected by name."""
        for arguments, option in (
            (["--nemesis", "pause"], "--nemesis does not apply to --host demo"),
            (
                ["--host", "synapse", "--rate", "5"],
                "--rate does not apply to --host synapse",
            ),
        ):
            done = CliRunner().invoke(faults, arguments)
            self.assertEqual(done.exit_code, 2)
            self.assertIn(option, done.output)
