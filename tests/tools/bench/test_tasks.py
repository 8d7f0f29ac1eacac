"""Tests for :mod:`scripts.tools.bench.tasks`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.bench import ours_redis, ours_storage, ours_wire, ours_write
from scripts.tools.bench.tasks import TASKS, Result, Unit


class ResultTests(SynchronousTestCase):
    def test_higher_rate_is_better(self) -> None:
        """The ratio compares medians, so that one slow round does not change it."""
        result = Result(TASKS[0], Unit.PER_SECOND, [10.0, 1.0, 12.0], [5.0, 5.0, 50.0])
        self.assertEqual(result.ratio, 2.0)

    def test_lower_times_and_bytes_are_better(self) -> None:
        """For times and bytes, less is better."""
        result = Result(TASKS[0], Unit.P99, [2.0], [8.0])
        self.assertEqual(result.ratio, 4.0)
        self.assertEqual(Result(TASKS[0], Unit.CPU, [0.0], [8.0]).ratio, float("inf"))

    def test_json_has_every_round(self) -> None:
        """The JSON contains the figures of every round."""
        shown = Result(TASKS[0], Unit.PER_SECOND, [1.0, 3.0], [2.0, 2.0]).to_json()
        self.assertEqual(
            shown["ours"],
            {"median": 2.0, "least": 1.0, "most": 3.0, "rounds": [1.0, 3.0]},
        )


class TaskTests(SynchronousTestCase):
    def test_every_task_is_done_by_our_side(self) -> None:
        """Each task has a unique name and an existing measure."""
        groups = {
            "redis": ours_redis.MEASURES,
            "storage": ours_storage.MEASURES,
            "wire": ours_wire.MEASURES,
            "write": ours_write.MEASURES,
        }
        for task in TASKS:
            self.assertIn(task.measure, groups[task.group])
        self.assertEqual(len({task.name for task in TASKS}), len(TASKS))

    def test_small_work_is_noticed(self) -> None:
        """Our side reports how long the work took."""
        self.assertGreater(ours_wire.MEASURES["parse"](lines=500)["seconds"], 0)
