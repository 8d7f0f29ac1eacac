"""Repairs an archive: reads the rows of damaged files from the database again.

The log of a table still has the range of tokens of each damaged file. The rows in that
range that no intact file has are read again, and one commit replaces the damaged files.
The damaged files themselves remain until a vacuum. The commit counts as a batch, so it
is rejected if another driver has committed one; a driver that is idle stops.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs
import pyarrow as pa
import pyarrow.compute as pc

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive import files
from synapse_replication.pipeline.archive.delta_table import ArchiveTable
from synapse_replication.pipeline.archive.log import offsets_around, read_purged_ranges
from synapse_replication.pipeline.archive.store import MISSING_REASON, ArchiveStore
from synapse_replication.pipeline.scan import Spark, run_tasks
from synapse_replication.pipeline.source.connections import read_transaction
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.source.options import SourceOptions
from synapse_replication.pipeline.source.planning import Planner
from synapse_replication.pipeline.source.ranges import Part
from synapse_replication.pipeline.source.reading import (
    SkippedId,
    read_part,
    task_connection,
)
from synapse_replication.text import counted

#: The columns that identify a row of a stream. The writer is omitted: it may have been
#: unknown when the row was archived.
_KEY: Final = ["stream_id", "row_index"]
_KEY_SCHEMA: Final = pa.schema([("stream_id", pa.int64()), ("row_index", pa.int32())])

#: The operations of an empty commit in the place of a damaged one: before its rows have
#: been read again, and after that.
_PENDING: Final = "REPAIR"
_DONE: Final = "REPAIRED"


@attrs.frozen
class Repair:
    """The repair of a table.

    :ivar damaged: the damaged files, which the table does not contain any more.
    :ivar commits: the number of commits that were lost.
    :ivar rows: the number of rows that were read again.
    """

    stream: str
    damaged: Sequence[files.DamagedFile]
    commits: int
    rows: int

    @property
    def lost(self) -> int:
        """The number of rows that neither the archive nor the database has."""
        return max(sum(each.file.row_count for each in self.damaged) - self.rows, 0)

    def describe(self) -> str:
        """Return a sentence about the repair."""
        replaced = []
        if self.damaged:
            tokens = ", ".join(
                f"{low} to {high}"
                for low, high in _ranges(each.file for each in self.damaged)
            )
            count = counted(len(self.damaged), "damaged file")
            replaced.append(f"{count} (tokens {tokens})")
        if self.commits:
            replaced.append(counted(self.commits, "damaged commit"))
        what = " and ".join(replaced) or "a damaged checkpoint"
        text = (
            f"{self.stream}: replaced {what}; read {self.rows} rows from the database "
            "again"
        )
        if self.lost:
            text += f"; {self.lost} rows do not exist there any more"
        return text


def repair_archive(
    archive: str,
    options: SourceOptions,
    spark: Spark,
    report: Callable[[str], object],
) -> list[Repair]:
    """Repair the tables of all streams that the options select.

    :param spark: called if there are files to check.
    :param report: called with a description of each step.
    :raises PipelineError: if the archive or the database cannot be read, another driver
        is at work, or a file has no range of tokens. Tables that were repaired before
        remain so.
    """
    store = ArchiveStore.existing(archive)
    repairs = []
    for stream in store.streams():
        if options.streams is not None and stream not in options.streams:
            continue
        if stream not in options.catalog:
            report(f"{stream}: not checked, because the configuration lacks the stream")
            continue
        report(f"check {stream}")
        uri = store.stream_uri(stream)
        log_files = store.damaged_log_files(uri)
        for name, reason in log_files:
            report(f"{stream}: {uri}/_delta_log/{name} {reason}")
        replace_log_files(store, uri, log_files)
        schema = options.catalog[stream].table.archive_schema
        table = ArchiveTable(store, uri, stream, schema)
        lost_commits = _lost_commits(table)
        damaged = files.wrong_sizes(store, table.files)
        damaged_files = {each.file for each in damaged}
        rest = [file for file in table.files if file not in damaged_files]
        damaged += files.find_damage(store, rest, spark)
        for each in damaged:
            report(str(each))
        if damaged or log_files or lost_commits:
            repairs.append(
                _repair(store, options, table, damaged, lost_commits, spark, report)
            )
            for version in lost_commits:
                _write_placeholder(store, uri, f"{version:020}.json", _DONE)
    return repairs


def replace_log_files(
    store: ArchiveStore, uri: str, damaged: Iterable[tuple[str, str]]
) -> None:
    """Move damaged files of a log aside, and put empty commits in their places.

    A checkpoint is not replaced: readers use the commits instead.

    :param damaged: the names of the files, with the reasons.
    :raises PipelineError: if the first commit, which has the columns, is damaged;
        nothing is changed then.
    """
    filesystem, folder = store.filesystem, f"{store.path(uri)}/_delta_log"
    reasons = dict(damaged)
    first = f"{0:020}.json"
    if first in reasons:
        raise PipelineError(
            f"{uri}/_delta_log/{first} {reasons[first]}, and nothing else has the "
            "columns of the table; restore the file from a backup, or archive to a new "
            "location"
        )
    for name, reason in reasons.items():
        if reason != MISSING_REASON:
            filesystem.move(f"{folder}/{name}", f"{folder}/{name}.damaged")
        if name.endswith(".json"):
            _write_placeholder(store, uri, name, _PENDING)
        else:
            hint = f"{folder}/_last_checkpoint"
            if filesystem.get_file_info(hint).is_file:
                filesystem.delete_file(hint)


def _write_placeholder(
    store: ArchiveStore, uri: str, name: str, operation: str
) -> None:
    """Write an empty commit, or replace it."""
    content = {"commitInfo": {"timestamp": 0, "operation": operation}}
    path = f"{store.path(uri)}/_delta_log/{name}"
    with store.filesystem.open_output_stream(path) as file:
        file.write(json.dumps(content).encode())


def _lost_commits(table: ArchiveTable) -> list[int]:
    """Return the versions of the lost commits whose rows must still be read again.

    They include those of an earlier repair that did not complete.
    """
    commits = [] if table.delta is None else table.delta.history()
    return [each["version"] for each in commits if each.get("operation") == _PENDING]


def _repair(
    store: ArchiveStore,
    options: SourceOptions,
    table: ArchiveTable,
    damaged: Sequence[files.DamagedFile],
    lost_commits: Sequence[int],
    spark: Spark,
    report: Callable[[str], object],
) -> Repair:
    delta = table.delta
    assert delta is not None, "the files and commits to repair are those of a table"
    damaged_files = [each.file for each in damaged]
    intact = [file for file in table.files if file not in damaged_files]
    days = frozenset(file.day for file in damaged_files)
    ranges = _ranges(damaged_files)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    first_day = datetime.date.fromisoformat(min([*days, today]))
    lost_rows = _LostRows(store, table.uri, intact, first_day, ranges, days)
    offsets = [(StreamOffset(low - 1), StreamOffset(high)) for low, high in ranges]
    tasks = _tasks(options, table.name, offsets, lost_rows.write)
    if lost_commits:
        purged = read_purged_ranges(delta, table.name)
        above = max((each.last_token for each in purged), default=0)
        lost_rows = attrs.evolve(lost_rows, outside=True, above=above)
        offsets = [offsets_around(delta, lost_commits)]
        tasks += _tasks(options, table.name, offsets, lost_rows.write)
    written: list[files.WrittenFile] = []
    for found, skipped in run_tasks(_call, tasks, spark()):
        written += found
        for each in skipped:
            report(str(each))
    if written or damaged_files:
        table.commit(written, replaced=damaged_files)
    rows = sum(file.rows for file in written)
    return Repair(table.name, damaged, len(lost_commits), rows)


#: What a task has written, and the ids whose rows it could not convert.
_Written = tuple[list[files.WrittenFile], list[SkippedId]]
_Task = Callable[[], _Written]


def _call(task: _Task) -> _Written:
    return task()


def _tasks(
    options: SourceOptions,
    stream: str,
    offsets: Iterable[tuple[StreamOffset, StreamOffset]],
    write: Callable[[Mapping[str, Any], Part], _Written],
) -> list[_Task]:
    """Return a task for each part of the rows between two offsets."""
    planner = Planner(options, continuous=True)
    tasks: list[_Task] = []
    with read_transaction(options.conninfo) as txn:
        selections = [s for s in planner.select(txn) if s.stream.name == stream]
        for start, end in offsets:
            plan = planner.plan(txn, selections, {stream: start}, {stream: end})
            tasks += (partial(write, plan.conninfo, part) for part in plan.parts)
    return tasks


@attrs.frozen
class _LostRows:
    """The rows of a table that no intact file has; they are written in tasks.

    Rows of other days than those of the damaged files have been purged. Those of lost
    commits may be of any day: of these, the rows above all purged tokens are lost.

    :ivar ranges: the ranges of tokens of the damaged files.
    :ivar days: the days of the damaged files.
    :ivar outside: whether to write the rows of lost commits, except those of damaged
        files, instead of the rows of damaged files.
    :ivar above: the greatest purged token.
    """

    store: ArchiveStore
    uri: str
    intact: Sequence[files.ArchivedFile]
    first_day: datetime.date
    ranges: Sequence[tuple[int, int]]
    days: Collection[str]
    outside: bool = False
    above: int = 0

    def write(self, conninfo: Mapping[str, Any], part: Part) -> _Written:
        """Write the lost rows of a part that the database has, and can convert."""
        writer = files.DayWriter(self.store, self.uri, "written_ts", self.first_day)
        skipped: list[SkippedId] = []
        with task_connection(conninfo) as connection:
            batches = list(read_part(connection, conninfo, part, skipped=skipped))
        if batches:
            rows = pa.Table.from_batches(batches)
            lost = self._of_damaged_files(rows)
            if self.outside:
                lost = pc.and_(
                    pc.invert(lost), pc.greater(rows.column("stream_id"), self.above)
                )
            archived = _keys(self.store, self.intact, part.low + 1, part.high)
            for batch in _without(rows.filter(lost), archived).to_batches():
                writer.write(batch)
        return writer.close(), skipped

    def _of_damaged_files(self, rows: pa.Table) -> pa.ChunkedArray:
        """Return for each row whether its token and its day are of a damaged file.

        A row without a time may be of any day.
        """
        written, tokens = rows.column("written_ts"), rows.column("stream_id")
        days = pa.array(sorted(self.days), pa.string())
        found = pc.or_(
            pc.is_null(written), pc.is_in(pc.strftime(written, "%Y-%m-%d"), days)
        )
        within = pa.chunked_array([pa.repeat(pa.scalar(False), rows.num_rows)])
        for low, high in self.ranges:
            of_range = pc.and_(
                pc.greater_equal(tokens, low), pc.less_equal(tokens, high)
            )
            within = pc.or_(within, of_range)
        return pc.and_(found, within)


def _ranges(found: Iterable[files.ArchivedFile]) -> list[tuple[int, int]]:
    """Return the ranges of tokens of files; merge the ranges that overlap.

    :raises PipelineError: if the range of a file is unknown.
    """
    merged: list[tuple[int, int]] = []
    bounds = []
    for file in found:
        if file.token_range is None:
            raise PipelineError(
                f"{file.table_name}: the log has no tokens of {file.path}; restore the "
                "archive from a backup, or archive to a new location"
            )
        bounds.append(file.token_range)
    for low, high in sorted(bounds):
        if merged and low <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return merged


def _keys(
    store: ArchiveStore, intact: Iterable[files.ArchivedFile], low: int, high: int
) -> pa.Table:
    """Return the keys of the rows with tokens in a range, from intact files."""
    found = [_KEY_SCHEMA.empty_table()]
    for file in intact:
        first, last = file.token_range or (low, high)
        if first <= high and last >= low:
            found.append(file.rows_in(store, _KEY_SCHEMA).to_table())
    return pa.concat_tables(found)


def _without(rows: pa.Table, excluded_keys: pa.Table) -> pa.Table:
    """Return the rows whose keys are not excluded, in the same order."""
    numbered = rows.select(_KEY).append_column("at", pa.array(range(rows.num_rows)))
    left = numbered.join(excluded_keys, keys=_KEY, join_type="left anti")
    return rows.take(left.column("at").sort())
