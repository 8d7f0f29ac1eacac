"""Tests for recording the outcome of each test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

_ROOT = Path(__file__).resolve().parents[3]

#: The time within which the process must end, in s.
_TIMEOUT = 60.0

_TESTS = """
import os
import threading
from twisted.trial.unittest import TestCase

class Tests(TestCase):
    def test_a(self):
        pass
    def test_b(self):
        self.assertEqual(1, 2)
    def test_c(self):
        self.addCleanup(int, "x")
    def test_d(self):
        pass
    test_d.skip = "not now"
    def test_e(self):
        if "ABORT" in os.environ:
            os.abort()
        if "THREAD" in os.environ:
            threading.Thread(target=threading.Event().wait).start()
"""


class OutcomesTests(SynchronousTestCase):
    """Tests for the process that runs a module."""

    def run_tests(self, **environ: str) -> dict[str, str]:
        """Run the tests above and return their outcomes by method name."""
        folder = Path(self.mktemp())
        folder.mkdir()
        (folder / "test_some.py").write_text(_TESTS)
        subprocess.run(
            [
                *(sys.executable, "-m", "scripts.tools.synapse_suite.outcomes"),
                *("outcomes.jsonl", "test_some"),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(_ROOT), **environ},
            capture_output=True,
            check=False,
            timeout=_TIMEOUT,
        )
        lines = (folder / "outcomes.jsonl").read_text().splitlines()
        found = dict(json.loads(line) for line in lines)
        return {name.rpartition(".")[2]: outcome for name, outcome in found.items()}

    def test_outcomes(self) -> None:
        """Each test has its outcome; an error in a clean-up is not a success."""
        expected = {
            "test_a": "success",
            "test_b": "failure",
            "test_c": "error",
            "test_d": "skip",
            "test_e": "success",
        }
        self.assertEqual(self.run_tests(), expected)

    def test_killed(self) -> None:
        """If the process is killed, the outcomes so far are not lost."""
        found = self.run_tests(ABORT="1")
        self.assertEqual(found["test_a"], "success")
        self.assertNotIn("test_e", found)

    def test_thread(self) -> None:
        """The process ends, although a test left a thread that never ends."""
        self.assertEqual(self.run_tests(THREAD="1")["test_e"], "success")
