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
from collections import Counter
from collections.abc import Sequence
from typing import Final

import attrs
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.files import ArchivedFile, files_of
from synapse_replication.pipeline.archive.log import (
    PurgedRange,
    commit_properties,
    purged_properties,
    read_purged_ranges,
    read_state,
)
from synapse_replication.pipeline.archive.store import ArchiveStore, storage_error_text
from synapse_replication.pipeline.progress import JobProgress
from synapse_replication.pipeline.schemas import DAY

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
    archive: str, before: datetime.date, progress: JobProgress, *, dry_run: bool = False
) -> list[OldDay]:
    """Remove the rows of all days before a date, and return these days.

    An archive job may be running at the same time.

    :param progress: shows a step for each table and, if rows are removed, counts files.
    :param dry_run: whether to only return the days, without removing rows.
    :return: the days, by table and day; those of the recorded commands are the last.
    :raises PipelineError: if the archive does not exist, cannot be read or written, or
        the old days of a table change during each attempt to purge it.
    """
    store = ArchiveStore.existing(archive)
    tables: list[tuple[str | None, str, DeltaTable]] = [*store.tables()]
    if (wire := store.table(store.wire_uri)) is not None:
        tables.append((None, store.wire_uri, wire))
    progress.expect(len(tables))
    days: list[OldDay] = []
    for stream, uri, table in tables:
        progress.begin(stream or "recordings of the wire")
        purge = _Purge(store, stream, uri, table, before, progress)
        try:
            days += purge.days() if dry_run else purge.run()
        except (pa.ArrowException, DeltaError, OSError) as error:
            raise purge.failed(error) from error
    return days


@attrs.frozen
class _Purge:
    """The purge of a table."""

    store: ArchiveStore
    stream: str | None
    uri: str
    table: DeltaTable
    before: datetime.date
    progress: JobProgress

    def files(self) -> list[ArchivedFile]:
        """Return the files of old days in the loaded version."""
        limit = self.before.isoformat()
        found = files_of(self.table, self.uri, self.stream or "the wire")
        return [file for file in found if file.day < limit]

    def days(self) -> list[OldDay]:
        """Return the old days."""
        rows, sizes = Counter[str](), Counter[str]()
        for file in self.files():
            rows[file.day] += file.row_count
            sizes[file.day] += file.size
        return [
            OldDay(self.stream, datetime.date.fromisoformat(day), rows[day], sizes[day])
            for day in sorted(rows)
        ]

    def run(self) -> list[OldDay]:
        """Remove the old days, and return them."""
        condition = f"{DAY} < DATE '{self.before.isoformat()}'"
        for attempt in range(_ATTEMPTS):
            days = self.days()
            try:
                if not days:
                    return days
                properties = self._properties()
                if self.stream is None or self.record(self.stream):
                    self.table.delete(condition, commit_properties=properties)
                    return days
            except CommitFailedError:
                # A driver has committed at the same time: try again with the new
                # version.
                if attempt == _ATTEMPTS - 1:
                    raise
                self.table.update_incremental()
        raise self.failed("its old days changed during each attempt")

    def record(self, stream: str) -> bool:
        """Record the tokens to be purged.

        :return: false if the files of the old days changed at the same time.
        """
        files = self.files()
        ranges = [*read_purged_ranges(self.table, stream), *self._ranges(stream, files)]
        self.table.alter.set_table_properties(
            purged_properties(ranges),
            raise_if_not_exists=False,
            commit_properties=self._properties(),
        )
        self.table.update_incremental()
        # If a driver adds rows to these days from now on, the deletion is rejected.
        return files == self.files()

    def _ranges(self, stream: str, files: Sequence[ArchivedFile]) -> list[PurgedRange]:
        """Return the ranges of each writer's tokens in files."""
        found = []
        for number, file in enumerate(files):
            self.progress.count(number, len(files))
            rows = file.rows_in(self.store, _WRITTEN)
            for batch in rows.to_batches(batch_readahead=2):
                writers = pa.Table.from_batches([batch]).group_by("instance_name")
                found += [
                    PurgedRange(stream, row["instance_name"], row[_LOW], row[_HIGH])
                    for row in writers.aggregate(_ENDS).to_pylist()
                ]
        return found

    def _properties(self) -> CommitProperties:
        return commit_properties(read_state(self.table))

    def failed(self, error: Exception | str) -> PipelineError:
        """Return the error of a purge that is not possible."""
        return PipelineError(
            f"cannot purge {self.uri}: {storage_error_text(error)}; resolve the "
            "problem, and purge again"
        )
