"""Tests for ``python -m synapse_replication``."""

from __future__ import annotations

import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

import synapse_replication


class MainTests(SynchronousTestCase):
    """Tests for the package run as a program."""

    def test_is_the_command(self) -> None:
        """The package runs the command ``synapse-replication``."""
        found = subprocess.run(
            [sys.executable, "-m", "synapse_replication", "--version"],
            capture_output=True,
            text=True,
            check=True,
        )
        self.assertIn(synapse_replication.__version__, found.stdout)
