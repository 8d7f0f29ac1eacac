"""Tests of an archive and a streaming query beside writers that fail.

The writers are real processes. The archive and the query run in the session that all
tests share; in the end, both have each row of the table, once.
"""

from __future__ import annotations

import copy
import io
import json
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg2

from synapse_replication.pipeline.archive.job import (
    ArchiveProgress,
    ArchiveSettings,
    run_archive,
)
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.testing.servers import shared_postgres
from tests.external import skip_reason
from tests.integration.test_replaced_writer import ReplacingTestCase
from tests.pipeline.archives import keys_of
from tests.pipeline.shared_session import shared_session
from tests.support.archive_database import Key
from tests.support.commit_proxy import CommitProxy
from tests.support.forks import ForkedProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

skip = skip_reason("long")


class WriterTests(ReplacingTestCase):
    """The main process writes notes while they are archived and read."""

    def setUp(self) -> None:
        super().setUp()
        self.session = shared_session()
        self.config = str(self.folder / "pipeline.yaml")
        with open(self.config, "w") as file:
            json.dump(self.shared, file)
        self.archive = str(self.folder / "archive")
        self.streamed: list[Key] = []

    def start_main(self, file: str, after: int = 0) -> ForkedProcess:
        """Start a main process, which writes up to the number in a file."""
        main = copy.deepcopy(self.main)
        main["synapse_replication"]["modules"][0]["config"] = {
            "file": str(self.folder / file),
            "after": after,
            "streams": ["notes"],
        }
        process = self.start("main", main, name=file)
        self.wait_until_up(file)
        return process

    def write(self, file: str, upto: int) -> None:
        """Let a main process write up to a number."""
        (self.folder / "new").write_text(str(upto))
        (self.folder / "new").rename(self.folder / file)

    def keys(self) -> list[Key]:
        """Return the keys of all rows of the table."""
        with closing(psycopg2.connect(self.dsn)) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT 'notes', instance_name, stream_id FROM notes")
            return sorted(cursor.fetchall())

    def start_reading(self) -> None:
        """Start to archive, and a query."""
        settings = ArchiveSettings(
            self.archive, PipelineSettings.of_config([self.config]), every=0.2
        )
        stopping = threading.Event()
        job = threading.Thread(
            target=run_archive,
            args=(settings, ArchiveProgress(io.StringIO())),
            kwargs={"stopping": stopping},
        )
        job.start()
        self.addCleanup(job.join)
        self.addCleanup(stopping.set)

        def record(batch: DataFrame, batch_id: int) -> None:
            rows = batch.select("stream", "instance_name", "stream_id").collect()
            self.streamed += map(tuple, rows)

        self.query = (
            self.session.readStream.format("synapse_replication")
            .options(config=self.config, streams="notes")
            .load()
            .writeStream.option("checkpointLocation", str(self.folder / "checkpoint"))
            .trigger(processingTime="200 milliseconds")
            .foreachBatch(record)
            .start()
        )
        self.addCleanup(self.query.stop)

    def has_read(self, rows: int) -> bool:
        """Return whether the query has returned this number of rows."""
        if (error := self.query.exception()) is not None:
            raise error
        return len(self.streamed) >= rows

    def check(self, upto: int) -> None:
        """Wait until the number ``upto`` was written, and its rows were read."""
        last = f"note {upto}"

        def is_written() -> bool:
            with closing(psycopg2.connect(self.dsn)) as connection:
                cursor = connection.cursor()
                cursor.execute("SELECT FROM notes WHERE note = %s", [last])
                return cursor.rowcount > 0

        self.wait_until(last, is_written)
        keys = self.keys()
        self.wait_until("all archived", lambda: len(keys_of(self.archive)) >= len(keys))
        self.wait_until("all read", lambda: self.has_read(len(keys)))
        self.assertEqual(keys_of(self.archive), keys)
        self.assertEqual(sorted(self.streamed), keys)

    def test_each_row_once(self) -> None:
        """
        The answers to some commits are lost. Then the writer is suspended and replaced,
        and resumes.
        """
        server = shared_postgres()
        proxy = CommitProxy(server)
        self.addCleanup(proxy.close)
        own = {"dsn": self.dsn.replace(str(server.directory), str(proxy.directory))}
        self.shared["database"]["args"] = own
        replaced = self.start_main("first")
        self.start_reading()
        proxy.lose(seed=1, share=0.5)
        self.write("first", 8)
        self.check(8)
        self.assertGreater(proxy.lost, 1)
        proxy.heal()
        self.suspend(replaced)
        self.write("first", 99)
        self.start_main("second", 1000)
        self.write("second", 1005)
        self.check(1005)
        self.resume(replaced)
        self.write("second", 1010)
        self.check(1010)
