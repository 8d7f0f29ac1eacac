"""Tests for commands between two real processes, with the manual's example."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.integration.deployment import DeploymentTestCase

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


class CommandsExampleTests(DeploymentTestCase):
    def environment(self, command: str) -> Mapping[str, str]:
        paths = [str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def test_example(self) -> None:
        """Commands sent before the process has a link reach the other process."""
        self.shared["synapse_replication"] = {"streams": ["typing"]}
        self.main["synapse_replication"] = {
            "modules": [{"module": "commands.make_front_end"}]
        }
        self.worker["synapse_replication"] = {
            "command_sink": {"module": "commands.make_recorder"}
        }
        worker = self.start("worker", self.worker)
        self.wait_until(
            "the worker is subscribed",
            lambda: "Connected: redis\n" in self.log_of("worker"),
        )
        main = self.start("main", self.main)
        expected = [
            "syncing users: 1",
            "@alice:example.com was seen at 10.0.0.7",
            "matrix.example.org is up again",
            "master has sent up to 42",
            "lock cleanup/events is free",
        ]
        for line in expected:
            self.wait_until(line, lambda line=line: line in self.log_of("worker"))  # type: ignore[misc]
        # Only the newest acknowledgement was queued until the link was up.
        self.assertNotIn("has sent up to 41", self.log_of("worker"))
        self.assertEqual(self.stop(main), 0, self.log_of("main"))
        self.assertEqual(self.stop(worker), 0, self.log_of("worker"))
        self.assertNotIn("dropped", self.log_of("main"))
