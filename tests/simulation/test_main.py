"""Tests for the command line of the simulation."""

from __future__ import annotations

from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from tests.simulation.__main__ import main


class MainTests(SynchronousTestCase):
    def test_seeds(self) -> None:
        """A run of a range of seeds prints what was done and the result."""
        result = CliRunner().invoke(main, ["--seeds", "3:5", "--jobs", "1"])
        self.assertEqual(result.exit_code, 0, result.output)
        self.assertIn("2 seeds, 0 failed, in ", result.output)
        self.assertIn("rows delivered", result.output)

    def test_one(self) -> None:
        """A run of one seed with ``-v`` prints every event."""
        result = CliRunner().invoke(main, ["--seed", "3", "-v"])
        self.assertIn("the faults are over", result.output)
        self.assertIn("1 seeds, 0 failed", result.output)

    def test_no_range(self) -> None:
        """An invalid range is rejected with an example."""
        for text in ("3:3", "x", "1:y"):
            result = CliRunner().invoke(main, ["--seeds", text])
            self.assertEqual(result.exit_code, 2)
            self.assertIn("write for instance 0:200", result.output)
