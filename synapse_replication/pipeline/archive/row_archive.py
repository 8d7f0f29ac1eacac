"""Archives rows of the database in the tables of the archive."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.batches import Batch, batches_of
from synapse_replication.pipeline.archive.damage import wrong_sizes
from synapse_replication.pipeline.archive.store import ArchiveStore
from synapse_replication.pipeline.archive.table import ArchiveTable, Point, Watch
from synapse_replication.pipeline.archive.tasks import (
    WrittenRows,
    write_parts,
    write_rows,
)
from synapse_replication.pipeline.source.completeness import (
    last_allocated_id,
    stored_positions,
)
from synapse_replication.pipeline.source.connections import (
    PLAN_TIMEOUT,
    pinned,
    reading,
)
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.source.options import SourceOptions
from synapse_replication.pipeline.source.partitions import IDS_PER_TASK, Part, pack
from synapse_replication.pipeline.source.planning import Planner
from synapse_replication.pipeline.source.reading import SkippedId
from synapse_replication.pipeline.spark.failures import short_failures

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Spark's message if a worker takes more than 10 s to start. That limit cannot be
#: configured.
_SLOW_START: Final = "Python worker failed to connect back"

#: The default number of tasks per core in a batch. With more tasks, cores are idle for
#: a shorter time while the last tasks of a batch run.
_TASKS_PER_CORE: Final = 8

#: The maximum number of attempts to write a batch when workers are slow to start.
_STARTS: Final = 12


@attrs.frozen
class ArchivedBatch:
    """A batch that was archived.

    :ivar rows: the number of rows of each stream.
    :ivar files: the number of files.
    :ivar skipped: the ids whose rows cannot be read because of their content.
    :ivar seconds: the duration.
    :ivar left: the number of complete ids that are left for the next batches.
    """

    rows: Mapping[str, int]
    files: int
    skipped: Sequence[SkippedId]
    seconds: float
    left: int


class RowsArchiver:
    """Archives complete rows.

    A row is complete if its writer cannot commit a row with a lower id any more. Not
    thread-safe.

    :param spark: returns the session; called for the first batch that has more ids than
        a task reads. Smaller batches are read in this process.
    :param batch_ids: the maximum number of ids in a batch, unless a single part has
        more; ``None`` for the number that :data:`_TASKS_PER_CORE` tasks per core read.
    """

    def __init__(
        self,
        spark: Callable[[], SparkSession],
        store: ArchiveStore,
        options: SourceOptions,
        batch_ids: int | None,
        watch: Watch,
    ) -> None:
        self._spark = spark
        self._store = store
        self._options = options
        self._watch = watch
        self._batch_ids = batch_ids
        self._planner = Planner(options, continuous=True)
        #: libpq's parameters for the tasks, from the last plan.
        self._conninfo: Mapping[str, Any] = {}
        self._tables: dict[str, ArchiveTable] = {}
        #: The offset up to which each stream is archived, including ids without rows.
        self.offsets: dict[str, StreamOffset] = {}

    @property
    def tables(self) -> Mapping[str, ArchiveTable]:
        """The tables of the archived streams; empty before :meth:`archive`."""
        return self._tables

    def archive(
        self,
        done: Callable[[ArchivedBatch], object],
        stopped: Callable[[], bool],
        report: Callable[[str], object],
    ) -> None:
        """Archive the rows that are complete at the time of the call.

        :param done: called after each batch.
        :param stopped: called before each batch; returns whether to stop.
        :param report: called with further messages for the user.
        :raises PipelineError: if the database or the archive fails, the database has
            no table of any stream, the archive is ahead of the database, or another
            driver has committed. No rows are lost.
        """
        parts, start, end = self._plan(report)
        left = sum(part.size for part in parts)
        if left:
            report(f"{left:,} ids to archive")
        for batch in batches_of(parts, start, end, self._limit(left)):
            if stopped():
                return
            begun = time.monotonic()
            rows, files, skipped = self._write(batch, report)
            left -= batch.ids
            done(ArchivedBatch(rows, files, skipped, time.monotonic() - begun, left))
        self.offsets.update(end)

    def _limit(self, left: int) -> int:
        """Return the maximum number of ids in a batch, if ``left`` are to archive."""
        if self._batch_ids is not None:
            return self._batch_ids
        if left <= IDS_PER_TASK:
            return IDS_PER_TASK
        cores = self._spark().sparkContext.defaultParallelism
        return _TASKS_PER_CORE * cores * IDS_PER_TASK

    def lag(self) -> dict[tuple[str, str], int]:
        """Return by how many ids the archive is behind each ``(stream, writer)``.

        :raises PipelineError: if the database cannot be reached or a query fails.
        """
        archived = dict(self.offsets)
        latest: dict[str, StreamOffset] = {}
        with reading(self._options.conninfo, PLAN_TIMEOUT) as txn:
            for selection in self._planner.select(txn):
                stream = selection.stream
                positions = stored_positions(txn, stream)
                last = 0 if positions else last_allocated_id(txn, stream) or 0
                latest[stream.name] = StreamOffset(last, positions)
        return lag_of(archived, latest)

    def _plan(
        self, report: Callable[[str], object]
    ) -> tuple[list[Part], dict[str, StreamOffset], dict[str, StreamOffset]]:
        with reading(self._options.conninfo, PLAN_TIMEOUT) as txn:
            selections = self._planner.select(txn)
            if not selections:
                raise PipelineError(
                    "the database has no table of any stream; is it the homeserver's "
                    "database? Declare tables of your own in the configuration (-c)"
                )
            for selection in selections:
                name = selection.stream.name
                table = self._tables.get(name)
                if table is None:
                    table = self._open(name)
                    for damaged in wrong_sizes(self._store, table.files):
                        report(str(damaged))
                    offset = table.state.offset
                    self._planner.check_not_ahead(txn, selection, offset, "the archive")
                    self.offsets[name] = offset
                table.check_sole_driver()
            start = {s.stream.name: self.offsets[s.stream.name] for s in selections}
            end = self._planner.latest(txn, selections, start)
            parts = self._planner.parts(txn, selections, start, end)
            self._conninfo = pinned(self._options.conninfo, txn.connection)
        self._watch(Point.PLANNED)
        return parts, start, end

    def _open(self, stream: str) -> ArchiveTable:
        table = ArchiveTable(
            self._store,
            self._store.stream_uri(stream),
            stream,
            self._options.catalog[stream].table.archive_schema,
        )
        self._tables[stream] = table
        return table

    def _write(
        self, batch: Batch, report: Callable[[str], object]
    ) -> tuple[dict[str, int], int, list[SkippedId]]:
        today = datetime.datetime.now(datetime.timezone.utc).date()
        if batch.ids <= IDS_PER_TASK:
            written = write_parts(self._store, self._conninfo, batch.parts, today)
        else:
            written = self._write_with_spark(batch, today, report)
        self._watch(Point.WRITTEN)
        for stream in sorted(written.files):
            self._tables[stream].commit(written.files[stream], batch.offsets[stream])
            self._watch(Point.COMMITTED)
        self.offsets.update(batch.offsets)
        self._watch(Point.ALL_COMMITTED)
        rows = {
            stream: sum(file.rows for file in files)
            for stream, files in written.files.items()
        }
        return rows, sum(map(len, written.files.values())), written.skipped

    def _write_with_spark(
        self, batch: Batch, today: datetime.date, report: Callable[[str], object]
    ) -> WrittenRows:
        tasks = pack(batch.parts, None)
        session = self._spark()
        for attempt in range(1, _STARTS + 1):
            try:
                with short_failures():
                    return write_rows(
                        session, self._store, self._conninfo, tasks, today
                    )
            except PipelineError as error:
                if _SLOW_START not in str(error) or attempt == _STARTS:
                    raise
                report(f"workers are slow to start; attempt {attempt + 1} of {_STARTS}")
        raise AssertionError("unreachable")


def lag_of(
    archived: Mapping[str, StreamOffset], database: Mapping[str, StreamOffset]
) -> dict[tuple[str, str], int]:
    """Return by how many ids the archive is behind each ``(stream, writer)``.

    A stream whose positions are not stored has the single writer ``""``.

    :param archived: the offset up to which each stream is archived.
    :param database: the newest offset of each stream in the database.
    """
    lag = {}
    for stream, latest in database.items():
        done = archived.get(stream, StreamOffset())
        for writer in latest.writers or {"": 0}:
            behind = latest.position(writer) - done.position(writer)
            lag[stream, writer] = max(0, behind)
    return lag
