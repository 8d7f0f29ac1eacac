"""The run of ``synapse-replication pipeline archive``.

Theory of operation: Spark's streaming reads the database from its checkpoint on, and
gives batch after batch to :class:`~synapse_replication.pipeline.archive.writer.
ArchiveWriter` in a thread of its own. The main thread looks on: it archives recordings
that were closed meanwhile, measures how far the database is ahead, and ends the query
when it is told to. Rows and recordings share nothing but the folder.
"""

from __future__ import annotations

import datetime
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs
from prometheus_client import CollectorRegistry

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.compaction import ENOUGH_FILES
from synapse_replication.pipeline.archive.driver import ArchiveDriver, drive_archive
from synapse_replication.pipeline.archive.lock import lock_archive_in_java
from synapse_replication.pipeline.archive.metrics import ArchiveMetrics
from synapse_replication.pipeline.archive.offsets import (
    archived_offsets,
    check_checkpoint,
    database_offsets,
    lag_of,
    noted_offsets,
    query_id,
)
from synapse_replication.pipeline.archive.progress import Numbers, Reporter
from synapse_replication.pipeline.archive.transforms import archive_rows, archive_wire
from synapse_replication.pipeline.archive.wire import (
    WireLedger,
    find_closed_recordings,
)
from synapse_replication.pipeline.archive.writer import Batch, Manifest, Point, Watch
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.options import SourceOptions, reader_options
from synapse_replication.pipeline.spark.failures import shorten
from synapse_replication.pipeline.spark.session import job_session
from synapse_replication.pipeline.wire_lines import read_recordings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["ArchiveSettings", "run_archive"]

#: Folders are looked through for small files after so many batches with rows.
_BATCHES_BETWEEN_COMPACTIONS: Final = 20

#: How often a finished query is noticed, in s.
_POLL_SECONDS: Final = 0.2

#: What Spark says when a worker took more than 10 s to start. That cannot be set.
_SLOW_START: Final = "Python worker failed to connect back"

#: How often reading is begun, when workers are slow to start.
_STARTS: Final = 12


class _SlowStartError(PipelineError):
    """Nothing is wrong but the time that it took."""


@attrs.frozen
class ArchiveSettings:
    """What to archive, and how.

    :ivar folder: of the archive.
    :ivar source: the database; ``None`` to archive recordings alone.
    :ivar recordings: files, and folders of them.
    :ivar streams: names; empty for all.
    :ivar once: stop when everything that is there now is archived.
    :ivar every: s between two looks at the database and at folders of recordings.
    :ivar max_rows: of a batch.
    :ivar compact_files: how many small files of a day are made into one.
    """

    folder: str
    source: PipelineSettings | None
    recordings: Sequence[str] = ()
    streams: Sequence[str] = ()
    once: bool = False
    every: float = 10.0
    max_rows: int = 1_000_000
    compact_files: int = ENOUGH_FILES
    master: str | None = None

    def options(self) -> dict[str, str]:
        """Give the options of the data source."""
        assert self.source is not None
        options = {
            **reader_options(self.source),
            "maxRowsPerTrigger": str(self.max_rows),
        }
        if self.streams:
            options["streams"] = ",".join(self.streams)
        return options


def _pass(point: Point) -> None:
    pass


def run_archive(
    settings: ArchiveSettings,
    reporter: Reporter,
    metrics: ArchiveMetrics | None = None,
    *,
    stopping: threading.Event | None = None,
    with_signals: bool = False,
    watch: Watch = _pass,
) -> Numbers:
    """Archive; return when everything is there, or when told to stop.

    :param stopping: set from elsewhere, it ends a continuous run.
    :param with_signals: SIGTERM and SIGINT end it, too; the main thread only.
    :param watch: called at each point of the writing.
    :raises PipelineError: it cannot go on; nothing is lost by that.
    """
    stopping = stopping or threading.Event()
    with ExitStack() as stack:
        driver = stack.enter_context(
            drive_archive(
                settings.folder,
                create=True,
                enough_files=settings.compact_files,
                watch=watch,
            )
        )
        if settings.source is not None:
            # Before Spark is started: a wrong option is told at once.
            SourceOptions.parse(settings.options())
            check_checkpoint(driver.layout, driver.writers["rows"])
        find_closed_recordings(settings.recordings)
        session = stack.enter_context(
            job_session("synapse-replication archive", master=settings.master)
        )
        if with_signals:
            # Not before: Spark sets a handler of its own.
            stack.enter_context(_set_by_signals(stopping))
        stack.enter_context(lock_archive_in_java(driver.layout, session))
        driver.recover()
        job = _Archive(
            settings,
            driver,
            session,
            reporter,
            metrics or ArchiveMetrics(CollectorRegistry()),
            stopping,
        )
        return job.run()


