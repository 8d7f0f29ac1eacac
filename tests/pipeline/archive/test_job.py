"""Tests for :mod:`synapse_replication.pipeline.archive.job`, with a real database."""

from __future__ import annotations

import datetime
import io
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import duckdb
import polars
import psycopg2
from deltalake import DeltaTable
from pyarrow import RecordBatch
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive import job
from synapse_replication.pipeline.archive.job import (
    ArchiveProgress,
    ArchiveSettings,
    Numbers,
    run_archive,
)
from synapse_replication.pipeline.archive.metrics import ArchiveMetrics
from synapse_replication.pipeline.archive.row_archive import write_parts
from synapse_replication.pipeline.archive.snapshot import read_archive
from synapse_replication.pipeline.archive.store import ArchiveStore
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source import reading
from synapse_replication.pipeline.source.catalog import CatalogStream
from synapse_replication.pipeline.source.completeness import CompletenessReader
from synapse_replication.pipeline.source.options import SourceOptions
from synapse_replication.pipeline.source.planning import Planner
from synapse_replication.pipeline.spark.session import SparkJob
from synapse_replication.testing.servers import shared_postgres
from tests.pipeline.archives import keys_of
from tests.pipeline.shared_session import shared_session
from tests.support.archive_database import add_rows, make_tables, read_keys
from tests.support.archive_points import Point, watched


class StopError(Exception):
    """Simulates a kill: ends the run at the current point."""


