"""Tests that this tree continues what each earlier release has left behind."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg2
from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase
from typing_extensions import override

from synapse_replication.cli.main import cli
from synapse_replication.demo.check import WriterTally, compare
from synapse_replication.demo.deployment import (
    READERS,
    WRITERS,
    DemoPlan,
    Deployment,
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
from tests.pipeline.shared_session import shared_session

#: The files of each release.
RELEASES = sorted(Path(__file__).parent.glob("*.tar.xz"))


class ContinuedDeployment(Deployment):
    """A deployment with the files of another one, at new addresses."""

    def __init__(self, files: Path) -> None:
        super().__init__(DemoPlan(shipped_recording(), ROWS, RATE, use_redis=True))
        self._files = files
        self.archive = files / "archive"
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

    def add_row(self, name: str, writer: str) -> None:
        """Write the last row of a writer once more, with the next id."""
        stream = STREAMS[name]
        with contextlib.closing(psycopg2.connect(self._dsn)) as connection:
            cursor = connection.cursor()
            cursor.execute(
                f"INSERT INTO {stream.table} SELECT (jsonb_populate_record("
                f"last, jsonb_build_object('stream_id', nextval('{stream.sequence}')))"
                f").* FROM {stream.table} AS last WHERE instance_name = %s "
                "ORDER BY stream_id DESC LIMIT 1 RETURNING stream_id",
                (writer,),
            )
            ((token,),) = cursor.fetchall()
            cursor.execute(
                "UPDATE stream_positions SET stream_id = %s "
                "WHERE stream_name = %s AND instance_name = %s",
                (token, name, writer),
            )
            assert cursor.rowcount == 1
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


class ReleaseCase(SynchronousTestCase):
    """A test of a deployment that has the files of a release."""

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

    @contextlib.contextmanager
    def continued(self, release: Path) -> Iterator[ContinuedDeployment]:
        """Start the servers of a deployment with the files of a release."""
        deployment = ContinuedDeployment(self.unpack(release))
        try:
            deployment.start_servers()
            yield deployment
        finally:
            deployment.close()

    def check_archive(self, deployment: ContinuedDeployment) -> None:
        """Check that the archive of a release is continued up to the last row."""
        keys = [
            (stream.name, writer, token)
            for stream in STREAMS.values()
            if not stream.in_memory
            for writer in set(stream.writers.values())
            for token, _ in deployment.written_rows(stream, writer)
        ]
        before = Counter(keys_of(deployment.archive))
        self.assertGreater(before.total(), 0)
        self.assertLess(before.total(), len(keys))
        files = deployment.configuration_of(MAIN_INSTANCE)[1::2]
        run_archive(
            ArchiveSettings(
                str(deployment.archive),
                PipelineSettings.of_config(files),
                [],
                once=True,
            ),
            ArchiveProgress(io.StringIO()),
        )
        self.assertEqual(Counter(keys_of(deployment.archive)), Counter(keys))


class ReleaseTests(ReleaseCase):
    """Tests without processes; :mod:`tests.external.long.test_releases` starts them."""

    def test_there_are_releases(self) -> None:
        """The files of at least one release are here."""
        self.assertIn("0.1.0.tar.xz", [path.name for path in RELEASES])

    def test_files(self) -> None:
        """Configuration, stored rows and archive of each release are understood.

        The archive gets the rows of the database that it lacks, and each row once.
        """
        # The job uses the session that is running.
        shared_session()
        for release in RELEASES:
            with self.subTest(release.name), self.continued(release) as deployment:
                for name in deployment.processes:
                    options = deployment.configuration_of(name)
                    checked = CliRunner().invoke(cli, ["check-config", *options])
                    self.assertEqual(checked.exit_code, 0, checked.output)
                deployment.add_row("events", "event_writer1")
                self.check_archive(deployment)

    def test_messages(self) -> None:
        """The messages of each process of each release are understood."""
        for release in RELEASES:
            text = (self.unpack(release) / "extension.jsonl").read_text()
            messages = [parse_message(line.encode()) for line in text.splitlines()]
            self.assertEqual(
                {message.instance_name for message in messages}, {*WRITERS, *READERS}
            )
            for message in messages:
                self.assertEqual(message.unknown_fields, 0)
                self.assertEqual(parse_message(encode_message(message)), message)
