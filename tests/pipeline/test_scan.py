"""Tests for tasks that read many rows."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline import scan


class TaskTests(SynchronousTestCase):
    """Tasks that run in threads of this process."""

    def test_at_the_same_time(self) -> None:
        """Tasks run at the same time; their results are in the order of the tasks."""
        self.patch(os, "cpu_count", lambda: 2)
        both = threading.Barrier(2)

        def work(task: str) -> str:
            both.wait(60)
            return task.upper()

        self.assertEqual(scan.run_tasks(work, ["a", "b"], None), ["A", "B"])

    def test_failure(self) -> None:
        """The first failure is raised, and no further tasks are begun."""
        all_cancelled = threading.Event()
        begun = []

        class Threads(ThreadPoolExecutor):
            def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
                future = super().submit(*args, **kwargs)
                if args[-1] == 9:
                    future.add_done_callback(lambda _: all_cancelled.set())
                return future

        def work(task: int) -> None:
            begun.append(task)
            if task:
                all_cancelled.wait(60)
            raise ValueError(task)

        self.patch(scan, "ThreadPoolExecutor", Threads)
        self.patch(os, "cpu_count", lambda: 1)
        error = self.assertRaises(ValueError, scan.run_tasks, work, range(10), None)
        self.assertEqual(error.args, (0,))
        self.assertIn(begun, ([0], [0, 1]))
