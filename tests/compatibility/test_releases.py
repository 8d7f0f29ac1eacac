"""Tests that this tree continues what each earlier release has left behind."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tarfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg2
from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase
from typing_extensions import override

from synapse_replication.cli.main import cli
from synapse_replication.demo.check import WriterTally, compare
from synapse_replication.demo.course import Tail
from synapse_replication.demo.deployment import (
    READERS,
    WRITERS,
    DemoPlan,
    Deployment,
    wait_until_ready,
)
from synapse_replication.demo.script import STREAMS
from synapse_replication.pipeline.archive.job import (
    ArchiveProgress,
    ArchiveSettings,
    run_archive,
)
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.recordings.reader import shipped_recording
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from synapse_replication.wire.extension import encode_message, parse_message
from tests.compatibility.record import FOLDER, RATE, ROWS
from tests.pipeline.archives import keys_of

#: The time within which the readers must have all rows, in s.
PATIENCE = 60.0
_RELEASES = sorted(Path(__file__).parent.glob("*.tar.xz"))


class _Continued(Deployment):
    """A deployment with the files of another one, at new addresses."""

    def __init__(self, files: Path) -> None:
        super().__init__(DemoPlan(shipped_recording(), ROWS, RATE, use_redis=True))
        self._files = files
        for name in READERS:
            shutil.copy(files / self.journal_of(name).name, self.directory)
        # The first reader has stopped long before the others.
        behind = self.journal_of(READERS[0])
        lines = behind.read_bytes().splitlines(keepends=True)
        behind.write_bytes(b"".join(lines[: len(lines) // 2]))
        #: The number of entries in each journal that the release wrote.
        self.entries = {name: len(self.journal(name)) for name in READERS}

    def configuration_of(self, name: str) -> list[str]:
        """Return the options that name the configuration of an instance."""
        files = (self.directory / f"{each}.yaml" for each in ("homeserver", name))
        return [part for file in files for part in ("-c", str(file))]

    def _recorded(self, name: str) -> dict[str, Any]:
        text = (self._files / f"{name}.yaml").read_text()
        config: dict[str, Any] = json.loads(text.replace(FOLDER, str(self.directory)))
        return config

    @override
    def _shared_config(self) -> dict[str, Any]:
        now = super()._shared_config()
        return self._recorded("homeserver") | {
            key: now[key] for key in ("database", "redis")
        }

    @override
    def _own_config(self, name: str) -> dict[str, Any]:
        now, recorded = super()._own_config(name), self._recorded(name)
        for key in ("listeners", "worker_listeners"):
            if key in recorded:
                recorded[key] = now[key]
        if name in WRITERS:
            own = recorded["synapse_replication"]
            own["modules"] = now["synapse_replication"]["modules"]
        return recorded

    @override
    def _make_tables(self) -> None:
        with contextlib.closing(psycopg2.connect(self._dsn)) as connection:
            connection.cursor().execute((self._files / "database.sql").read_text())
            connection.commit()

    def tallies(self) -> list[WriterTally]:
        """Compare the rows of the tables, and the new rows in memory, with journals."""
        found = []
        for reader in READERS:
            journal = self.journal(reader)
            for stream in STREAMS.values():
                # A writer of a stream in memory begins anew.
                entries = journal[self.entries[reader] :]
                entries = entries if stream.in_memory else journal
                found += [
                    compare(
                        stream.name,
                        writer,
                        reader,
                        self.written_rows(stream, writer),
                        entries,
                    )
                    for writer in sorted(set(stream.writers.values()))
                ]
        return found


class ReleaseTests(SynchronousTestCase):
    def unpack(self, release: Path) -> Path:
        """Unpack the files of a release."""
        folder = Path(self.mktemp()).absolute()
        with tarfile.open(release) as archive:
            # Python 3.11.2, which is Debian 12's, has no filters.
            archive.extraction_filter = getattr(
                tarfile, "data_filter", lambda member, path: member
            )
            archive.extractall(folder)
        return folder

    def test_there_are_releases(self) -> None:
        """The files of at least one release are here."""
        self.assertIn("0.1.0.tar.xz", [path.name for path in _RELEASES])

    def test_continued(self) -> None:
        """
        Configuration, journals, stored positions and archive of each release are
        continued: each row of the release and of this tree arrives once, in order.
        """
        for release in _RELEASES:
            with self.subTest(release.name):
                self._continue(self.unpack(release))

    def _continue(self, files: Path) -> None:
        deployment = _Continued(files)
        try:
            deployment.start_servers()
            before = {
                (stream.name, writer): len(deployment.written_rows(stream, writer))
                for stream in STREAMS.values()
                if not stream.in_memory
                for writer in set(stream.writers.values())
            }
            self.assertGreater(sum(before.values()), ROWS // 2)
            self._run_processes(deployment)
            for tally in deployment.tallies():
                self.assertGreater(
                    tally.written,
                    before.get((tally.stream_name, tally.instance_name), 0),
                )
            self._archive(deployment, files / "archive")
        finally:
            deployment.close()

    def _run_processes(self, deployment: _Continued) -> None:
        for name in deployment.processes:
            options = deployment.configuration_of(name)
            checked = CliRunner().invoke(cli, ["check-config", *options])
            self.assertEqual(checked.exit_code, 0, checked.output)
        deployment.start_processes()
        wait_until_ready(deployment.processes.values())
        deployment.let_writers_begin()
        logs = [Tail(deployment.log_of(name)) for name in WRITERS]
        deadline = time.monotonic() + PATIENCE
        while not (
            all(log.finished for log in logs)
            and all(tally.is_good for tally in deployment.tallies())
        ):
            for process in deployment.processes.values():
                process.check()
            if time.monotonic() > deadline:
                bad = [tally for tally in deployment.tallies() if not tally.is_good]
                self.fail(f"rows are missing, or came twice: {bad}")
            time.sleep(0.2)
            for log in logs:
                log.read_new_lines()
        stopped = deployment.stop_processes()
        self.assertEqual(set(stopped.values()), {0}, stopped)

    def _archive(self, deployment: _Continued, archive: Path) -> None:
        keys = [
            (stream.name, writer, token)
            for stream in STREAMS.values()
            if not stream.in_memory
            for writer in set(stream.writers.values())
            for token, _ in deployment.written_rows(stream, writer)
        ]
        before = Counter(keys_of(archive))
        self.assertGreater(before.total(), 0)
        self.assertLess(before.total(), len(keys))
        files = deployment.configuration_of(MAIN_INSTANCE)[1::2]
        run_archive(
            ArchiveSettings(
                str(archive), PipelineSettings.of_config(files), [], once=True
            ),
            ArchiveProgress(io.StringIO()),
        )
        self.assertEqual(Counter(keys_of(archive)), Counter(keys))

    def test_messages(self) -> None:
        """The messages of each process of each release are understood."""
        for release in _RELEASES:
            text = (self.unpack(release) / "extension.jsonl").read_text()
            messages = [parse_message(line.encode()) for line in text.splitlines()]
            self.assertEqual(
                {message.instance_name for message in messages}, {*WRITERS, *READERS}
            )
            for message in messages:
                self.assertEqual(message.unknown_fields, 0)
                self.assertEqual(parse_message(encode_message(message)), message)
