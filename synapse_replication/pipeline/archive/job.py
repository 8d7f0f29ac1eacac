"""The archive run, which ``synapse-replication pipeline archive`` starts.

Theory of operation: the driver determines which rows are complete, and assigns ranges
of ids to tasks on Spark's executors, which write Parquet files. It then commits the
files of a batch to the table of each stream, together with the resulting offset. No
other state is stored: after a restart, the driver reads its progress from the tables. A
driver that is killed may leave a batch that is committed to only some of its tables,
and files that no reader sees. Each commit to a table is atomic.

Rows and recordings are archived independently of each other. A recording is identified
by its name without its folder, so that it may be moved to another folder. The archive
stores the size of each recording, to detect a recording that was continued after it had
been archived. Only closed recordings are archived.

Spark is started when there are rows or recordings to archive, or small files to merge.
"""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import attrs

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.delta_table import ArchiveTable
from synapse_replication.pipeline.archive.files import DayWriter, WrittenFile
from synapse_replication.pipeline.archive.metrics import ArchiveMetrics
from synapse_replication.pipeline.archive.row_archive import RowsArchiver, WrittenRows
from synapse_replication.pipeline.archive.store import ArchiveStore
from synapse_replication.pipeline.progress import Display
from synapse_replication.pipeline.scan import batched, run_tasks
from synapse_replication.pipeline.schemas import ARCHIVED_WIRE_SCHEMA
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.source.options import SourceOptions, reader_options
from synapse_replication.pipeline.spark.session import SparkJob
from synapse_replication.pipeline.wire_lines import recordings_in, scan_recordings

#: The number of batches between two searches for small files.
_BATCHES_BETWEEN_COMPACTIONS: Final = 20

#: The maximum size of the recordings in a batch, in bytes, unless a single recording is
#: larger.
_BATCH_BYTES: Final = 1024**3

#: The interval at which unused files are removed, in s. A run with ``once`` removes
#: them at its end.
_VACUUM_SECONDS: Final = 86_400


@attrs.frozen
class ArchiveSettings:
    """The settings of an archive run.

    :ivar archive: a folder, or ``s3://bucket/path``.
    :ivar source: the database; ``None`` to archive only recordings.
    :ivar recordings: recordings, and folders that contain recordings.
    :ivar streams: the names of the streams to archive; empty for all.
    :ivar once: whether to stop after one cycle, which archives the closed recordings
        and then the rows that are complete.
    :ivar every: the pause in s between two cycles.
    :ivar batch_ids: the maximum number of ids in a batch; ``None`` to derive it from
        the number of cores.
    :ivar compact_files: the minimum number of small files of a day that are merged.
    :ivar retention_hours: how long replaced files are retained for readers, in hours.
    :ivar master: the URL of the Spark master; ``None`` for the default of
        :func:`~synapse_replication.pipeline.spark.session.make_session`.
    """

    archive: str
    source: PipelineSettings | None
    recordings: Sequence[str] = ()
    streams: Sequence[str] = ()
    once: bool = False
    every: float = 10.0
    batch_ids: int | None = None
    compact_files: int = 8
    retention_hours: int = 168
    master: str | None = None

    def source_options(self) -> SourceOptions | None:
        """Return the options of the data source; ``None`` without a database.

        :raises PipelineError: if an option is invalid.
        """
        if self.source is None:
            return None
        options = reader_options(self.source)
        if self.streams:
            options["streams"] = ",".join(self.streams)
        return SourceOptions.parse(options)


@attrs.define
class Numbers:
    """The totals since the start of the job, and its current lag and rate.

    :ivar rows: archived rows of streams.
    :ivar skipped: ids whose rows cannot be read because of their content.
    :ivar commands: archived commands of recordings.
    :ivar batches: committed batches.
    :ivar recordings: archived recordings.
    :ivar compacted_files: small files that were merged into larger ones.
    :ivar behind: the number of ids by which the archive is behind the database;
        ``None`` if unknown.
    :ivar rows_per_second: the rate of the last batch with rows.
    """

    rows: int = 0
    skipped: int = 0
    commands: int = 0
    batches: int = 0
    recordings: int = 0
    compacted_files: int = 0
    behind: int | None = None
    rows_per_second: float = 0.0


class ArchiveProgress(Display):
    """The display of a run. Its bar shows the part of the rows that is archived."""

    def show(self, numbers: Numbers, event: str) -> None:
        """Show the totals and the last event.

        :param event: the last event, in a few words.
        """
        text, behind = _total(numbers), numbers.behind
        total = 0 if behind is None else numbers.rows + behind
        self.update(f"{event}; {text}", text, event, numbers.rows, total)


