"""Tests for the harness of a real Synapse, which tests.external.synapse runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import yaml
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import ServerStartError
from tests.support.synapse_peer import SynapseDeployment
from tests.support.synapse_process import WorkerSpec, log_problems


class LogProblemsTests(SynchronousTestCase):
    """Tests for log_problems."""

    def test_finds_errors_with_following_lines(self) -> None:
        """An error is reported with the lines that follow it; other lines are not."""
        lines = [
            "2026-01-01 - synapse - 1 - INFO - x - fine",
            "2026-01-01 - synapse - 2 - ERROR - x - bad",
            "Traceback (most recent call last):",
            "ValueError: 1",
        ]
        self.assertEqual(log_problems(lines), ["\n".join(lines[1:])])

    def test_bounds_each_problem(self) -> None:
        """
        The lines of an error are limited, so that a later error is a separate one.
        """
        bad = "t - synapse - 2 - CRITICAL - x - bad"
        self.assertEqual(log_problems([bad, "a", "b", bad], 2), [f"{bad}\na", bad])

    def test_good_log(self) -> None:
        """A log without errors has no problems."""
        self.assertEqual(log_problems(["t - synapse - 2 - WARNING - x - hm"]), [])


class SynapseDeploymentTests(SynchronousTestCase):
    """Tests for the configuration and the processes of a deployment."""

    def _deployment(self, body: str) -> SynapseDeployment:
        """Return a deployment whose processes run a given Python program."""

        def launcher(module: str, arguments: Sequence[str]) -> list[str]:
            return [sys.executable, "-c", body, module, *arguments]

        deployment = SynapseDeployment(
            database={"dbname": "synapse"},
            redis={"host": "127.0.0.1", "port": 6379},
            workers=[WorkerSpec("sync1", ("client",))],
            stream_writers={"typing": ["sync1"]},
            launchers={"master": launcher, "sync1": launcher},
        )
        self.addCleanup(deployment.stop)
        return deployment

    def test_configuration(self) -> None:
        """The files name every process in instance_map, and each worker has a file."""
        deployment = self._deployment("")
        shared = yaml.safe_load(deployment.config_file.read_text())
        self.assertEqual(sorted(shared["instance_map"]), ["main", "sync1"])
        self.assertEqual(shared["stream_writers"], {"typing": ["sync1"]})
        worker = yaml.safe_load(deployment.worker_file("sync1").read_text())
        self.assertEqual(worker["worker_name"], "sync1")
        self.assertEqual(len(worker["worker_listeners"]), 2)

    def test_process_that_ends(self) -> None:
        """
        A process that exits before it responds is reported with the end of its log.
        """
        deployment = self._deployment("raise SystemExit('no such database')")
        error = self.assertRaises(ServerStartError, deployment.start)
        self.assertIn("no such database", str(error))
        self.assertRaises(ServerStartError, lambda: deployment.main.pid)

    def test_stop_removes_the_folder(self) -> None:
        """stop() removes everything and may be called twice."""
        deployment = self._deployment("")
        deployment.stop()
        deployment.stop()
        self.assertFalse(deployment.directory.exists())
