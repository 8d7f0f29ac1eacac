"""Tests for :mod:`scripts.tools.bench.__main__`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from click.testing import CliRunner, Result
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.bench import __main__ as program, tasks
from scripts.tools.bench.tasks import Task


class RecordedRunner:
    """Runs nothing; returns figures in which our side is twice as good in each task."""

    def __init__(
        self, other: Path, rounds: int, quick: bool, print_line: object
    ) -> None:
        self.rounds = rounds

    def run(self, wanted: Iterable[Task]) -> list[tasks.Result]:
        """Return figures for each round."""
        return [
            tasks.Result(task, unit, [1000.0] * self.rounds, [500.0] * self.rounds)
            for task in wanted
            for unit in task.units
        ]


class CommandLineTests(SynchronousTestCase):
    """Tests for ``scripts/bench``."""

    def run_program(self, *arguments: str) -> Result:
        """Run the program with an environment that has no Synapse."""
        return CliRunner().invoke(program.bench, ["--peer", sys.executable, *arguments])

    def test_no_peer(self) -> None:
        """Without a real Synapse the benchmark fails with a hint."""
        self.patch(program, "_ASK_VERSION", "import no_such_module")
        done = self.run_program("--only", "parse")
        self.assertEqual(done.exit_code, 1)
        self.assertIn("has no matrix-synapse; install it there", done.output)

    def test_against(self) -> None:
        """The package is compared with another checkout; one side is required."""
        self.patch(program, "Runner", RecordedRunner)
        folder = self.mktemp()
        Path(folder).mkdir()
        run = CliRunner().invoke
        done = run(program.bench, ["--against", folder, "--only", "parse", "--json"])
        self.assertEqual(json.loads(done.output)["other"], str(Path(folder).resolve()))
        done = run(program.bench, ["--only", "parse"])
        self.assertEqual(done.exit_code, 2)
        self.assertIn("requires --peer or --against", done.output)

    def test_no_such_task(self) -> None:
        """An unknown task is an error that lists the tasks."""
        self.patch(program, "_ASK_VERSION", "print('1.2.3')")
        done = self.run_program("--only", "nothing")
        self.assertEqual(done.exit_code, 2)
        self.assertIn("the tasks are: parse, ", done.output)

    def test_report(self) -> None:
        """The table and the JSON have a line for each unit of each task."""
        self.patch(program, "_ASK_VERSION", "print('1.2.3')")
        self.patch(program, "Runner", RecordedRunner)
        done = self.run_program("--only", "end to end, 1,000/s", "--rounds", "3")
        self.assertIn("matrix-synapse 1.2.3", done.output)
        self.assertIn("end to end, 1,000/s, p50", done.output)
        self.assertIn("end to end, 1,000/s, p99", done.output)
        report = json.loads(self.run_program("--json", "--quick").output)
        self.assertEqual(report["other"], "matrix-synapse 1.2.3")
        self.assertEqual(len(report["load_at_start_and_end"]), 2)
        self.assertEqual(
            len(report["results"]),
            sum(len(task.units) for task in tasks.TASKS if not task.is_of_package),
        )
        self.assertEqual(report["results"][0]["ratio"], 2.0)
