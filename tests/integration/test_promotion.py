"""Tests for a stream whose writer moves to another process while readers run."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

from tests.integration.deployment import (
    DeploymentTestCase,
    expected_rows,
    get_over_socket,
    read_resyncs,
)


class PromotionTests(DeploymentTestCase):
    """``notes`` and ``typing`` move from main to ``writer2``."""

    def setUp(self) -> None:
        super().setUp()
        self.metrics = self.folder / "metrics.sock"
        self.worker["worker_listeners"] = [
            {"type": "metrics", "path": str(self.metrics)}
        ]
        path = self.folder / "writer2.sock"
        self.shared["instance_map"]["writer2"] = {"path": str(path)}
        module = self.main["synapse_replication"]["modules"][0]
        self.writer2: dict[str, Any] = {
            "worker_name": "writer2",
            "worker_listeners": [
                {
                    "type": "http",
                    "path": str(path),
                    "resources": [{"names": ["replication"]}],
                }
            ],
            "synapse_replication": {
                "modules": [
                    {
                        "module": module["module"],
                        "config": module["config"] | {"after": 10},
                    }
                ]
            },
        }

    def promote(self) -> None:
        """Configure writer2 as the writer of both streams."""
        self.shared = copy.deepcopy(self.shared)
        self.shared["stream_writers"] = {"typing": "writer2"}
        self.shared["synapse_replication"]["streams"][1]["writers"] = "writer2"
        del self.main["synapse_replication"]["modules"]

    def resyncs(self) -> Counter[tuple[str, str]]:
        """Return the resyncs that the reader counted, by stream and kind."""
        return read_resyncs(get_over_socket(self.metrics, "/metrics"))

    def test_readers_get_every_row(self) -> None:
        """Running readers get every row, and fetch none from the database."""
        main = self.start("main", self.main)
        worker = self.start("worker", self.worker)
        self.wait_until_up("worker")
        self.write_upto(10)
        self.wait_for_rows(10)
        before = self.resyncs()
        self.assertEqual(self.stop(main), 0, self.log_of("main"))
        self.promote()
        self.start("main", self.main)
        self.start("worker", self.writer2, name="writer2")
        # A row of typing that is written before that would have to be fetched.
        self.wait_until_up("writer2")
        self.wait_until_linked("writer2")
        self.write_upto(20)
        for stream in ("notes", "typing"):
            self.wait_until(
                f"20 tokens of {stream}",
                lambda stream=stream: len(self.journal(stream)) >= 20,  # type: ignore[misc]
            )
        self.assertEqual(
            [row for entry in self.journal("notes") for row in entry["rows"]],
            expected_rows(20),
        )
        for stream in ("notes", "typing"):
            writers = [entry["writer"] for entry in self.journal(stream)]
            self.assertEqual(writers, ["master"] * 10 + ["writer2"] * 10, stream)
        # The reader fetches the rows of notes, including any below a position that it
        # reached without rows, from the new writer's backlog and not from the database.
        # Typing starts at 0, and its readers start there, too.
        more = self.resyncs() - before
        self.assertEqual(set(more), {("notes", "partial")})
        self.assertLessEqual(more.total(), 2)
        self.assertEqual(self.stop(worker), 0, self.log_of("worker"))
