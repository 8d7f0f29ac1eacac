"""Tests for :mod:`synapse_replication.pipeline.archive.run`, with a real database."""

from __future__ import annotations

import io
import json
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from pyarrow import dataset
from pyspark.sql.streaming.query import StreamingQuery
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive import run as job
from synapse_replication.pipeline.archive.layout import (
    open_archive,
    read_archive,
    read_archived_wire,
)
from synapse_replication.pipeline.archive.metrics import ArchiveMetrics
from synapse_replication.pipeline.archive.progress import Numbers, PlainReporter
from synapse_replication.pipeline.archive.run import ArchiveSettings, run_archive
from synapse_replication.pipeline.archive.writer import Point
from synapse_replication.pipeline.settings import settings_of_dsn
from synapse_replication.testing.servers import shared_postgres
from tests.pipeline.shared_session import shared_session
from tests.support.archive_database import (
    Key,
    add_rows,
    make_tables,
    read_keys,
)


class StopError(Exception):
    """Stands for a kill: the query ends where it is."""


class ArchiveTests(SynchronousTestCase):
    """Tests for what ends up in the archive."""

    def setUp(self) -> None:
        shared_session()
        self.dsn = shared_postgres().new_database()
        make_tables(self.dsn)
        self.folder = Path(self.mktemp()).absolute()
        self.said = io.StringIO()

    def archive(self, **settings: Any) -> Numbers:
        run = {
            name: settings.pop(name)
            for name in ("watch", "stopping", "metrics")
            if name in settings
        }
        values = {"once": True, "max_rows": 60, "source": settings_of_dsn(self.dsn)}
        return run_archive(
            ArchiveSettings(str(self.folder), **{**values, **settings}),
            PlainReporter(self.said),
            **run,
        )

    def archived(self) -> list[Key]:
        """Give what any reader of Parquet sees, in order."""
        columns = ["stream", "instance_name", "stream_id"]
        if not any((self.folder / "rows").rglob("*.parquet")):
            return []
        table = dataset.dataset(self.folder / "rows", partitioning="hive").to_table(
            columns=columns
        )
        return sorted(tuple(row[c] for c in columns) for row in table.to_pylist())

    def test_once(self) -> None:
        """All that is complete is archived, by day of writing; again it adds what came
        since, and nothing twice."""
        add_rows(self.dsn, 50)
        numbers = self.archive()
        self.assertEqual(numbers.rows, 100)
        self.assertGreater(numbers.batches, 1)
        self.assertEqual(numbers.behind, 0)
        self.assertEqual(self.archived(), read_keys(self.dsn))
        frame = read_archive(shared_session(), self.folder)
        days = frame.where("stream = 'caches'").select("day").distinct().collect()
        self.assertEqual(
            sorted(str(day) for (day,) in days),
            ["2026-01-01", "2026-01-02", "2026-01-03"],
        )
        self.assertEqual(self.archive().rows, 0)
        add_rows(self.dsn, 10)
        self.assertEqual(self.archive().rows, 20)
        self.assertEqual(self.archived(), read_keys(self.dsn))

    def test_slow_writer(self) -> None:
        """Rows of a writer that is behind the others are archived when they are
        complete, though others' ids are above them."""
        add_rows(self.dsn, 30, with_slow=False)
        self.archive()
        self.assertNotIn("slow", {writer for _, writer, _ in self.archived()})
        add_rows(self.dsn, 10)
        self.archive()
        self.assertEqual(self.archived(), read_keys(self.dsn))

    def test_behind(self) -> None:
        """What came while the last batch was written is told as so many ids behind:
        of each stream, not of each of its writers."""
        add_rows(self.dsn, 20)

        def watch(point: Point) -> None:
            if point is Point.COMMITTED:
                add_rows(self.dsn, 10)

        self.assertEqual(self.archive(watch=watch).behind, 10 + 10)

    def test_stopped_at_points(self) -> None:
        """A run that ends anywhere, also between the files and the checkpoint, is made
        up for by the next."""
        for point in (Point.STAGED, Point.COMMITTED, Point.SETTLED, Point.CLEANED):
            add_rows(self.dsn, 10)

            def stop(reached: Point, at: Point = point) -> None:
                if reached is at:
                    raise StopError(at)

            self.assertRaises(StopError, self.archive, watch=stop)
            seen = self.archived()
            self.assertEqual(len(seen), len(set(seen)))
        # What was committed is not counted again.
        self.assertEqual(self.archive().rows, 0)
        self.assertEqual(self.archived(), read_keys(self.dsn))

    def test_checkpoint_is_gone(self) -> None:
        """Without its checkpoint an archive is refused: all would be doubled."""
        add_rows(self.dsn, 5)
        self.archive()
        shutil.rmtree(open_archive(self.folder).checkpoint)
        error = self.assertRaises(PipelineError, self.archive)
        self.assertIn("is gone: all rows would be archived again", str(error))

    def test_checkpoint_from_backup(self) -> None:
        """A checkpoint that is older than the archive is refused."""
        checkpoint = open_archive(self.folder, create=True).checkpoint
        add_rows(self.dsn, 5)
        self.archive()
        shutil.copytree(checkpoint, self.folder.parent / "backup")
        add_rows(self.dsn, 5)
        self.archive()
        shutil.rmtree(checkpoint)
        shutil.move(self.folder.parent / "backup", checkpoint)
        add_rows(self.dsn, 5)
        error = self.assertRaises(PipelineError, self.archive)
        self.assertIn("has other offsets", str(error))

    def test_source_fails(self) -> None:
        """What the source has to say is said, without Spark's words around it."""
        add_rows(self.dsn, 5)
        self.archive()
        self.dsn = shared_postgres().new_database()
        make_tables(self.dsn)
        error = self.assertRaises(PipelineError, self.archive)
        self.assertIn("is it the right database", str(error))
        self.assertNotIn("Traceback", str(error))

    def test_slow_start(self) -> None:
        """Where workers take too long to start, it begins anew, a few times."""
        add_rows(self.dsn, 10)
        real, left = job._Archive._ended, [0]

        def ended(archive: Any, query: Any) -> bool:
            if left[0] == 0:
                return real(archive, query)
            left[0] -= 1
            query.stop()
            raise job._SlowStartError("busy")

        self.patch(job._Archive, "_ended", ended)
        self.patch(job, "_STARTS", 2)
        left[0] = 2
        self.assertRaises(PipelineError, self.archive)
        left[0] = 1
        self.archive()
        self.assertEqual(self.archived(), read_keys(self.dsn))

    def test_no_tables(self) -> None:
        """A database without any stream is an error, not an empty archive."""
        self.dsn = shared_postgres().new_database()
        error = self.assertRaises(PipelineError, self.archive)
        self.assertIn("no table of any stream", str(error))

    def test_continuous(self) -> None:
        """It goes on until it is told to stop; folders are compacted meanwhile, and
        metrics tell how far it is."""
        self.patch(job, "_BATCHES_BETWEEN_COMPACTIONS", 2)
        registry = CollectorRegistry()
        stopping = threading.Event()
        add_rows(self.dsn, 30)

        dsn, more = self.dsn, threading.Event()

        class Reporter(PlainReporter):
            def show(self, numbers: Numbers, what: str) -> None:
                super().show(numbers, what)
                if numbers.rows == 60 and not more.is_set():
                    more.set()
                    add_rows(dsn, 15)
                if numbers.rows == 90 and numbers.behind == 0:
                    stopping.set()

        run_archive(
            ArchiveSettings(
                str(self.folder),
                settings_of_dsn(self.dsn),
                every=0.2,
                max_rows=20,
                compact_files=2,
            ),
            Reporter(self.said),
            ArchiveMetrics(registry),
            stopping=stopping,
        )
        self.assertEqual(self.archived(), read_keys(self.dsn))
        self.assertIn("small files made into", self.said.getvalue())
        self.assertIn("0 ids behind", self.said.getvalue())

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(
                f"synapse_replication_archive_{name}", labels
            )

        self.assertEqual(value("rows_total", stream="receipts"), 45)
        self.assertEqual(value("lag_ids", stream="receipts", instance_name="w1"), 0)
        self.assertEqual(value("position", stream="receipts", instance_name="w2"), 45)
        self.assertGreater(value("compacted_files_total") or 0, 0)
        self.assertGreater(value("rows_per_second") or 0, 0)
        self.assertGreater(value("caught_up_timestamp_seconds") or 0, 0)

    def test_stopped_within_a_batch(self) -> None:
        """When it is told to stop, a batch that is being written ends before anything
        else is done to the archive, and before the lock is given back."""
        add_rows(self.dsn, 30)
        stopping, done = threading.Event(), threading.Event()
        order: list[Point | str] = []

        def watch(point: Point) -> None:
            order.append(point)
            if point is Point.COMMITTED:
                stopping.set()
                # The main thread has time to go on, if it does.
                done.wait(1)

        self.archive(once=False, watch=watch, stopping=stopping, compact_files=2)
        done.set()
        order.append("returned")
        after = order[order.index(Point.COMMITTED) :]
        self.assertEqual(after[-1], "returned")
        self.assertLess(after.index(Point.CLEANED), len(after) - 1)
        self.archive()
        self.assertEqual(self.archived(), read_keys(self.dsn))

    def test_stop_returns_early(self) -> None:
        """The batch also ends first if Spark's stopping does not wait for it."""
        add_rows(self.dsn, 30)
        real = StreamingQuery.stop
        self.patch(StreamingQuery, "stop", lambda query: self.addCleanup(real, query))
        stopping, done = threading.Event(), threading.Event()
        order: list[Point | str] = []

        def watch(point: Point) -> None:
            order.append(point)
            if point is Point.COMMITTED:
                stopping.set()
                done.wait(1)

        self.archive(once=False, watch=watch, stopping=stopping)
        order.append("returned")
        done.set()
        self.assertEqual(order[-2:], [Point.CLEANED, "returned"])


