"""Tests for the options of :mod:`scripts.tools.faults.__main__`.

:mod:`tests.external.long.test_faults` runs a scenario.
"""

from __future__ import annotations

from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.__main__ import faults


class FaultsTests(SynchronousTestCase):
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
