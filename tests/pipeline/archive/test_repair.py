"""Tests for :mod:`synapse_replication.pipeline.archive.repair` and ``.damage``.

An archive is damaged in each way, and then compared with the database after the repair.
:mod:`tests.external.cluster.test_store_repair` runs all tests on S3.
"""

from __future__ import annotations

import atexit
import functools
import io
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg2
from deltalake import DeltaTable
from pyarrow import fs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive import files
from synapse_replication.pipeline.archive.files import (
    ArchivedFile,
    DamagedFile,
    find_damage,
)
from synapse_replication.pipeline.archive.job import (
    ArchiveProgress,
    ArchiveSettings,
    run_archive,
)
from synapse_replication.pipeline.archive.repair import Repair, repair_archive
from synapse_replication.pipeline.archive.snapshot import open_snapshot, read_archive
from synapse_replication.pipeline.archive.store import ArchiveStore
from synapse_replication.pipeline.scan import Spark
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.testing.servers import shared_postgres
from tests.pipeline.archives import TODAY, keys_of, open_table, purge
from tests.pipeline.scans import read_here
from tests.pipeline.shared_session import shared_session
from tests.support.archive_database import (
    add_rows,
    copy_database,
    make_tables,
    read_keys,
)
from tests.support.object_store import use_server

#: The number of times that rows are written and archived.
ROUNDS = 4

LOG = "_delta_log"


def settings_of(archive: str, dsn: str) -> ArchiveSettings:
    """Return the settings of a run that archives a database."""
    source = PipelineSettings.of_dsn(dsn)
    return ArchiveSettings(archive, source, once=True, compact_files=99)


