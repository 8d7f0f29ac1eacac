"""Tests for the data source on a cluster: the processes that read, and the rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.servers import PrivatePostgres
from tests.external import skip_reason
from tests.external.cluster.cluster import StandaloneCluster
from tests.support.big_database import fill_database

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

skip = skip_reason("cluster")

#: Approximate number of rows in the database.
ROWS = 20_000


def register_probe(session: SparkSession, folder: str) -> None:
    """Register a data source that also records which process reads.

    Its classes are defined in this function so that they are pickled by value:
    executors cannot import the tests.
    """
    from synapse_replication.pipeline.source import source as module
    from synapse_replication.pipeline.source.options import SourceOptions

    class ProbingReader(module.RowsReader):
        def read(self, partition: Any) -> Iterator[Any]:
            import sys

            yield from super().read(partition)
            parents, pid = [], os.getpid()
            while pid > 1:
                parents.append(pid)
                pid = int(
                    Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[1]
                )
            loaded = [name for name in sys.modules if name.startswith("twisted")]
            note = {"pids": parents, "twisted": loaded, "folder": os.getcwd()}
            Path(folder, os.urandom(8).hex()).write_text(json.dumps(note))

    class ProbingSource(module.SynapseReplicationDataSource):
        @classmethod
        def name(cls) -> str:
            return "probing"

        def reader(self, schema: Any) -> Any:
            return ProbingReader(SourceOptions.parse(self.options))

    session.dataSource.register(ProbingSource)


class ClusterTests(SynchronousTestCase):
    """Tests for a master and two workers of the pip-installed Spark."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.notes = self.folder / "notes"
        self.notes.mkdir(parents=True)
        self.postgres = PrivatePostgres(tcp=True)
        self.postgres.start()
        self.addCleanup(self.postgres.stop)
        self.postgres.new_database("big")
        self.dsn = self.postgres.dsn("big", tcp=True)
        fill_database(self.dsn, ROWS)
        cluster = StandaloneCluster(self.folder / "cluster")
        self.addCleanup(cluster.stop)
        cluster.start()
        self.session = cluster.make_session(
            "cluster", {"spark.sql.shuffle.partitions": "2"}
        )
        self.addCleanup(self.session.stop)

    def test_reads_elsewhere(self) -> None:
        """
        Two executors, which are not the driver and import no reactor, read all
        partitions, for a batch and for a streaming query.
        """
        register_probe(self.session, str(self.notes))
        options = {"dsn": self.dsn, "numPartitions": "8"}
        rows = self.session.read.format("probing").options(**options).load()
        counts = {
            row["stream"]: row["count"]
            for row in rows.groupBy("stream").count().collect()
        }

        self.assertEqual(counts["caches"], 2000 - 2)
        self.assertEqual(counts["receipts"], 5000 - 5)
        self._check_processes()
        self._check_streaming(sum(counts.values()))

    def _check_processes(self) -> None:
        notes = [json.loads(path.read_text()) for path in self.notes.iterdir()]
        self.assertGreaterEqual(len(notes), 8)
        jvms = set()
        for note in notes:
            self.assertEqual(note["twisted"], [])
            self.assertNotIn(os.getpid(), note["pids"][:3])
            # The worker, its daemon, and the executor.
            jvms.add(note["pids"][2])
            command = Path(f"/proc/{note['pids'][2]}/cmdline").read_bytes()
            self.assertIn(b"CoarseGrainedExecutorBackend", command)
        self.assertEqual(len(jvms), 2)
        self.assertEqual(len({note["folder"] for note in notes}), 2)

    def _check_streaming(self, expected: int) -> None:
        sizes: list[int] = []

        def record(batch: DataFrame, batch_id: int) -> None:
            sizes.append(batch.count())

        query = (
            self.session.readStream.format("synapse_replication")
            .options(dsn=self.dsn, maxRowsPerTrigger="15000")
            .load()
            .writeStream.option("checkpointLocation", str(self.folder / "checkpoint"))
            .trigger(availableNow=True)
            .foreachBatch(record)
            .start()
        )
        query.awaitTermination()
        self.assertEqual(sum(sizes), expected)
        self.assertGreater(len(sizes), 1)
