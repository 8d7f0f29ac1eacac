"""Tests for :mod:`scripts.tools.bench.runner`."""

from __future__ import annotations

import sys

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.bench.runner import BenchError, run_measure, values
from scripts.tools.bench.tasks import Unit


def program(code: str) -> list[str]:
    """Return the command that runs the given Python code."""
    return [sys.executable, "-c", f"import json, sys\n{code}"]


class RunMeasureTests(SynchronousTestCase):
    """Tests for one measure in a process of its own."""

    def test_answer(self) -> None:
        """The last line is the result; the measure gets its name and parameters."""
        code = "print('a warning'); print(json.dumps([*sys.argv[1:]]))"
        answer = run_measure(program(code), "parse", {"lines": 5})
        self.assertEqual(answer, ["parse", '{"lines": 5}'])

    def test_failure(self) -> None:
        """A side that fails ends the benchmark with its error output."""
        with self.assertRaisesRegex(BenchError, r"(?s)parse failed .*no synapse"):
            run_measure(program("sys.exit('no synapse here')"), "parse", {})

    def test_no_output(self) -> None:
        """A side without output has failed."""
        with self.assertRaisesRegex(BenchError, "parse failed"):
            run_measure(program(""), "parse", {})

    def test_never_ends(self) -> None:
        """A side that hangs ends the benchmark after the time limit."""
        with self.assertRaisesRegex(BenchError, r"did not end in 0\.5 s"):
            run_measure(
                program("import threading; threading.Event().wait()"),
                "parse",
                {},
                time_limit=0.5,
            )


class ValuesTests(SynchronousTestCase):
    """Tests for the values taken from a result."""

    def test_units(self) -> None:
        """A time becomes a rate; all other values are unchanged."""
        answer = {"seconds": 2.0, "p50": 0.5, "p99": 7.0}
        self.assertEqual(values([Unit.PER_SECOND], answer, 100), [50.0])
        self.assertEqual(values([Unit.P50, Unit.P99], answer, 100), [0.5, 7.0])