class ArchiveTests(SynchronousTestCase):
    """Tests for archiving a database."""

    def setUp(self) -> None:
        shared_session()
        self.dsn = shared_postgres().new_database()
        make_tables(self.dsn)
        self.folder = Path(self.mktemp()).absolute()
        self.output = io.StringIO()

    def archive(
        self, watch: Callable[[Point], object] | None = None, **settings: Any
    ) -> Numbers:
        """Archive; call a function at each point of the run."""
        if watch is not None:
            with watched(watch):
                return self.archive(**settings)
        run = {
            name: settings.pop(name)
            for name in ("stopping", "metrics")
            if name in settings
        }
        values = {
            "once": True,
            "batch_ids": 60,
            "source": PipelineSettings.of_dsn(self.dsn),
        }
        return run_archive(
            ArchiveSettings(str(self.folder), **{**values, **settings}),
            ArchiveProgress(self.output),
            **run,
        )

    def count_elsewhere(self, seen: list[tuple[int, int]]) -> Callable[[Point], None]:
        """
        Return a watch that counts rows of ``caches`` in DuckDB and Polars after each
        commit.
        """
        caches = ArchiveStore.at(self.folder).stream_uri("caches")

        def count(point: Point) -> None:
            if point is Point.COMMITTED and DeltaTable.is_deltatable(caches):
                dataset = DeltaTable(caches).to_pyarrow_dataset()
                with duckdb.connect() as connection:
                    connection.register("caches", dataset)
                    ((rows,),) = connection.execute(
                        "SELECT count(DISTINCT stream_id) FROM caches"
                    ).fetchall()
                seen.append((rows, polars.scan_delta(caches).collect().height))

        return count

    def test_json_that_others_refuse(self) -> None:
        """JSON that PostgreSQL accepts, and readers skip, is archived as it is."""
        add_rows(self.dsn, 20)
        texts = {
            5: '"\\ud800"',
            8: "-1e400",
            11: "[" * 3000 + "]" * 3000,
            14: "7" * 5000,
        }
        with closing(psycopg2.connect(self.dsn)) as connection, connection:
            for id_, text in texts.items():
                connection.cursor().execute(
                    "UPDATE receipts_linearized SET data = %s WHERE stream_id = %s",
                    (text, id_),
                )
        self.archive()
        self.assertEqual(sorted(keys_of(self.folder)), read_keys(self.dsn))
        receipts = DeltaTable(ArchiveStore.at(self.folder).stream_uri("receipts"))
        archived = {
            row["stream_id"]: row["data"]
            for row in receipts.to_pyarrow_table().to_pylist()
            if row["stream_id"] in texts
        }
        self.assertEqual(archived, texts)

    def test_commit_while_it_plans(self) -> None:
        """
        A row of ``caches`` is archived whose transaction the driver has waited for.
        """
        holders = CompletenessReader._holders
        with closing(psycopg2.connect(self.dsn)) as connection:
            connection.cursor().execute(
                "INSERT INTO cache_invalidation_stream_by_instance VALUES "
                "(nextval('cache_invalidation_stream_seq'), 'w1', 'get_user', NULL, 1)"
            )
            add_rows(self.dsn, 5)

            def commit(txn: Any, stream: CatalogStream) -> set[str]:
                found = holders(txn, stream)
                connection.commit()
                return found

            # Unlike trial's patch(), it restores a static method.
            with patch.object(CompletenessReader, "_holders", staticmethod(commit)):
                self.archive()
        self.assertEqual(sorted(keys_of(self.folder)), read_keys(self.dsn))

    def test_poison(self) -> None:
        """
        A row that PostgreSQL cannot convert is skipped, counted and named, without its
        content, and all other rows are archived.
        """
        for tasks in range(2):
            self.output.seek(0)
            add_rows(self.dsn, 50)
            bad, worse, late = (50 * tasks + id_ for id_ in (7, 30, 10))
            with closing(psycopg2.connect(self.dsn)) as connection, connection:
                cursor = connection.cursor()
                cursor.execute(
                    "UPDATE receipts_linearized SET data = '{secret' "
                    "WHERE stream_id IN (%s, %s)",
                    (bad, worse),
                )
                cursor.executemany(
                    "UPDATE cache_invalidation_stream_by_instance "
                    "SET invalidation_ts = %s WHERE stream_id = %s",
                    # Out of range in microseconds, and in a year of six digits.
                    [(2**62, bad), (10**15, late)],
                )
            metrics = ArchiveMetrics()
            numbers = self.archive(metrics=metrics)
            self.assertEqual((numbers.rows, numbers.skipped), (97, 3))
            output = self.output.getvalue()
            for table, id_ in (
                ("receipts_linearized", bad),
                ("receipts_linearized", worse),
                ("cache_invalidation_stream_by_instance", bad),
            ):
                self.assertIn(f"skipped {table}.stream_id = {id_}: ", output)
            self.assertNotIn("secret", output)
            count = metrics.registry.get_sample_value(
                "synapse_replication_archive_skipped_ids_total", {"stream": "receipts"}
            )
            self.assertEqual(count, 2)
        archived = keys_of(self.folder)
        self.assertEqual(len(archived), len(set(archived)))
        missing = set(read_keys(self.dsn)) - set(archived)
        self.assertEqual({id_ for *_, id_ in missing}, {7, 30, 57, 80})

    def test_query_that_fails_once(self) -> None:
        """If rows that could not be read can be read again, the cause is reported."""
        add_rows(self.dsn, 5)

        def fail(*arguments: object, **options: object) -> Iterator[RecordBatch]:
            raise PipelineError("the connection was lost")

        options = SourceOptions.parse({"dsn": self.dsn})
        plan = Planner(options, continuous=True).batch()
        store, today = ArchiveStore.at(self.folder), datetime.date(2026, 1, 9)
        self.patch(reading, "_query", fail)
        error = self.assertRaises(
            PipelineError, write_parts, store, plan.conninfo, today, plan.parts
        )
        self.assertIn("the connection was lost", str(error))

    def test_once(self) -> None:
        """
        All complete rows are archived by their day of writing. A later run adds only
        new rows, including rows of a slow writer whose ids are below those of other
        writers.
        """
        add_rows(self.dsn, 50, with_slow=False)
        seen: list[tuple[int, int]] = []
        numbers = self.archive(watch=self.count_elsewhere(seen))
        self.assertEqual((numbers.rows, numbers.behind), (95, 0))
        self.assertGreater(numbers.batches, 1)
        self.assertIn("starting Spark", self.output.getvalue())
        self.assertNotIn("slow", {writer for _, writer, _ in keys_of(self.folder)})
        caches = DeltaTable(ArchiveStore.at(self.folder).stream_uri("caches"))
        self.assertEqual(
            sorted(p["day"] for p in caches.partitions()),
            ["2026-01-01", "2026-01-02", "2026-01-03"],
        )
        self.assertEqual(self.archive().rows, 0)
        add_rows(self.dsn, 10)
        self.assertEqual(self.archive(watch=self.count_elsewhere(seen)).rows, 25)
        self.assertEqual(keys_of(self.folder), read_keys(self.dsn))
        # Other programs that read at the same time see only complete commits.
        self.assertEqual([duck for duck, _ in seen], [polar for _, polar in seen])
        self.assertGreater(len(set(seen)), 1)
        self.assertEqual(seen, sorted(seen))
        self._check_frames()

    def _check_frames(self) -> None:
        """Check that the archive's frames have the same rows as the data source."""
        session = shared_session()
        archived = read_archive(session, self.folder)
        columns = ("stream", "instance_name", "stream_id", "row_index", "row")
        source = session.read.format("synapse_replication").option("dsn", self.dsn)
        self.assertEqual(
            sorted(map(tuple, archived.rows().select(*columns).collect())),
            sorted(map(tuple, source.load().select(*columns).collect())),
        )
        typed = archived.streams["receipts"].where("user_id = '@user5'")
        self.assertEqual({row["data"] for row in typed.collect()}, {'{"ts": 5}'})
        self.assertEqual(archived.offsets["receipts"].writers["w1"], 58)

    def test_without_spark(self) -> None:
        """A run that finds nothing new does not start Spark, unlike any other."""
        started = []

        class Job(SparkJob):
            def start(self, rows: int | None = None) -> None:
                started.append(rows)

        self.patch(job, "SparkJob", Job)
        self.assertEqual(self.archive().rows, 0)
        self.assertEqual(started, [])
        add_rows(self.dsn, 1)
        self.assertEqual(self.archive().rows, 2)
        self.assertTrue(started)
        started.clear()
        with closing(psycopg2.connect(self.dsn)) as connection, connection:
            # The id of a transaction that was rolled back.
            connection.cursor().execute(
                "SELECT nextval('cache_invalidation_stream_seq')"
            )
        self.assertEqual(self.archive().rows, 0)
        self.assertEqual(started, [])

    def test_behind(self) -> None:
        """
        Ids that are allocated after the last batch was planned count as behind, once
        per stream, not once per writer.
        """
        add_rows(self.dsn, 20)
        more = iter([10])

        def watch(point: Point) -> None:
            if point is Point.WRITTEN:
                add_rows(self.dsn, next(more, 0))

        self.assertEqual(self.archive(watch=watch).behind, 10 + 10)

    def test_stopped_at_points(self) -> None:
        """
        After a run that stopped at any point, the next run archives the missing rows.
        """
        for point in (Point.PLANNED, Point.WRITTEN, Point.COMMITTED, Point.COMPACTED):
            add_rows(self.dsn, 10)

            def stop(reached: Point, at: Point = point) -> None:
                if reached is at:
                    raise StopError(at)

            self.assertRaises(StopError, self.archive, watch=stop)
            seen = keys_of(self.folder)
            self.assertEqual(len(seen), len(set(seen)))
        self.archive()
        self.assertEqual(keys_of(self.folder), read_keys(self.dsn))

    def test_two_drivers(self) -> None:
        """
        If two drivers run, the one that commits second stops with an error that names
        the first one, and no row is archived twice.
        """
        add_rows(self.dsn, 10)
        inner: list[Numbers] = []
        left = [1]

        def watch(point: Point) -> None:
            if point is Point.WRITTEN and left:
                left.clear()
                inner.append(self.archive())

        error = self.assertRaises(PipelineError, self.archive, watch=watch)
        self.assertIn("Only one driver may write", str(error))
        self.assertEqual(inner[0].rows, 20)
        self.assertEqual(keys_of(self.folder), read_keys(self.dsn))

    def test_source_fails(self) -> None:
        """
        The error for another database, or for one without tables, has no traceback.
        """
        add_rows(self.dsn, 5)
        self.archive()
        self.dsn = shared_postgres().new_database()
        make_tables(self.dsn)
        error = self.assertRaises(PipelineError, self.archive)
        self.assertIn("is it the right database", str(error))
        self.assertNotIn("Traceback", str(error))
        self.dsn = shared_postgres().new_database()
        error = self.assertRaises(PipelineError, self.archive)
        self.assertIn("no table of any stream", str(error))

    def test_continuous(self) -> None:
        """
        A continuous run archives and compacts until it is stopped, and updates its
        metrics.
        """
        self.patch(job, "_BATCHES_BETWEEN_COMPACTIONS", 2)
        metrics = ArchiveMetrics()
        stopping = threading.Event()
        add_rows(self.dsn, 30)

        dsn, more = self.dsn, threading.Event()

        class Reporter(ArchiveProgress):
            def show(self, numbers: Numbers, event: str) -> None:
                super().show(numbers, event)
                if numbers.rows == 60 and not more.is_set():
                    more.set()
                    add_rows(dsn, 15)
                if numbers.rows == 90 and numbers.behind == 0:
                    stopping.set()

        run_archive(
            ArchiveSettings(
                str(self.folder),
                PipelineSettings.of_dsn(self.dsn),
                every=0.2,
                batch_ids=20,
                compact_files=2,
            ),
            Reporter(self.output),
            metrics,
            stopping=stopping,
        )
        self.assertEqual(keys_of(self.folder), read_keys(self.dsn))
        self.assertIn("small files merged into", self.output.getvalue())
        self.assertIn("0 ids behind", self.output.getvalue())

        def value(name: str, **labels: str) -> float | None:
            return metrics.registry.get_sample_value(
                f"synapse_replication_archive_{name}", labels
            )

        self.assertEqual(value("rows_total", stream="receipts"), 45)
        self.assertEqual(value("lag_ids", stream="receipts", instance_name="w1"), 0)
        self.assertEqual(value("position", stream="receipts", instance_name="w2"), 45)
        self.assertGreater(value("compacted_files_total") or 0, 0)
        self.assertGreater(value("rows_per_second") or 0, 0)
        self.assertGreater(value("caught_up_timestamp_seconds") or 0, 0)


