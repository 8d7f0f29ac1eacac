"""Tests for :mod:`scripts.tools.bench.runner`."""

from __future__ import annotations

import sys

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.bench.runner import BenchError, run_measure, values
from scripts.tools.bench.tasks import Unit


def program(code: str) -> list[str]:
    """Return the command that runs a program of these lines."""
    return [sys.executable, "-c", f"import json, sys\n{code}"]


class RunMeasureTests(SynchronousTestCase):
    """One measure in a process of its own."""

    def test_answer(self) -> None:
        """The last line is the answer; the measure gets its name and parameters."""
        code = "print('a warning'); print(json.dumps([*sys.argv[1:]]))"
        answer = run_measure(program(code), "parse", {"lines": 5})
        self.assertEqual(answer, ["parse", '{"lines": 5}'])

    def test_failure(self) -> None:
        """A side that fails ends the benchmark, with what the side said."""
        with self.assertRaisesRegex(BenchError, r"(?s)parse failed .*no synapse"):
            run_measure(program("sys.exit('no synapse here')"), "parse", {})

    def test_silence(self) -> None:
        """A side that answers nothing has failed, too."""
        with self.assertRaisesRegex(BenchError, "parse failed"):
            run_measure(program(""), "parse", {})

    def test_never_ends(self) -> None:
        """A side that hangs ends the benchmark after a while."""
        with self.assertRaisesRegex(BenchError, r"did not end in 0\.5 s"):
            run_measure(
                program("import threading; threading.Event().wait()"),
                "parse",
                {},
                time_limit=0.5,
            )


class ValuesTests(SynchronousTestCase):
    """What is taken from an answer."""

    def test_units(self) -> None:
        """A time becomes a rate of what was done; all else is as it is."""
        answer = {"seconds": 2.0, "p50": 0.5, "p99": 7.0}
        self.assertEqual(values([Unit.PER_SECOND], answer, 100), [50.0])
        self.assertEqual(values([Unit.P50, Unit.P99], answer, 100), [0.5, 7.0])
