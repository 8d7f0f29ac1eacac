"""Tests that the rows of a removed writer reach its readers."""

from __future__ import annotations

import copy
import json
import signal
from typing import Any

from tests.integration.deployment import (
    DeploymentTestCase,
    expected_rows,
    get_over_socket,
)
from tests.support.link_proxy import Cut, LinkProxy


class RemovedWriterTests(DeploymentTestCase):
    """``notes`` moves from main to ``writer2``."""

    def setUp(self) -> None:
        super().setUp()
        self.page = self.folder / "page.sock"
        self.worker["worker_listeners"] = [{"type": "metrics", "path": str(self.page)}]
        del self.main["synapse_replication"]
        path = self.folder / "writer2.sock"
        self.shared["instance_map"]["writer2"] = {"path": str(path)}
        self.writer2: dict[str, Any] = {
            "worker_name": "writer2",
            "worker_listeners": [
                {
                    "type": "http",
                    "path": str(path),
                    "resources": [{"names": ["replication"]}],
                }
            ],
        }

    def writes_from(self, config: dict[str, Any], after: int) -> dict[str, Any]:
        """Return the configuration of a process that writes after ``after`` tokens."""
        section = {
            "modules": [
                {
                    "module": "tests.integration.writer_module.make_writer",
                    "config": {
                        "file": str(self.folder / "upto"),
                        "after": after,
                        "streams": ["notes"],
                    },
                }
            ]
        }
        return {**config, "synapse_replication": section}

    def configure_writers(self, *writers: str) -> None:
        """Configure other writers."""
        self.shared = copy.deepcopy(self.shared)
        self.shared["synapse_replication"]["streams"][1]["writers"] = list(writers)

    def wait_for_notes(self, upto: int) -> None:
        """Wait until the journal has ``upto`` tokens, each once and in order."""
        self.wait_until(
            f"{upto} tokens in the journal", lambda: len(self.journal("notes")) >= upto
        )
        entries = self.journal("notes")
        rows = [row for entry in entries for row in entry["rows"]]
        self.assertEqual(sorted(rows), sorted(expected_rows(upto)))
        for writer in {entry["writer"] for entry in entries}:
            tokens = [entry["token"] for entry in entries if entry["writer"] == writer]
            self.assertEqual(tokens, sorted(set(tokens)), writer)

    def statuses(self) -> dict[str, str]:
        """Return the condition of each writer of ``notes`` at the reader."""
        answer = get_over_socket(self.page, "/status.json")
        return {
            writer["instance_name"]: writer["condition"]
            for writer in json.loads(answer)["writers"]
            if writer["stream_name"] == "notes"
        }

    def wait_until_live(self, *writers: str) -> None:
        """Wait until exactly these writers are followed, and all of them are live."""
        expected = dict.fromkeys(writers, "live")
        self.wait_until(f"{writers} are live", lambda: self.statuses() == expected)

    def test_moved_while_the_reader_was_stopped(self) -> None:
        """
        A reader stopped during the move resumes from its positions and gets every row.
        """
        main = self.start("main", self.writes_from(self.main, 0))
        reader = self.start("worker", self.worker, name="reader")
        self.wait_until_up("reader")
        self.write_upto(5)
        self.wait_for_notes(5)
        self.assertEqual(self.stop(reader), 0)
        self.write_upto(10)
        self.wait_until_main_wrote(10)
        self.assertEqual(self.stop(main), 0)

        self.configure_writers("writer2")
        self.start("main", self.main)
        self.start("worker", self.writes_from(self.writer2, 10), name="writer2")
        self.wait_until_up("writer2")
        self.start("worker", self.worker, name="reader")
        self.write_upto(20)
        self.wait_for_notes(20)
        self.wait_until_live("writer2")
        log = self.log_of("reader")
        self.assertIn("Draining removed writer master of notes: rows in (6, 11]", log)
        self.assertIn("Removed writer master of notes is drained up to 11", log)

    def test_killed_and_moved_while_the_reader_ran(self) -> None:
        """A row that the old writer committed but did not send reaches the reader."""
        proxy = LinkProxy((self.shared["redis"]["host"], self.shared["redis"]["port"]))
        self.addCleanup(proxy.close)
        redis = self.shared["redis"] | {"host": "127.0.0.1", "port": proxy.port}
        old = {**self.writes_from(self.main, 0), "redis": redis}
        main = self.start("main", old)
        reader = self.start("worker", self.worker, name="reader")
        self.wait_until_up("reader")
        self.write_upto(5)
        self.wait_for_notes(5)
        proxy.cut(Cut.PUBLISHES)
        self.write_upto(6)
        self.wait_until_main_wrote(6)
        main.send_signal(signal.SIGKILL)
        main.wait()

        self.configure_writers("writer2")
        self.start("main", self.main)
        self.start("worker", self.writes_from(self.writer2, 6), name="writer2")
        self.write_upto(10)
        self.wait_for_notes(10)
        self.wait_until_live("writer2")
        self.assertIsNone(reader.poll())