@functools.cache
def archived_database() -> tuple[str, str]:
    """Archive a database in several runs; return its DSN, and the archive's folder."""
    dsn = shared_postgres().new_database()
    make_tables(dsn)
    shared_session()
    folder = tempfile.mkdtemp(prefix="synapse-replication-archive-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for _ in range(ROUNDS):
        add_rows(dsn, 30)
        run_archive(settings_of(folder, dsn), ArchiveProgress(io.StringIO()))
    return dsn, folder


class RepairCase(SynchronousTestCase):
    """A test with a copy of the archive, and of its database."""

    def setUp(self) -> None:
        database, self.archived = archived_database()
        self.dsn = copy_database(database)
        self.archive = self.location()
        self.store = ArchiveStore.at(self.archive)
        fs.copy_files(
            self.archived,
            self.store.path(self.archive),
            destination_filesystem=self.store.filesystem,
        )
        self.uri = self.store.stream_uri("receipts")

    def location(self) -> str:
        """Return the location of the archive."""
        return str(Path(self.mktemp()).absolute())

    @property
    def settings(self) -> ArchiveSettings:
        """The settings of an archive run."""
        return settings_of(self.archive, self.dsn)

    def run_archive(self) -> str:
        """Archive what is new; return the output."""
        output = io.StringIO()
        run_archive(self.settings, ArchiveProgress(output))
        return output.getvalue()

    def repair(self, spark: Spark = shared_session) -> list[Repair]:
        """Repair the archive."""
        options = self.settings.source_options()
        assert options is not None
        self.steps: list[str] = []
        return repair_archive(self.archive, options, spark, self.steps.append)

    @property
    def files(self) -> list[ArchivedFile]:
        """The files of receipts, in the order of their tokens."""
        files = open_table(self.store).files
        return sorted(files, key=lambda file: file.token_range or ())

    def change(self, path: str, work: Callable[[bytes], bytes] | None) -> None:
        """Replace the content of a file below the table; ``None`` deletes the file."""
        filesystem = self.store.filesystem
        full = f"{self.store.path(self.uri)}/{path}"
        with filesystem.open_input_file(full) as file:
            content = file.read()
        filesystem.delete_file(full)
        if work is not None:
            with filesystem.open_output_stream(full) as file:
                file.write(work(content))

    def commit_name(self, version: int) -> str:
        """Return the path of a commit below the table."""
        return f"{LOG}/{version:020}.json"

    def check_repaired(self) -> None:
        """Check that the archive has exactly the rows of the database."""
        self.run_archive()
        self.assertEqual(keys_of(self.store), read_keys(self.dsn))
        self.assertEqual(self.repair(), [])


class RepairTests(RepairCase):
    """Tests with an archive in a local folder."""

    def test_damaged_files(self) -> None:
        """
        A file that is deleted, truncated, empty, or has a changed byte, is named with
        its table, tokens and the remedy; a repair reads its rows again.
        """
        flipped = b"\x10"
        ways: dict[str, Callable[[bytes], bytes] | None] = {
            "is missing": None,
            "has 100 bytes instead of": lambda content: content[:100],
            "has 0 bytes instead of": lambda content: b"",
            "CRC checksum verification failed": lambda content: (
                content[:40] + bytes([content[40] ^ flipped[0]]) + content[41:]
            ),
        }
        for reason, work in ways.items():
            file = self.files[1]
            self.change(file.path, work)
            if "CRC" not in reason:
                self.assertIn(reason, self.run_archive())
                with self.assertRaises(PipelineError) as caught:
                    read_archive(shared_session(), self.archive)
                self.assertIn("archive --repair", str(caught.exception))
            snapshot = open_snapshot(self.archive).verified(shared_session)
            (damaged,) = snapshot.damaged
            self.assertIn(reason, str(damaged))
            self.assertIn("receipts: the file", str(damaged))
            self.assertIn(f"tokens {file.token_range[0]} to", str(damaged))  # type: ignore[index]
            self.assertEqual(
                sum(
                    batch.num_rows
                    for batch in read_here(snapshot.typed_rows("receipts"))
                ),
                ROUNDS * 30 - damaged.file.row_count,
            )
            (repaired,) = self.repair()
            self.assertEqual((repaired.rows, repaired.lost), (file.row_count, 0))
            self.check_repaired()

    def test_rows_that_are_gone(self) -> None:
        """The number of rows that the database no longer has is reported."""
        with closing(psycopg2.connect(self.dsn)) as connection, connection:
            connection.cursor().execute(
                "DELETE FROM receipts_linearized WHERE stream_id IN (35, 36)"
            )
        self.change(self.files[1].path, None)
        (repaired,) = self.repair()
        self.assertEqual(repaired.lost, 2)
        self.assertIn("2 rows do not exist there any more", repaired.describe())
        self.check_repaired()

    def test_rows_that_cannot_be_converted(self) -> None:
        """A row of a damaged file that PostgreSQL cannot convert is named."""
        file = self.files[1]
        assert file.token_range is not None
        with closing(psycopg2.connect(self.dsn)) as connection, connection:
            connection.cursor().execute(
                "UPDATE receipts_linearized SET data = '{' WHERE stream_id = %s",
                (file.token_range[0],),
            )
        self.change(file.path, None)
        (repaired,) = self.repair()
        self.assertEqual((repaired.rows, repaired.lost), (file.row_count - 1, 1))
        name = f"skipped receipts_linearized.stream_id = {file.token_range[0]}: "
        self.assertTrue([step for step in self.steps if name in step], self.steps)

    def test_damaged_commit(self) -> None:
        """
        A commit that is truncated or deleted is named; a repair reads the rows again
        that the commit added, and leaves later commits as they are.
        """
        table = DeltaTable(self.uri, storage_options=self.store.delta_options)
        commits = reversed(table.history())
        versions = [c["version"] for c in commits if c["operation"] == "WRITE"]
        works: tuple[Callable[[bytes], bytes] | None, ...] = (
            lambda content: content[:50],
            None,
        )
        for version, work in zip(versions[1:3], works, strict=True):
            self.change(self.commit_name(version), work)
            with self.assertRaises(PipelineError) as caught:
                self.run_archive()
            self.assertIn(f"{version:020}.json is", str(caught.exception))
            self.assertIn("archive --repair", str(caught.exception))
            (repaired,) = self.repair()
            self.assertEqual(repaired.commits, 1)
            self.assertEqual(repaired.rows, 30)
            self.check_repaired()

    def test_interrupted(self) -> None:
        """A repair that ended early, without Java for instance, is completed later."""

        def no_spark() -> Any:
            if "check receipts" in self.steps:
                raise PipelineError("no Java")
            return shared_session()

        table = DeltaTable(self.uri, storage_options=self.store.delta_options)
        commits = reversed(table.history())
        versions = [c["version"] for c in commits if c["operation"] == "WRITE"]
        self.change(self.commit_name(versions[1]), lambda content: content[:50])
        self.assertRaises(PipelineError, self.repair, no_spark)
        self.run_archive()
        (repaired,) = self.repair()
        self.assertEqual((repaired.commits, repaired.rows), (1, 30))
        self.check_repaired()

    def test_damaged_last_commit(self) -> None:
        """The rows of the last commit are archived again by the next run."""
        version = DeltaTable(self.uri, storage_options=self.store.delta_options)
        self.change(self.commit_name(version.version()), lambda content: b"{")
        (repaired,) = self.repair()
        self.assertEqual((repaired.commits, repaired.rows), (1, 0))
        self.check_repaired()

    def test_first_commit(self) -> None:
        """The first commit, which has the columns, cannot be replaced."""
        self.change(self.commit_name(0), lambda content: b"{")
        with self.assertRaises(PipelineError) as caught:
            self.repair()
        self.assertIn("restore the file from a backup", str(caught.exception))

    def test_damaged_checkpoint(self) -> None:
        """A damaged checkpoint is named; commits replace it."""
        table = DeltaTable(self.uri, storage_options=self.store.delta_options)
        table.create_checkpoint()
        name = f"{LOG}/{table.version():020}.checkpoint.parquet"
        self.change(name, lambda content: content[:100])
        with self.assertRaises(PipelineError) as caught:
            self.run_archive()
        self.assertIn("checkpoint.parquet is damaged", str(caught.exception))
        (repaired,) = self.repair()
        self.assertEqual((repaired.commits, repaired.rows), (0, 0))
        self.check_repaired()

    def test_checkpoint_that_nothing_replaces(self) -> None:
        """
        If the first commit is missing, too, nothing is changed: a damaged checkpoint
        can still be restored.
        """
        table = DeltaTable(self.uri, storage_options=self.store.delta_options)
        table.create_checkpoint()
        name = f"{LOG}/{table.version():020}.checkpoint.parquet"
        self.change(name, lambda content: content[:100])
        self.change(self.commit_name(0), None)
        before = self.log_files()
        with self.assertRaises(PipelineError) as caught:
            self.repair()
        self.assertIn("restore the file from a backup", str(caught.exception))
        self.assertEqual(self.log_files(), before)

    def log_files(self) -> list[str]:
        """Return the names of the files of the log."""
        found = self.store.list_folder(f"{self.uri}/{LOG}")
        return sorted(info.base_name for info in found)

    def test_purged_rows(self) -> None:
        """Purged rows are not read again."""
        self.uri = self.store.stream_uri("caches")
        before = keys_of(self.store)
        purge(self.archive, TODAY.replace(day=2))
        kept = keys_of(self.store)
        self.assertLess(len(kept), len(before))
        table = DeltaTable(self.uri, storage_options=self.store.delta_options)
        actions = table.get_add_actions(flatten=True)
        self.change(actions["path"][0].as_py(), None)
        self.repair()
        self.assertEqual(keys_of(self.store), kept)

    def test_second_driver(self) -> None:
        """If another driver commits meanwhile, the repair changes nothing."""
        self.change(self.files[1].path, None)
        done: list[str] = []

        def find_and_archive(
            store: ArchiveStore, files: list[ArchivedFile], spark: Spark
        ) -> list[DamagedFile]:
            if files[0].table_name == "receipts" and not done:
                add_rows(self.dsn, 30)
                done.append(self.run_archive())
            return find_damage(store, files, spark)

        self.patch(files, "find_damage", find_and_archive)
        with self.assertRaises(PipelineError) as caught:
            self.repair()
        self.assertIn("Only one driver may write", str(caught.exception))
        self.patch(files, "find_damage", find_damage)
        self.assertEqual(len(self.repair()), 1)
        self.check_repaired()


class StoreRepairTests(RepairCase):
    """A test with an archive on S3."""

    def location(self) -> str:
        """Return the location of the archive."""
        use_server(self)
        return "s3://bucket/archive"

    def test_damage(self) -> None:
        """A damaged commit and a damaged file are repaired at once."""
        file = self.files[0]
        self.change(file.path, lambda content: content[:100])
        table = DeltaTable(self.uri, storage_options=self.store.delta_options)
        commits = reversed(table.history())
        versions = [c["version"] for c in commits if c["operation"] == "WRITE"]
        self.change(self.commit_name(versions[2]), None)
        (repaired,) = self.repair()
        self.assertEqual((repaired.commits, repaired.rows), (1, file.row_count + 30))
        self.check_repaired()