class _Archive:
    def __init__(
        self,
        settings: ArchiveSettings,
        driver: ArchiveDriver,
        session: SparkSession,
        reporter: Reporter,
        metrics: ArchiveMetrics,
        stopping: threading.Event,
    ) -> None:
        self._settings = settings
        self._driver = driver
        self._session = session
        self._reporter = reporter
        self._metrics = metrics
        self._stopping = stopping
        self._numbers = Numbers()
        self._ledger = WireLedger(driver.writers["wire"].batches())
        self._batches_since_compaction = {"rows": 0, "wire": 0}
        self._newest = driver.writers["rows"].newest()
        # Told from two threads.
        self._telling = threading.Lock()
        # A query that is stopped may be within a batch; nothing else is done with the
        # rows before that has returned, and no other is begun.
        self._writing = threading.Lock()
        self._closed = False
        # What went wrong in the query's thread, as it was.
        self._failure: Exception | None = None

    def run(self) -> Numbers:
        if self._settings.source is None:
            self._run_without_rows()
        else:
            self._run_beside_query(self._start())
        for kind in ("rows", "wire"):
            self._compact(kind)
        return self._numbers

    def _run_without_rows(self) -> None:
        while True:
            self._archive_recordings()
            if self._settings.once or self._stopping.wait(self._settings.every):
                return

    def _run_beside_query(self, query: StreamingQuery) -> None:
        next_look = time.monotonic()
        starts = 1
        try:
            while True:
                try:
                    if self._ended(query):
                        break
                except _SlowStartError:
                    if starts == _STARTS:
                        raise
                    starts += 1
                    query = self._start()
                if self._stopping.is_set():
                    return
                if time.monotonic() >= next_look:
                    self._look_around()
                    next_look = time.monotonic() + self._settings.every
        finally:
            query.stop()
            with self._writing:
                self._closed = True
        self._look_around()

    def _ended(self, query: StreamingQuery) -> bool:
        from pyspark.errors import StreamingQueryException

        try:
            # It takes fractions, whatever its types say.
            return bool(query.awaitTermination(_POLL_SECONDS))  # type: ignore[arg-type]
        except StreamingQueryException as error:
            if self._failure is not None:
                raise self._failure from error
            text = str(error)
            if _SLOW_START in text:
                raise _SlowStartError(
                    "the machine is so busy that a process of Python takes more than "
                    "10 s to start, which is as long as Spark waits"
                ) from error
            raise PipelineError(shorten(error)) from error

    # -- rows, in the query's thread ---------------------------------------------------

    def _start(self) -> StreamingQuery:
        frame = (
            self._session.readStream.format("synapse_replication")
            .options(**self._settings.options())
            .load()
        )
        writer = (
            frame.writeStream.queryName("archive")
            .foreachBatch(self._write_or_note)
            .option("checkpointLocation", f"file://{self._driver.layout.checkpoint}")
        )
        if self._settings.once:
            return writer.trigger(availableNow=True).start()
        every = f"{int(self._settings.every * 1000)} milliseconds"
        return writer.trigger(processingTime=every).start()

    def _write_or_note(self, frame: DataFrame, number: int) -> None:
        try:
            with self._writing:
                if self._closed:
                    raise PipelineError("the archive was closed meanwhile")
                self._write(frame, number)
        except Exception as error:
            self._failure = error
            raise

    def _write(self, frame: DataFrame, number: int) -> None:
        layout = self._driver.layout
        origin = query_id(layout)
        assert origin is not None
        batch = Batch(number, origin, noted_offsets(layout, number))
        began = time.monotonic()
        manifest = self._driver.writers["rows"].write(
            archive_rows(frame, _utc_now()), batch
        )
        seconds = time.monotonic() - began
        self._newest = manifest
        if not manifest.again:
            self._tell_rows(manifest, seconds)
            self._maybe_compact("rows", manifest)

    def _tell_rows(self, manifest: Manifest, seconds: float) -> None:
        numbers, metrics = self._numbers, self._metrics
        numbers.batches += 1
        numbers.rows += manifest.rows
        metrics.batch_seconds.observe(seconds)
        for stream, rows in _rows_by_stream(manifest).items():
            metrics.rows.labels(stream).inc(rows)
        metrics.set_offsets(archived_offsets(manifest))
        if manifest.rows:
            numbers.rows_per_second = manifest.rows / seconds
            metrics.rows_per_second.set(numbers.rows_per_second)
            self._tell(
                f"batch {manifest.batch.number}: {manifest.rows:,} rows in "
                f"{len(manifest.files)} files, {seconds:.1f} s"
            )

    # -- the rest, in the main thread --------------------------------------------------

    def _look_around(self) -> None:
        self._archive_recordings()
        settings = self._settings
        # Read before the database is: what comes meanwhile counts as not archived.
        newest = self._newest
        latest = database_offsets(SourceOptions.parse(settings.options()))
        if not latest:
            raise PipelineError(
                "the database has no table of any stream: is it the homeserver's? "
                "Tables of your own must be declared in the configuration (-c)"
            )
        archived = {} if newest is None else archived_offsets(newest)
        lag = lag_of(archived, latest)
        self._metrics.set_lag(lag, time.time())
        # Writers of a stream share its ids.
        by_stream: dict[str, int] = {}
        for (stream, _), ids in lag.items():
            by_stream[stream] = max(ids, by_stream.get(stream, 0))
        behind = sum(by_stream.values())
        if behind != self._numbers.behind:
            self._numbers.behind = behind
            self._tell("looked at the database")

    def _archive_recordings(self) -> None:
        found = find_closed_recordings(self._settings.recordings)
        for batch, paths in self._ledger.plan(found):
            frame = archive_wire(read_recordings(self._session, paths), _utc_now())
            manifest = self._driver.writers["wire"].write(frame, batch)
            self._ledger.add(manifest)
            self._numbers.commands += manifest.rows
            self._numbers.recordings += len(paths)
            self._metrics.commands.inc(manifest.rows)
            self._tell(f"{manifest.rows:,} commands of {len(paths)} recordings")
            self._maybe_compact("wire", manifest)

    def _maybe_compact(self, kind: str, manifest: Manifest) -> None:
        self._batches_since_compaction[kind] += bool(manifest.files)
        if self._batches_since_compaction[kind] >= _BATCHES_BETWEEN_COMPACTIONS:
            self._compact(kind)

    def _compact(self, kind: str) -> None:
        self._batches_since_compaction[kind] = 0
        done = self._driver.compactors[kind].compact(self._session)
        if done.folders:
            self._numbers.compacted_files += done.before
            self._metrics.compacted.inc(done.before)
            self._tell(f"{done.before} small files made into {done.after}")

    def _tell(self, what: str) -> None:
        with self._telling:
            self._reporter.show(self._numbers, what)


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _rows_by_stream(manifest: Manifest) -> dict[str, int]:
    from urllib.parse import unquote

    counts: dict[str, int] = {}
    for file in manifest.files:
        stream = unquote(file.partition.split("/")[0].removeprefix("stream="))
        counts[stream] = counts.get(stream, 0) + file.rows
    return counts


@contextmanager
def _set_by_signals(stopping: threading.Event) -> Iterator[None]:
    """Let SIGTERM and SIGINT end the run; a second one ends the process."""
    before: dict[int, Any] = {}

    def stop(number: int, frame: object) -> None:
        stopping.set()
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