def _total(numbers: Numbers) -> str:
    parts = [f"{numbers.rows:,} rows"]
    if numbers.rows_per_second:
        parts.append(f"{numbers.rows_per_second:,.0f} rows/s")
    if numbers.skipped:
        parts.append(f"{numbers.skipped:,} ids skipped")
    if numbers.commands:
        parts.append(f"{numbers.commands:,} commands")
    if numbers.behind is not None:
        parts.append(f"{numbers.behind:,} ids behind")
    return ", ".join(parts)


def run_archive(
    settings: ArchiveSettings,
    reporter: ArchiveProgress,
    metrics: ArchiveMetrics | None = None,
    *,
    stopping: threading.Event | None = None,
    with_signals: bool = False,
) -> Numbers:
    """Archive until ``stopping`` is set or, with ``once``, for one cycle.

    :param stopping: an event that another thread sets to end the run. While rows are
        archived, the run ends after the current batch; while recordings are archived,
        after all closed recordings.
    :param with_signals: whether SIGTERM and SIGINT end the run. This is possible only
        in the main thread.
    :raises PipelineError: if the run cannot continue. No rows are lost.
    """
    metrics = metrics or ArchiveMetrics()
    job = _ArchiveJob(settings, reporter, metrics, stopping or threading.Event())
    return job.run(with_signals=with_signals)


@attrs.define(eq=False, repr=False, slots=False)
class _ArchiveJob:
    _settings: ArchiveSettings
    _reporter: ArchiveProgress
    _metrics: ArchiveMetrics
    _stopping: threading.Event

    def __attrs_post_init__(self) -> None:
        options, limit = self._settings.source_options(), self._settings.batch_ids
        self._store = ArchiveStore.at(self._settings.archive)
        self._numbers = Numbers()
        self._spark = SparkJob(
            "synapse-replication archive", master=self._settings.master
        )
        self._rows: RowsArchiver | None = None
        if options is not None:
            self._rows = RowsArchiver(
                self._spark, self._store, options, limit, self._report
            )
        self._wire: ArchiveTable | None = None
        self._batches_since_compaction = 0
        self._next_vacuum = time.monotonic() + _VACUUM_SECONDS

    def run(self, *, with_signals: bool) -> Numbers:
        self._store.streams()
        find_closed_recordings(self._settings.recordings)
        with ExitStack() as stack:
            if with_signals:
                # Spark installs its own handler of SIGINT.
                self._spark.started = stack.enter_context(
                    _set_by_signals(self._stopping)
                )
            stack.enter_context(self._spark)
            while True:
                self._cycle()
                if self._settings.once or self._stopping.wait(self._settings.every):
                    return self._numbers

    def _cycle(self) -> None:
        self._archive_recordings()
        if self._rows is not None:
            for batch in self._rows.archive(self._stopping.is_set):
                self._metrics.set_offsets(self._rows.offsets)
                self._batch_done(batch)
            self._show_lag(self._rows)
        self._maintain(finished=True)

    def _batch_done(self, batch: WrittenRows) -> None:
        numbers, metrics = self._numbers, self._metrics
        rows = sum(batch.rows.values())
        numbers.batches += 1
        numbers.rows += rows
        numbers.behind = batch.left
        metrics["batch_seconds"].observe(batch.seconds)
        numbers.skipped += len(batch.skipped)
        for skipped in batch.skipped:
            metrics["skipped_ids"].labels(skipped.stream).inc()
            # The bar would show it only until the next event.
            self._reporter.write(str(skipped))
        for stream, count in batch.rows.items():
            metrics["rows"].labels(stream).inc(count)
        self._batches_since_compaction += 1
        if rows:
            numbers.rows_per_second = rows / batch.seconds
            metrics["rows_per_second"].set(numbers.rows_per_second)
            self._report(f"{rows:,} rows in {batch.files} files, {batch.seconds:.1f} s")
        self._maintain()

    def _show_lag(self, rows: RowsArchiver) -> None:
        lag = rows.lag()
        self._metrics.set_offsets(rows.offsets)
        self._metrics.set_lag(lag, time.time())
        # The writers of a stream share its ids, so take the maximum and not the sum.
        by_stream: dict[str, int] = {}
        for (stream, _), ids in lag.items():
            by_stream[stream] = max(ids, by_stream.get(stream, 0))
        behind = sum(by_stream.values())
        if behind != self._numbers.behind:
            self._numbers.behind = behind
            self._report("read the positions in the database")

    def _archive_recordings(self) -> None:
        if not self._settings.recordings:
            return
        if self._wire is None:
            self._wire = ArchiveTable(
                self._store, self._store.wire_uri, "the wire", ARCHIVED_WIRE_SCHEMA
            )
        wire = self._wire
        wire.check_sole_driver()
        found = find_closed_recordings(self._settings.recordings)
        for recordings in plan_recordings(found, wire.archived_size):
            files = self._write_recordings(recordings)
            sizes = {path.name: size for path, size in recordings.items()}
            wire.commit(files, recordings=sizes)
            commands = sum(file.rows for file in files)
            self._numbers.commands += commands
            self._numbers.recordings += len(recordings)
            self._metrics["wire_commands"].inc(commands)
            self._batches_since_compaction += 1
            self._report(f"{commands:,} commands of {len(recordings)} recordings")

    def _write_recordings(self, paths: Iterable[Path]) -> list[WrittenFile]:
        """Write recordings to files of the table of recorded commands."""
        store, scan = self._store, scan_recordings(paths)
        today = datetime.datetime.now(datetime.timezone.utc).date()

        def write(task: Any) -> list[WrittenFile]:
            # Commands whose time is unknown are assigned to the current day.
            writer = DayWriter(store, store.wire_uri, "received_ts", today)
            for batch in scan.read(task):
                writer.write(batch)
            return writer.close()

        store.create()
        self._spark.start(0)
        self._report("starting Spark")
        written = run_tasks(write, scan.tasks, self._spark())
        return [file for files in written for file in files]

    # -- maintenance -------------------------------------------------------------------

    def _maintain(self, *, finished: bool = False) -> None:
        batches = self._batches_since_compaction
        if batches >= _BATCHES_BETWEEN_COMPACTIONS or (
            finished and self._settings.once
        ):
            self._batches_since_compaction = 0
            self._compact()
        if finished and (self._settings.once or time.monotonic() >= self._next_vacuum):
            self._next_vacuum = time.monotonic() + _VACUUM_SECONDS
            self._vacuum()

    def _tables(self) -> Iterator[ArchiveTable]:
        if self._rows is not None:
            yield from self._rows.tables.values()
        if self._wire is not None:
            yield self._wire

    def _compact(self) -> None:
        before = after = 0
        for table in self._tables():
            merged, new = table.compact(self._settings.compact_files, self._spark)
            before += merged
            after += new
        if before:
            self._numbers.compacted_files += before
            self._metrics["compacted_files"].inc(before)
            self._report(f"{before} small files merged into {after}")

    def _vacuum(self) -> None:
        removed = sum(
            table.vacuum(self._settings.retention_hours) for table in self._tables()
        )
        if removed:
            self._metrics["vacuumed_files"].inc(removed)
            self._report(f"{removed} unused files removed")

    def _report(self, event: str) -> None:
        self._reporter.show(self._numbers, event)


