"""Tests for :mod:`synapse_replication.demo.course`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.demo import course
from synapse_replication.demo.check import JournalEntry, WriterTally, read_entries
from synapse_replication.demo.course import DemoError, run_demo
from synapse_replication.demo.deployment import READERS, WRITERS, Deployment
from synapse_replication.demo.display import TextScreen
from synapse_replication.demo.script import DemoStream

TYPING = {"stream": "typing", "writer": "typing_writer", "token": 1, "rows": [["a"]]}
FINISHED = {"finished": True}


class ListScreen(TextScreen):
    """Records what is shown."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.lines: list[str] = []
        self.counts: dict[str, int] = {}

    def print_line(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, rows: dict[str, int], total: int) -> None:
        self.counts = rows


class FileDeployment:
    """A deployment whose processes finish their work immediately."""

    redis = None
    finishes = True
    status_page = "http://page.test/status"

    def __init__(self, directory: Path, written: Any, received: Any) -> None:
        directory.mkdir()
        self.processes: dict[str, Any] = {}
        self._directory = directory
        self._written = written
        for reader in READERS:
            self._put(self.journal_of(reader), received)

    def _put(self, path: Path, values: Any) -> None:
        path.write_text("".join(json.dumps(value) + "\n" for value in values))

    def start_servers(self) -> None: ...

    def start_processes(self) -> None: ...

    def stop_processes(self) -> dict[str, int | None]:
        return {"reader1": -9, "reader2": 0}

    def let_writers_begin(self) -> None:
        for writer in WRITERS:
            own = [FINISHED]
            if writer == "typing_writer":
                own = [*self._written, *own[: self.finishes]]
            self._put(self.log_of(writer), own)

    def log_of(self, writer: str) -> Path:
        return self._directory / f"{writer}.written"

    def journal_of(self, reader: str) -> Path:
        return self._directory / f"{reader}.journal"

    def journal(self, reader: str) -> list[JournalEntry]:
        return read_entries(self.journal_of(reader))

    def written_rows(self, stream: DemoStream, writer: str) -> list[tuple[int, Any]]:
        return [
            (entry.token, row)
            for entry in read_entries(self.log_of(writer))
            if entry.stream_name == stream.name
            for row in entry.rows
        ]


class RunDemoTests(SynchronousTestCase):
    finishes = True

    def run_with(self, written: Any, received: Any) -> list[WriterTally]:
        self.screen = ListScreen()
        deployment = FileDeployment(Path(self.mktemp()), written, received)
        deployment.finishes = self.finishes
        return run_demo(cast(Deployment, deployment), self.screen, 1, with_faults=False)

    def test_ends_when_readers_have_caught_up(self) -> None:
        """Once each reader has every written row, all rows are compared."""
        tallies = self.run_with([TYPING], [TYPING])
        self.assertEqual(self.screen.counts, {"written": 1, "reader1": 1, "reader2": 1})
        found = [tally for tally in tallies if tally.stream_name == "typing"]
        self.assertEqual([tally.reader for tally in found], ["reader1", "reader2"])
        self.assertTrue(all(tally.is_good for tally in found))

    def test_every_writer_of_every_stream_is_compared(self) -> None:
        """There is a tally for each stream, writer and reader."""
        tallies = self.run_with([TYPING], [TYPING])
        self.assertEqual(len(tallies), 2 * (2 + 2 + 1 + 1 + 1 + 1))

    def test_exit_status_is_reported(self) -> None:
        """A process with a failing exit status is reported."""
        self.run_with([TYPING], [TYPING])
        self.assertIn("reader1 ended with status -9", self.screen.lines)

    def test_failed_writer_ends_the_demo(self) -> None:
        """If a writer fails, the demo ends with its error."""
        with self.assertRaises(DemoError) as caught:
            self.run_with([{"failed": "the disk is full"}], [])
        self.assertIn("the disk is full", str(caught.exception))

    def test_hanging_writer_ends_the_demo(self) -> None:
        """If a writer stops writing before it has finished, the demo ends."""
        self.patch(course, "WRITE_TIMEOUT", 0.0)
        self.patch(course, "PROGRESS_INTERVAL", 0.0)
        self.finishes = False
        with self.assertRaises(DemoError) as caught:
            self.run_with([TYPING], [TYPING])
        self.assertIn("after 1 of 1 rows", str(caught.exception))
