"""Tests for :mod:`synapse_replication.pipeline.progress`."""

from __future__ import annotations

import io
import itertools
from types import SimpleNamespace

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline import progress
from synapse_replication.pipeline.progress import JobProgress, Tasks, tasks_of
from tests.pipeline.shared_session import shared_session


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class JobProgressTests(SynchronousTestCase):
    """Tests for the progress display of a job."""

    def test_lines(self) -> None:
        """
        In a log, there is one line for each step, for each change of its tasks and for
        each failure.
        """
        out = io.StringIO()
        ticks = itertools.count(100)
        clock = SimpleNamespace(monotonic=lambda: next(ticks))
        self.patch(progress, "time", clock)
        with JobProgress(out, 2) as shown:
            shown.begin("start Spark")
            shown.begin("compare ids")
            shown.show(Tasks(0, 0))
            shown.show(Tasks(3, 8, failed=2))
            shown.show(Tasks(5, 8, failed=2))

        self.assertEqual(
            out.getvalue().splitlines(),
            [
                "     1.0 s  step 1 of 2: start Spark",
                "     2.0 s  step 2 of 2: compare ids",
                "     3.0 s  2 tasks failed; Spark retries, or the job fails",
                "     4.0 s  step 2 of 2: compare ids: 3 tasks done, 5 left",
                "     5.0 s  step 2 of 2: compare ids: 5 tasks done, 3 left",
            ],
        )

    def test_names(self) -> None:
        """Names in a line cannot control a terminal."""
        for out in (io.StringIO(), _Terminal()):
            with JobProgress(out, 1) as shown:
                shown.write("writer a\u202eb\0")
            self.assertIn(r"writer a\u202eb\x00", out.getvalue())

    def test_terminal(self) -> None:
        """On a terminal, one progress bar shows the step and its tasks."""
        out = _Terminal()
        with JobProgress(out, 2) as shown:
            shown.begin("start Spark")
            shown.begin("compare ids")
            shown.show(Tasks(3, 8, failed=1))

        self.assertIn("step 2 of 2: compare ids", out.getvalue())
        self.assertIn("3/8", out.getvalue())
        self.assertIn("1 task failed; Spark retries, or the job fails", out.getvalue())

    def test_counted_files(self) -> None:
        """A job without Spark counts files, and may add steps after it has started."""
        out = _Terminal()
        with JobProgress(out, 1, unit="files") as shown:
            shown.begin("open the archive")
            shown.expect(2)
            shown.begin("receipts")
            shown.count(3, 8)
            shown.show(Tasks(3, 8))

        self.assertIn("step 1 of 1: open the archive", out.getvalue())
        self.assertIn("step 2 of 3: receipts", out.getvalue())
        self.assertIn("3/8", out.getvalue())
        self.assertIn("files", out.getvalue())

    def test_idle_session(self) -> None:
        """An idle session has no tasks."""
        self.assertEqual(tasks_of(shared_session()), Tasks(0, 0))
