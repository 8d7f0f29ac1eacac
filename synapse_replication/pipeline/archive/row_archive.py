"""Archives rows of the database in the tables of the archive.

In each cycle, the driver plans once which rows to read, divides them into parts by id,
and reads and commits the parts batch by batch, so that a crash loses little work and
progress is visible. Each stream of a batch has a commit of its own.
"""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.delta_table import ArchiveTable
from synapse_replication.pipeline.archive.files import (
    DayWriter,
    WrittenFile,
    wrong_sizes,
)
from synapse_replication.pipeline.archive.store import ArchiveStore, storage_error_text
from synapse_replication.pipeline.scan import batched, run_tasks
from synapse_replication.pipeline.source import completeness, planning, reading
from synapse_replication.pipeline.source.connections import read_transaction
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.source.options import SourceOptions
from synapse_replication.pipeline.source.ranges import Part
from synapse_replication.pipeline.spark.session import SparkJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The default number of tasks per core in a batch. With more tasks, cores are idle for
#: a shorter time while the last tasks of a batch run.
_TASKS_PER_CORE: Final = 8


@attrs.frozen
class Batch:
    """Parts that are read together.

    :ivar offsets: the offset of each stream in ``parts``, after this batch.
    """

    parts: Sequence[Part]
    offsets: Mapping[str, StreamOffset]


@attrs.frozen
class WrittenRows:
    """The rows of a batch.

    :ivar rows: the number of rows of each stream.
    :ivar files: the number of files.
    :ivar skipped: the ids whose rows cannot be read because of their content.
    :ivar seconds: how long it took to read, write and commit them, in s.
    :ivar left: the number of complete ids that are left for the next batches.
    """

    rows: Mapping[str, int]
    files: int
    skipped: Sequence[reading.SkippedId]
    seconds: float
    left: int


@attrs.define(eq=False, repr=False, slots=False)
class RowsArchiver:
    """Archives complete rows.

    A row is complete if its writer cannot commit a row with a lower id any more. Not
    thread-safe.

    :param spark: started as soon as it is certain that there are rows to archive.
    :param batch_ids: the maximum number of ids in a batch, unless a single part has
        more; ``None`` for the number that :data:`_TASKS_PER_CORE` tasks per core read.
    :param report: called with messages for the user.
    """

    _spark: SparkJob
    _store: ArchiveStore
    _options: SourceOptions
    _batch_ids: int | None
    _report: Callable[[str], object]

    def __attrs_post_init__(self) -> None:
        self._planner = planning.Planner(self._options, continuous=True)
        #: The tables of the archived streams; empty before :meth:`archive`.
        self.tables: dict[str, ArchiveTable] = {}
        #: The offset up to which each stream is archived, including ids without rows.
        self.offsets: dict[str, StreamOffset] = {}

    def archive(self, stopped: Callable[[], bool]) -> Iterator[WrittenRows]:
        """Archive the rows that are complete at the beginning; yield each batch.

        :param stopped: called before each batch; returns whether to stop.
        :raises PipelineError: if the database or the archive fails, the database has
            no table of any stream, the archive is ahead of the database, or another
            driver has committed. No rows are lost.
        """
        plan = self._plan()
        left = sum(part.size for part in plan.parts)
        if left:
            # Without this, tasks would find out.
            self._store.create()
            # Rows are read and written in Python, so that Java has little to do.
            self._spark.start(0)
            self._report(f"{left:,} ids to archive; starting Spark")
            session = self._spark()
            for batch in batches_of(plan, self._limit(session)):
                if stopped():
                    return
                left -= sum(part.size for part in batch.parts)
                yield self._write(batch, plan.conninfo, session, left)
        self.offsets.update(plan.end)

    def _limit(self, session: SparkSession) -> int:
        """Return the maximum number of ids in a batch."""
        if self._batch_ids is not None:
            return self._batch_ids
        cores = session.sparkContext.defaultParallelism
        return _TASKS_PER_CORE * cores * planning.IDS_PER_TASK

    def lag(self) -> dict[tuple[str, str], int]:
        """Return by how many ids the archive is behind each ``(stream, writer)``.

        :raises PipelineError: if the database cannot be reached or a query fails.
        """
        lag = {}
        with read_transaction(self._options.conninfo) as txn:
            for selection in self._planner.select(txn):
                stream = selection.stream
                archived = self.offsets.get(stream.name, StreamOffset())
                # A stream whose positions are not stored has the single writer "".
                last = completeness.stored_tokens(txn, stream) or {
                    "": completeness.last_allocated_id(txn, stream) or 0
                }
                for writer, position in last.items():
                    behind = position - archived.position(writer)
                    lag[stream.name, writer] = max(0, behind)
        return lag

    def _plan(self) -> planning.Plan:
        with read_transaction(self._options.conninfo) as txn:
            selections = self._planner.select(txn)
            if not selections:
                raise PipelineError(
                    "the database has no table of any stream; is it the homeserver's "
                    "database? Declare tables of your own in the configuration (-c)"
                )
            for selection in selections:
                name = selection.stream.name
                if name not in self.tables:
                    table = self._open(name)
                    offset = table.state.offset
                    self._planner.check_not_ahead(txn, selection, offset, "the archive")
                    self.tables[name], self.offsets[name] = table, offset
                self.tables[name].check_sole_driver()
            start = {s.stream.name: self.offsets[s.stream.name] for s in selections}
            end = self._planner.latest(txn, selections, start)
        # This transaction sees the rows whose commits were waited for.
        with read_transaction(self._options.conninfo) as txn:
            return self._planner.plan(txn, selections, start, end)

    def _open(self, stream: str) -> ArchiveTable:
        uri = self._store.stream_uri(stream)
        schema = self._options.catalog[stream].table.archive_schema
        table = ArchiveTable(self._store, uri, stream, schema)
        for damaged in wrong_sizes(self._store, table.files):
            self._report(str(damaged))
        return table

    def _write(
        self,
        batch: Batch,
        conninfo: Mapping[str, Any],
        session: SparkSession,
        left: int,
    ) -> WrittenRows:
        begun = time.monotonic()
        today = datetime.datetime.now(datetime.timezone.utc).date()
        write = functools.partial(write_parts, self._store, conninfo, today)
        tasks = planning.pack(batch.parts, None)
        results = run_tasks(write, tasks, session)
        files = [file for found, _ in results for file in found]
        rows = {}
        for stream, offset in sorted(batch.offsets.items()):
            table = self.tables[stream]
            of_stream = [file for file in files if file.uri == table.uri]
            rows[stream] = sum(file.rows for file in of_stream)
            table.commit(of_stream, offset)
        self.offsets.update(batch.offsets)
        skipped = [each for _, found in results for each in found]
        return WrittenRows(rows, len(files), skipped, time.monotonic() - begun, left)