class SignalTests(SynchronousTestCase):
    """Tests for signals that end a run."""

    def test_second_one(self) -> None:
        """The first signal ends the run, a second is for who had them before."""
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
    """Tests for recordings as the second input."""

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
            PlainReporter(io.StringIO()),
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
        frame = read_archived_wire(shared_session(), self.folder)
        return sorted(
            (str(row["day"]), row["recording"], row["line"]) for row in frame.collect()
        )

    def test_each_once(self) -> None:
        """Recordings that are closed are archived once each, wherever they lie."""
        self.record("a.jsonl", "POSITION events w 1 2", "PING 1")
        self.record("b.jsonl.partial", "PING 3")
        self.assertEqual(self.archive().commands, 2)
        self.record("b.jsonl", "PING 3")
        numbers = self.archive()
        self.assertEqual((numbers.commands, numbers.recordings), (1, 1))
        self.assertEqual(self.archive().recordings, 0)
        self.assertEqual(
            self.lines(),
            [
                ("2026-01-01", "a.jsonl", "PING 1"),
                ("2026-01-01", "a.jsonl", "POSITION events w 1 2"),
                ("2026-01-01", "b.jsonl", "PING 3"),
            ],
        )

    def test_no_personal_data(self) -> None:
        """Of USER_IP only the name is archived."""
        self.record("a.jsonl", 'USER_IP @u:s ["syt_secret","1.2.3.4","a","D",17]')
        self.archive()
        self.assertEqual([line for _, _, line in self.lines()], ["USER_IP"])
        for path in self.folder.rglob("*"):
            if path.is_file():
                self.assertNotIn(b"1.2.3.4", path.read_bytes(), path)

    def test_changed(self) -> None:
        """A recording that went on after it was archived is refused."""
        self.record("a.jsonl", "PING 1")
        self.archive()
        self.record("a.jsonl", "PING 1", "PING 2")
        error = self.assertRaises(PipelineError, self.archive)
        self.assertIn("its rest would be lost", str(error))
