"""Tests for :mod:`synapse_replication.pipeline.spark.noise`."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.spark.noise import (
    JavaErrors,
    filtered_stderr,
    without_noise,
)

_TRACEBACK = """\
Traceback (most recent call last):
  File "worker.py", line 5, in main
    read()
ConnectionError: the server went away
"""


def _filtered(text: str) -> list[str]:
    return list(without_noise(text.splitlines(keepends=True)))


class WithoutNoiseTests(SynchronousTestCase):
    """Tests for filtering the lines of Spark's output."""

    def test_noise(self) -> None:
        """
        Lines without information about the job are removed; all others are retained.
        """
        self.assertEqual(
            _filtered(
                "WARNING: Using incubator modules: jdk.incubator.vector\n"
                "2026-01-31 12:00:00 WARN DAGScheduler: Failed to cancel job group 7\n"
                "2026-01-31 12:00:00 ERROR Executor: no space left\n"
            ),
            ["2026-01-31 12:00:00 ERROR Executor: no space left\n"],
        )

    def test_traceback(self) -> None:
        """
        A worker's traceback is reduced to one line; the lines after it are retained.
        """
        self.assertEqual(
            _filtered(f"before\n{_TRACEBACK}after\n"),
            [
                "before\n",
                "a worker failed: ConnectionError: the server went away\n",
                "after\n",
            ],
        )


class FilteredStderrTests(SynchronousTestCase):
    """Tests for the output of a process that is started in the context."""

    def test_filtered(self) -> None:
        """The output is filtered even after the end of the context."""
        out = _Lines()
        self.patch(sys, "stderr", out)
        script = (
            "import sys; sys.stdin.readline(); "
            "sys.stderr.write('Using incubator modules\\nsomething to say\\n')"
        )
        own = os.fstat(2)
        errors = JavaErrors()
        errors.release()
        with filtered_stderr(errors) as stderr:
            # The filter must not receive what this process itself writes.
            self.assertEqual(os.fstat(2).st_ino, own.st_ino)
            process = subprocess.Popen(
                [sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=stderr
            )
        process.communicate(b"\n")

        self.assertTrue(out.written.wait(60))
        self.assertEqual(out.getvalue(), "something to say\n")

    def test_cause(self) -> None:
        """
        The lines before the start of Java are held back; one of them is the cause if
        Java does not start.
        """
        out = io.StringIO()
        self.patch(sys, "stderr", out)
        errors = JavaErrors()
        with filtered_stderr(errors) as stderr:
            script = "import sys; sys.stderr.write('a word\\nError: no heap\\nmore\\n')"
            subprocess.run([sys.executable, "-c", script], stderr=stderr, check=True)
        self.assertEqual(errors.cause, "Error: no heap")
        self.assertEqual(out.getvalue(), "")
        errors.release()
        self.assertEqual(out.getvalue(), "a word\nError: no heap\nmore\n")


class _Lines(io.StringIO):
    """A stream that sets an event when a line is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        if self.getvalue():
            self.written.set()
