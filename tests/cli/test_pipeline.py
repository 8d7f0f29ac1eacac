"""Tests for :mod:`synapse_replication.cli.pipeline`."""

from __future__ import annotations

import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

#: The command line of somebody who has not installed Spark.
_WITHOUT_SPARK = """
import sys
sys.modules["pyspark"] = None
from synapse_replication.cli.main import main
main()
"""


def run_without_spark(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command where PySpark cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT_SPARK, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


class WithoutSparkTests(SynchronousTestCase):
    """What people see who have not installed the extra."""

    def test_job(self) -> None:
        """A job says in one line what to install, and fails."""
        done = run_without_spark("pipeline", "purge", "--help")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertIn("pip install 'synapse_replication[spark]'", done.stderr)

    def test_everything_else(self) -> None:
        """The rest of the command line works, and names the jobs' group."""
        done = run_without_spark("--help")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("pipeline", done.stdout)
