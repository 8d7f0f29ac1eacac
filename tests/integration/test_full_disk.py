"""Tests with a full disk under the journal and the log of a real process."""

from __future__ import annotations

import errno
import json
import subprocess
from pathlib import Path

from twisted.trial.unittest import SkipTest
from typing_extensions import override

from tests.integration.deployment import DeploymentTestCase, get_over_socket


class FullDiskTests(DeploymentTestCase):
    """The journal and the log of the reader are on a disk of 256 KiB."""

    @override
    def setUp(self) -> None:
        super().setUp()
        self.disk = self.folder / "disk"
        self.disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(self.disk)]
        try:
            subprocess.run(mount, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SkipTest(f"this user cannot mount a disk: {error}") from None
        self.addCleanup(subprocess.run, ["umount", "-l", str(self.disk)], check=True)
        self.addCleanup(self.kill_all)
        for name in ("journal.jsonl", "worker.log"):
            (self.folder / name).symlink_to(self.disk / name)
        own = self.worker["synapse_replication"]
        own["row_sink"]["config"]["path"] = str(self.disk / "journal.jsonl")
        self.worker["worker_listeners"] = [
            {"type": "metrics", "path": str(self.folder / "reader1.page")}
        ]

    def details(self) -> list[str]:
        """Return why writers are stalled, according to the page."""
        page = get_over_socket(self.folder / "reader1.page", "/status.json")
        return [each["detail"] for each in json.loads(page)["writers"]]

    def test_everything_arrives(self) -> None:
        """
        While the disk is full, the page says why, and the process runs; when there is
        room again, each row arrives once, and the log says how many lines it lacks.
        """
        worker = self.start_both()
        self.write_upto(1)
        self.wait_for_rows(1)
        log = self.disk / "worker.log"
        with log.open("ab") as file:
            # The last page of a file is not full.
            file.write(b"." * (4095 - log.stat().st_size % 4096) + b"\n")
        fill(self.disk / "other")
        self.write_upto(300)
        full = "No space left on device"
        self.wait_until(
            "the page", lambda: any(full in each for each in self.details())
        )
        (self.disk / "other").unlink()
        self.wait_for_rows(300)
        self.wait_until("no stall", lambda: not any(self.details()))
        # The next line that is logged says it.
        self.stop(worker)
        self.assertIn(f"could not be written: {full}", self.log_of("worker"))


class DamagedJournalTests(DeploymentTestCase):
    """A line of the reader's journal is damaged."""

    def test_until_it_is_removed(self) -> None:
        """
        The page and the metric report the damage until its line is removed; all rows
        arrive meanwhile.
        """
        page = self.folder / "reader1.page"
        self.worker["worker_listeners"] = [{"type": "metrics", "path": str(page)}]
        worker = self.start_both()
        self.write_upto(1)
        self.wait_for_rows(1)
        journal = self.folder / "journal.jsonl"
        for number, (damage, text) in enumerate(
            (("not JSON\n", "1 damaged"), ("", ""))
        ):
            self.stop(worker)
            lines = journal.read_text().replace("not JSON\n", "")
            journal.write_text(lines + damage)
            worker = self.start("worker", self.worker)
            self.wait_until_up("worker", number + 2)
            status = json.loads(get_over_socket(page, "/status.json"))
            self.assertIn(text, status["damage"])
            self.assertEqual(bool(status["damage"]), bool(text))
            metrics = get_over_socket(page, "/metrics")
            is_exposed = "\nsynapse_replication_sink_damaged{" in metrics
            self.assertEqual(is_exposed, bool(text))


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
