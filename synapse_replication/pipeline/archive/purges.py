"""Removes old days from an archive, and records the ranges of the removed tokens.

A purge of a stream's table has two steps. The first stores a range for each writer in a
property of the table; the range contains the tokens to be purged. The second is one
commit that removes the days. The table of recorded commands has no such property. After
a crash between these steps, the property covers rows that still exist: audits treat the
range as purged, and the rows are removed when the purge is repeated. The commit is part
of the table's history; a vacuum removes the files after the retention period. A purge
does not change the stream's offset (the position up to which its rows are archived), so
purged rows are not archived again.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import attrs
import pyarrow as pa

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.failures import reason_of
from synapse_replication.pipeline.archive.log import (
    PurgedRange,
    commit_properties,
    purged_properties,
    read_purged_ranges,
    read_state,
)
from synapse_replication.pipeline.archive.store import ArchiveStore, open_archive
from synapse_replication.pipeline.schemas import DAY

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from synapse_replication.pipeline.progress import JobProgress

#: The maximum number of attempts to purge a table. An attempt fails if, for instance,
#: the Spark driver of an archive job changes the files of the old days meanwhile.
_ATTEMPTS: Final = 10


@attrs.frozen
class OldDay:
    """A day whose rows are to be removed from a table.

    :ivar stream: the name of the stream; ``None`` for the table of recorded
        commands.
    :ivar rows: the number of rows.
    :ivar size: the size of the files, in bytes.
    """

    stream: str | None
    day: datetime.date
    rows: int
    size: int


def purge_archive(
    archive: str,
    before: datetime.date,
    *,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> list[OldDay]:
    """Remove the rows of all days before a date, and return these days.

    :param dry_run: whether to only return the days, without removing rows.
    :param progress: shows a step for each table and, if rows are removed, counts files.
    :raises PipelineError: if the archive does not exist, or cannot be read or written.
    """
    store = open_archive(archive)
    act = find_old_days if dry_run else purge_days
    return act(store, before, progress)


def find_old_days(
    store: ArchiveStore, before: datetime.date, progress: JobProgress | None = None
) -> list[OldDay]:
    """Return all days before a date, ordered by table and day.

    The table of recorded commands is the last one.

    :param progress: shows a step for each table.
    :raises PipelineError: if the archive cannot be read.
    """
    return [
        day
        for stream, table in _tables(store, progress)
        for day in _days(stream, table, before)
    ]


def purge_days(
    store: ArchiveStore, before: datetime.date, progress: JobProgress | None = None
) -> list[OldDay]:
    """Remove the rows of all days before a date, and return these days.

    An archive job may be running at the same time.

    :param progress: shows a step for each table, and counts the files whose tokens are
        recorded.
    :raises PipelineError: if the archive cannot be read or written, or the old days of
        a table change during each attempt to purge it.
    """
    from deltalake.exceptions import DeltaError

    removed = []
    for stream, table in _tables(store, progress):
        try:
            removed += _purge(store, stream, table, before, progress)
        except (pa.ArrowException, DeltaError, OSError) as error:
            raise _failed(table, error) from error
    return removed


def _tables(
    store: ArchiveStore, progress: JobProgress | None
) -> Iterator[tuple[str | None, DeltaTable]]:
    tables: list[tuple[str | None, str]] = [
        *((stream, store.stream_uri(stream)) for stream in store.streams()),
        (None, store.wire_uri),
    ]
    if progress is not None:
        progress.expect(len(tables))
    for stream, uri in tables:
        if progress is not None:
            progress.begin("recordings of the wire" if stream is None else stream)
        table = store.table(uri)
        if table is not None:
            yield stream, table


def _days(stream: str | None, table: DeltaTable, before: datetime.date) -> list[OldDay]:
    found: dict[datetime.date, tuple[int, int]] = {}
    for action in _old_actions(table, before):
        rows, size = found.get(action["day"], (0, 0))
        found[action["day"]] = (
            rows + (action["num_records"] or 0),
            size + action["size_bytes"],
        )
    return [OldDay(stream, day, *found[day]) for day in sorted(found)]


def _old_actions(table: DeltaTable, before: datetime.date) -> list[dict[str, Any]]:
    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    for action in actions:
        day = action[f"partition.{DAY}"]
        if not isinstance(day, datetime.date):
            day = datetime.date.fromisoformat(str(day))
        action["day"] = day
    return [action for action in actions if action["day"] < before]


def _purge(
    store: ArchiveStore,
    stream: str | None,
    table: DeltaTable,
    before: datetime.date,
    progress: JobProgress | None,
) -> list[OldDay]:
    from deltalake.exceptions import CommitFailedError

    for attempt in range(_ATTEMPTS):
        days = _days(stream, table, before)
        if not days:
            return []
        properties = commit_properties(read_state(table), new=False)
        try:
            if stream is not None and not _record(
                store, stream, table, before, progress
            ):
                continue
            table.delete(
                f"{DAY} < DATE '{before.isoformat()}'", commit_properties=properties
            )
        except CommitFailedError:
            # A driver has committed at the same time: try again with the new version.
            if attempt == _ATTEMPTS - 1:
                raise
            table.update_incremental()
        else:
            return days
    raise _failed(table, "its old days changed during each attempt")


def _record(
    store: ArchiveStore,
    stream: str,
    table: DeltaTable,
    before: datetime.date,
    progress: JobProgress | None,
) -> bool:
    """Record the tokens to be purged.

    :return: false if the files of the old days changed at the same time.
    """
    recorded = {action["path"] for action in _old_actions(table, before)}
    ranges = [
        *read_purged_ranges(table, stream),
        *_ranges(store, stream, table, before, progress),
    ]
    table.alter.set_table_properties(
        purged_properties(ranges),
        raise_if_not_exists=False,
        commit_properties=commit_properties(read_state(table), new=False),
    )
    table.update_incremental()
    # If a driver adds rows to these days from now on, the deletion is rejected.
    return recorded == {action["path"] for action in _old_actions(table, before)}


def _failed(table: DeltaTable, error: Exception | str) -> PipelineError:
    return PipelineError(
        f"cannot purge {table.table_uri}: {reason_of(error)}; resolve the problem, and "
        "purge again"
    )


def _ranges(
    store: ArchiveStore,
    stream: str,
    table: DeltaTable,
    before: datetime.date,
    progress: JobProgress | None,
) -> list[PurgedRange]:
    """Return the range of each writer's tokens in the old days."""
    from pyarrow import parquet

    filesystem, _ = store.filesystem()
    root = store.path(store.stream_uri(stream))
    found: dict[str, tuple[int, int]] = {}
    actions = _old_actions(table, before)
    for number, action in enumerate(actions):
        if progress is not None:
            progress.count(number, len(actions))
        with parquet.ParquetFile(
            f"{root}/{action['path']}", filesystem=filesystem
        ) as file:
            for batch in file.iter_batches(columns=["instance_name", "stream_id"]):
                for writer, first, last in _by_writer(batch):
                    known = found.get(writer, (first, last))
                    found[writer] = min(known[0], first), max(known[1], last)
    return [
        PurgedRange(stream, writer, first, last)
        for writer, (first, last) in sorted(found.items())
    ]


def _by_writer(batch: pa.RecordBatch) -> Iterable[tuple[str, int, int]]:
    grouped = (
        pa.Table.from_batches([batch])
        .group_by("instance_name")
        .aggregate([("stream_id", "min"), ("stream_id", "max")])
    )
    for row in grouped.to_pylist():
        yield row["instance_name"], row["stream_id_min"], row["stream_id_max"]
