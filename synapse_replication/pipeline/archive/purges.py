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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.damage import (
    ArchivedFile,
    dataset_of,
    files_of,
)
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
    from synapse_replication.pipeline.progress import JobProgress

#: The maximum number of attempts to purge a table. An attempt fails if, for instance,
#: the Spark driver of an archive job changes the files of the old days meanwhile.
_ATTEMPTS: Final = 10

_WRITTEN: Final = pa.schema([("instance_name", pa.string()), ("stream_id", pa.int64())])
_ENDS: Final = [("stream_id", "min"), ("stream_id", "max")]
_LOW, _HIGH = "stream_id_min", "stream_id_max"


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

    An archive job may be running at the same time.

    :param dry_run: whether to only return the days, without removing rows.
    :param progress: shows a step for each table and, if rows are removed, counts files.
    :return: the days, by table and day; those of the recorded commands are the last.
    :raises PipelineError: if the archive does not exist, cannot be read or written, or
        the old days of a table change during each attempt to purge it.
    """
    store = open_archive(archive)
    tables: list[tuple[str | None, str, DeltaTable]] = [*store.tables()]
    if (wire := store.table(store.wire_uri)) is not None:
        tables.append((None, store.wire_uri, wire))
    if progress is not None:
        progress.expect(len(tables))
    days: list[OldDay] = []
    for stream, uri, table in tables:
        if progress is not None:
            progress.begin(stream or "recordings of the wire")
        old = _OldFiles(store, stream, uri, table, before)
        try:
            days += old.days() if dry_run else _purge(old, progress)
        except (pa.ArrowException, DeltaError, OSError) as error:
            raise old.failed(error) from error
    return days


@attrs.frozen
class _OldFiles:
    """The files of a table whose days are before a date."""

    store: ArchiveStore
    stream: str | None
    uri: str
    table: DeltaTable
    before: datetime.date

    def find(self) -> list[ArchivedFile]:
        """Return the files of the loaded version."""
        limit = self.before.isoformat()
        found = files_of(self.table, self.uri, self.stream or "the wire")
        return [file for file in found if file.day < limit]

    def days(self) -> list[OldDay]:
        """Return the days of the files."""
        by_day: dict[str, list[ArchivedFile]] = {}
        for file in self.find():
            by_day.setdefault(file.day, []).append(file)
        return [
            OldDay(
                self.stream,
                datetime.date.fromisoformat(day),
                sum(file.rows for file in files),
                sum(file.size for file in files),
            )
            for day, files in sorted(by_day.items())
        ]

    def failed(self, error: Exception | str) -> PipelineError:
        """Return the error of a purge that is not possible."""
        return PipelineError(
            f"cannot purge {self.uri}: {reason_of(error)}; resolve the problem, and "
            "purge again"
        )


def _purge(old: _OldFiles, progress: JobProgress | None) -> list[OldDay]:
    table = old.table
    for attempt in range(_ATTEMPTS):
        days = old.days()
        if not days:
            return []
        properties = commit_properties(read_state(table), new=False)
        try:
            if old.stream is not None and not _record(old, old.stream, progress):
                continue
            table.delete(
                f"{DAY} < DATE '{old.before.isoformat()}'", commit_properties=properties
            )
        except CommitFailedError:
            # A driver has committed at the same time: try again with the new version.
            if attempt == _ATTEMPTS - 1:
                raise
            table.update_incremental()
        else:
            return days
    raise old.failed("its old days changed during each attempt")


def _record(old: _OldFiles, stream: str, progress: JobProgress | None) -> bool:
    """Record the tokens to be purged.

    :return: false if the files of the old days changed at the same time.
    """
    table, files = old.table, old.find()
    known = read_purged_ranges(table, stream)
    ranges = [*known, *_ranges(old.store, files, progress)]
    table.alter.set_table_properties(
        purged_properties(ranges),
        raise_if_not_exists=False,
        commit_properties=commit_properties(read_state(table), new=False),
    )
    table.update_incremental()
    # If a driver adds rows to these days from now on, the deletion is rejected.
    return files == old.find()


def _ranges(
    store: ArchiveStore, files: Sequence[ArchivedFile], progress: JobProgress | None
) -> list[PurgedRange]:
    """Return the ranges of each writer's tokens in files of a stream."""
    found = []
    for number, file in enumerate(files):
        if progress is not None:
            progress.count(number, len(files))
        writers = dataset_of(store, file, _WRITTEN).to_table().group_by("instance_name")
        found += [
            PurgedRange(file.table, row["instance_name"], row[_LOW], row[_HIGH])
            for row in writers.aggregate(_ENDS).to_pylist()
        ]
    return found
