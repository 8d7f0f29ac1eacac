"""Tests for :mod:`synapse_replication.cli.pipeline`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.pipeline import pipeline_command

#: Code that hides Spark, as if the extra were not installed.
_HIDE_SPARK = """
import sys
for name in ("pyspark", "py4j", "pyarrow", "pandas", "deltalake"):
    sys.modules[name] = None
"""

_MAIN = """
from synapse_replication.cli.main import main
main()
"""

#: A script that runs command lines in order, and prints their results as JSON.
_RUN = """
import json, sys
from click.testing import CliRunner
from synapse_replication.cli.main import cli
results = []
for line in json.loads(sys.argv[1]):
    result = CliRunner().invoke(cli, line, prog_name="synapse-replication")
    results.append([result.exit_code, result.output, str(result.exception)])
imported = sorted({"pyspark", "pyarrow", "pandas", "py4j"} & set(sys.modules))
print(json.dumps([results, imported]))
"""


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_lines(script: str, lines: Sequence[Sequence[str]]) -> Any:
    """Run command lines with :data:`_RUN`, and return their output."""
    done = run_script(script, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class HelpTests(SynchronousTestCase):
    """Tests for the help of the group, and of each job."""

    LINES = (
        ("--help",),
        ("pipeline", "--help"),
        *(("pipeline", name, "--help") for name in pipeline_command.commands),
    )

    def check(self, results: Sequence[tuple[int, str, str]]) -> None:
        for line, (status, output, _) in zip(self.LINES, results, strict=True):
            self.assertEqual(status, 0, (line, output))
            words = " ".join(line[:-1])
            self.assertIn(f"Usage: synapse-replication {words}".rstrip(), output)
        for name in pipeline_command.commands:
            self.assertRegex(results[1][1], rf"(?m)^  {name} ")

    def test_without_spark(self) -> None:
        """The help is shown even if Spark is not installed."""
        results, _ = run_lines(_HIDE_SPARK + _RUN, self.LINES)
        self.check(results)

    def test_quick(self) -> None:
        """The help does not import Spark."""
        results, imported = run_lines(_RUN, self.LINES)
        self.check(results)
        self.assertEqual(imported, [])


class WithoutSparkTests(SynchronousTestCase):
    """Tests for running jobs if the extra is not installed."""

    def test_jobs(self) -> None:
        """Each job that needs the extra fails, and names the package to install."""
        folder = self.mktemp()
        dsn = "--dsn=host=127.0.0.1"
        jobs = {
            "archive": (dsn, "--archive", folder, "--once"),
            "audit": (dsn,),
            "export": ("--archive", folder, "--out", folder),
            "purge": ("--archive", folder, "--before", "2026-01-31"),
            "report": (dsn, "--out", folder),
        }
        # The bootstrap needs only the driver of the database.
        self.assertEqual({*jobs, "bootstrap"}, set(pipeline_command.commands))
        lines = [("pipeline", name, *arguments) for name, arguments in jobs.items()]
        results, _ = run_lines(_HIDE_SPARK + _RUN, lines)
        for (_, name, *_), (status, output, error) in zip(lines, results, strict=True):
            self.assertEqual(status, 2, (name, output))
            self.assertIn(
                "pip install 'synapse_replication[spark]'", output + error, name
            )

    def test_one_line(self) -> None:
        """The error is one line, without a traceback."""
        arguments = ("purge", "--archive", "x", "--before", "2026-01-31")
        done = run_script(_HIDE_SPARK + _MAIN, "pipeline", *arguments)
        self.assertEqual(done.returncode, 2)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertIn("pip install 'synapse_replication[spark]'", done.stderr)
