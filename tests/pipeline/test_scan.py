"""Tests for tasks on executors."""

from __future__ import annotations

import os
from itertools import chain

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline import scan
from synapse_replication.pipeline.spark.session import spark_errors_shortened
from tests.pipeline.shared_session import shared_session


class TaskTests(SynchronousTestCase):
    """Tests for :func:`.scan.run_tasks`."""

    def test_on_executors(self) -> None:
        """Tasks run in other processes; their results are in the order of the tasks."""

        def work(task: str) -> tuple[str, int]:
            return task.upper(), os.getpid()

        found = scan.run_tasks(work, ["a", "b", "c"], shared_session())
        self.assertEqual([text for text, _ in found], ["A", "B", "C"])
        self.assertNotIn(os.getpid(), [pid for _, pid in found])
        self.assertEqual(scan.run_tasks(work, [], shared_session()), [])

    def test_failure(self) -> None:
        """The error of a task is raised in the driver."""

        def work(task: int) -> None:
            raise PipelineError(f"task {task} failed")

        with self.assertRaises(PipelineError) as caught, spark_errors_shortened():
            scan.run_tasks(work, [7], shared_session())
        self.assertEqual(str(caught.exception), "task 7 failed")


class GroupedTests(SynchronousTestCase):
    """Tests for :func:`.scan.grouped`."""

    def tasks(self, files: int, size: int) -> int:
        """Return the number of tasks for files of the same size, in bytes."""
        groups = scan.grouped(range(files), lambda file: size)
        self.assertEqual(sorted(chain.from_iterable(groups)), list(range(files)))
        sizes = [len(group) for group in groups]
        self.assertLessEqual(max(sizes) - min(sizes), 1)
        return len(groups)

    def test_count(self) -> None:
        """Small files share a task; a large archive has more tasks than a small one."""
        self.assertEqual(self.tasks(1, 10**9), 1)
        self.assertEqual(self.tasks(97, 1000), 2)
        self.assertEqual(self.tasks(97, 300_000), 13)
        self.assertEqual(self.tasks(1000, 300_000), 64)
        # 100 GiB, as of five billion rows.
        self.assertEqual(self.tasks(40_000, 100 * 2**30 // 40_000), 1599)