class SignalTests(SynchronousTestCase):
    """Tests for the signals that stop a run."""

    def test_second_one(self) -> None:
        """
        The first signal stops the run; the second signal is passed to the previous
        handler.
        """
        seen: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.signal(number, lambda each, frame: seen.append(each))
            self.addCleanup(signal.signal, number, before)
            stopping = threading.Event()
            with job._set_by_signals(stopping):
                signal.raise_signal(number)
                self.assertTrue(stopping.is_set())
                self.assertEqual(seen, [])
                signal.raise_signal(number)
                self.assertEqual(seen, [number])
            with job._set_by_signals(stopping):
                pass
            signal.raise_signal(number)
            self.assertEqual(seen, [number, number])
            seen.clear()


class RecordingTests(SynchronousTestCase):
    """Tests for archiving recordings."""

    def setUp(self) -> None:
        shared_session()
        self.folder = Path(self.mktemp()).absolute()
        self.recordings = Path(self.mktemp()).absolute()
        self.recordings.mkdir()

    def archive(self) -> Numbers:
        return run_archive(
            ArchiveSettings(
                str(self.folder), None, recordings=[str(self.recordings)], once=True
            ),
            ArchiveProgress(io.StringIO()),
        )

    def record(self, name: str, *lines: str) -> None:
        (self.recordings / name).write_text(
            "".join(
                json.dumps(
                    {"t": 1.0, "time_ms": 1767225600000, "channel": "x", "line": line}
                )
                + "\n"
                for line in lines
            )
        )

    def lines(self) -> list[tuple[str, str, str]]:
        table = DeltaTable(ArchiveStore.at(self.folder).wire_uri)
        return sorted(
            (str(row["day"]), row["recording"], row["line"])
            for row in table.to_pyarrow_table().to_pylist()
        )

    def test_each_once(self) -> None:
        """
        Each closed recording is archived once, with only the name of USER_IP. A
        recording that has grown since it was archived is an error.
        """
        self.record("a.jsonl", "POSITION events w 1 2", "PING 1")
        self.record("b.jsonl.partial", "PING 3")
        self.assertEqual(self.archive().commands, 2)
        self.record("b.jsonl", "PING 3", 'USER_IP @u:s ["syt_secret","1.2.3.4","a"]')
        numbers = self.archive()
        self.assertEqual((numbers.commands, numbers.recordings), (2, 1))
        self.assertEqual(self.archive().recordings, 0)
        self.assertEqual(
            self.lines(),
            [
                ("2026-01-01", "a.jsonl", "PING 1"),
                ("2026-01-01", "a.jsonl", "POSITION events w 1 2"),
                ("2026-01-01", "b.jsonl", "PING 3"),
                ("2026-01-01", "b.jsonl", "USER_IP"),
            ],
        )
        wire = read_archive(shared_session(), self.folder).wire
        self.assertEqual({row["token"] for row in wire.collect()}, {2, None})
        for path in self.folder.rglob("*"):
            if path.is_file():
                self.assertNotIn(b"1.2.3.4", path.read_bytes(), path)
        self.record("a.jsonl", "PING 1", "PING 2", "PING 3", "PING 4")
        error = self.assertRaises(PipelineError, self.archive)
        self.assertIn("the changes would not be archived", str(error))