@contextmanager
def _set_by_signals(stopping: threading.Event) -> Iterator[Callable[[], None]]:
    """Set the event on SIGTERM or SIGINT within the context.

    Yield a function that installs the handlers again, unless a signal has arrived. The
    first signal also restores the previous handlers, so a second one usually ends the
    process.
    """
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}

    def stop(number: int, frame: object) -> None:
        stopping.set()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def install() -> None:
        if not stopping.is_set():
            for number in before:
                signal.signal(number, stop)

    install()
    try:
        yield install
    finally:
        restore()


# -- closed recordings -------------------------------------------------------------


def find_closed_recordings(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the closed recordings among files and folders.

    A folder may be empty. A file that a recorder is still writing has another suffix,
    and is not found in a folder. A file in ``paths`` is always included, even if it is
    not closed.

    :raises PipelineError: if a path does not exist, or if two recordings have the same
        name.
    """
    found: dict[str, Path] = {}
    for given in paths:
        for file in recordings_in(Path(given).absolute()):
            other = found.setdefault(file.name, file)
            if other != file:
                raise PipelineError(
                    f"{file} and {other} have the same name, by which the archive "
                    "identifies recordings; rename one of them"
                )
    return list(found.values())


def plan_recordings(
    recordings: Iterable[Path], archived_size: Callable[[str], int | None]
) -> Iterator[dict[Path, int]]:
    """Yield the new recordings in batches, with their sizes in bytes.

    :param archived_size: returns the archived size of a recording by its name; ``None``
        if it is not archived.
    :raises PipelineError: if a recording changed after it was archived, or was deleted
        before.
    """
    # Check all recordings first: archived ones may be deleted between two batches.
    new: dict[Path, int] = {}
    for path in recordings:
        archived = archived_size(path.name)
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            if archived is None:
                raise PipelineError(
                    f"{path} was deleted before it was archived; its commands are lost "
                    "unless there is a copy"
                ) from error
            continue
        if archived is None:
            new[path] = size
        elif archived != size:
            raise PipelineError(
                f"{path} had {archived} bytes when it was archived, and now has "
                f"{size}; the changes would not be archived. "
                "Archive only closed recordings, such as those that "
                "'synapse-replication record' writes, or rename this file"
            )
    for paths in batched(new, new.__getitem__, _BATCH_BYTES):
        yield {path: new[path] for path in paths}