def batches_of(plan: planning.Plan, limit: int) -> Iterator[Batch]:
    """Group the parts of a plan into batches, one stream after another.

    :param limit: the maximum number of ids in a batch, unless a single part has more.
    """
    ordered = sorted(plan.parts, key=lambda p: (p.stream.name, p.low, p.high))
    last = {part.stream.name: part for part in ordered}
    for batch in batched(ordered, lambda part: part.size, limit):
        offsets = {}
        # All rows of a stream up to the last id of its last part are in this batch or
        # in earlier ones.
        for name, part in {part.stream.name: part for part in batch}.items():
            end = plan.end[name]
            is_last = part is last[name]
            offsets[name] = end if is_last else plan.start[name].towards(end, part.high)
        yield Batch(batch, offsets)


def write_parts(
    store: ArchiveStore,
    conninfo: Mapping[str, Any],
    today: datetime.date,
    parts: Iterable[Part],
) -> tuple[list[WrittenFile], list[reading.SkippedId]]:
    """Write rows from the database to files, in a task.

    :param today: the day to assign to rows whose time of writing is unknown.
    :return: the files, and the ids whose rows cannot be read because of their content.
    :raises PipelineError: if the database cannot be read, or a file cannot be written.
    """
    writers: dict[str, DayWriter] = {}
    skipped: list[reading.SkippedId] = []
    try:
        with reading.task_connection(conninfo) as connection:
            for part in parts:
                uri = store.stream_uri(part.stream.name)
                if uri not in writers:
                    writers[uri] = DayWriter(store, uri, "written_ts", today)
                for batch in reading.read_part(connection, conninfo, part, skipped):
                    writers[uri].write(batch)
        return [f for writer in writers.values() for f in writer.close()], skipped
    except OSError as error:
        raise PipelineError(
            f"the archive {store.uri} cannot be written: {storage_error_text(error)}"
        ) from error
