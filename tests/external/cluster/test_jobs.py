"""Tests that run the jobs on a standalone cluster of a master and two workers."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.archive.job import (
    ArchiveProgress,
    ArchiveSettings,
    Numbers,
    run_archive,
)
from synapse_replication.pipeline.audit.job import run_audit
from synapse_replication.pipeline.export import export_rows
from synapse_replication.pipeline.report.job import run_report
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source import planning
from synapse_replication.pipeline.spark.session import SparkJob
from synapse_replication.testing.servers import PrivatePostgres
from tests.external import skip_reason
from tests.external.cluster.cluster import StandaloneCluster
from tests.pipeline.archives import keys_of
from tests.support.archive_points import Point, watched
from tests.support.big_database import fill_database

skip = skip_reason("cluster")

#: The approximate number of rows.
ROWS = 20_000


class JobsTests(SynchronousTestCase):
    """Tests with jobs of several tasks."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir(parents=True)
        self.postgres = PrivatePostgres(tcp=True)
        self.postgres.start()
        self.addCleanup(self.postgres.stop)
        self.postgres.new_database("big")
        dsn = self.postgres.dsn("big", tcp=True)
        fill_database(dsn, ROWS)
        self.settings = PipelineSettings.of_dsn(dsn)
        # Small parts, so that each job has tasks for both executors.
        self.patch(planning, "IDS_PER_TASK", 1000)

    def start_cluster(self) -> StandaloneCluster:
        """Start a cluster, and a session on it that the jobs use."""
        cluster = StandaloneCluster(self.folder / "cluster")
        self.addCleanup(cluster.stop)
        cluster.start()
        self.session = cluster.make_session("jobs")
        self.addCleanup(self.session.stop)
        return cluster

    def tasks(self) -> dict[str, int]:
        """Return the number of tasks of each executor, also of those that are gone."""
        context = self.session.sparkContext
        found = context._jsc.sc().statusStore().executorList(False)
        executors = [found.apply(index) for index in range(found.size())]
        return {each.id(): each.totalTasks() for each in executors}

    def archive(self, folder: str, **settings: object) -> Numbers:
        """Archive the database."""
        return run_archive(
            ArchiveSettings(
                str(self.folder / folder),
                self.settings,
                once=True,
                **settings,  # type: ignore[arg-type]
            ),
            ArchiveProgress(io.StringIO()),
        )

    def test_each_job(self) -> None:
        """Both executors work for each job; the results are those of one machine."""
        with contextlib.redirect_stdout(io.StringIO()):
            local = self.archive("local", master="local[2]")
        self.start_cluster()
        archive = str(self.folder / "archive")
        seen = [self.tasks()]

        def both_worked(job: str) -> None:
            seen.append(self.tasks())
            for executor in ("0", "1"):
                new = seen[-1].get(executor, 0) - seen[-2].get(executor, 0)
                self.assertGreater(new, 0, (job, executor, seen))
            self.assertEqual(seen[-1]["driver"], 0, job)

        self.assertEqual(self.archive("archive").rows, local.rows)
        both_worked("archive")
        self.assertEqual(keys_of(archive), keys_of(self.folder / "local"))
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            run_audit(self.settings, archive=archive, as_json=True)
        both_worked("audit")
        found = json.loads(output.getvalue())["findings"]
        self.assertEqual([each for each in found if each["severity"] == "error"], [])
        run_report(self.settings, str(self.folder / "report"), with_audit=False)
        both_worked("report")
        with SparkJob("export") as spark:
            out = str(self.folder / "export")
            rows = export_rows(archive, out, "parquet", None, spark)
        self.assertEqual(rows, local.rows)
        both_worked("export")

    def test_lost_worker(self) -> None:
        """If a worker is killed in the middle, the other one finishes the archive."""
        cluster = self.start_cluster()
        alive = [True]

        def kill(point: Point) -> None:
            if point is Point.COMMITTED and alive:
                alive.clear()
                cluster.kill_worker(1)

        with watched(kill):
            numbers = self.archive("archive", batch_ids=4000)
        self.assertEqual(alive, [])
        keys = keys_of(self.folder / "archive")
        self.assertEqual(len(keys), numbers.rows)
        self.assertEqual(self.archive("archive").rows, 0)
        # A token may have several rows, so compare with an archive of the other worker.
        self.archive("undisturbed")
        self.assertEqual(keys, keys_of(self.folder / "undisturbed"))
