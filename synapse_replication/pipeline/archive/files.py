"""The Parquet files of a table: writes them, reads them, and finds damaged ones.

A task writes each row to a file of the row's day, with a unique name, below the table's
folder: one file for each day, or more if the task closed one to limit the number of
open files. Readers do not see a file until the driver commits it. A file that is never
committed, because the attempt failed or the driver was killed, is removed by a vacuum.

A file is damaged if it is missing, truncated, or has changed bytes. The transaction log
names each file with its size, its number of rows and the range of its tokens. The pages
of files have checksums, except of those that a compaction of release 0.1.0 has written:
in them, a changed byte is found only if it makes the file invalid.
"""

from __future__ import annotations

import datetime
import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from synapse_replication.durable import sync_folder
from synapse_replication.errors import PipelineError, excerpt
from synapse_replication.pipeline.archive.store import MISSING_REASON, ArchiveStore
from synapse_replication.pipeline.scan import Spark, grouped, run_tasks
from synapse_replication.pipeline.schemas import DAY

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction
    from pyarrow import dataset

#: The maximum number of files that a :class:`DayWriter` has open. To open a further
#: file, it closes the least recently used one.
_OPEN_DAYS: Final = 16

#: The columns whose minimum and maximum are stored in Delta's transaction log. A table
#: has one of them.
WITH_STATISTICS: Final = ("stream_id", "line_number")

_REPAIR: Final = (
    "restore it from a backup, or run: synapse-replication pipeline archive --repair"
)

#: The years that Python's dates have.
_YEARS: Final = datetime.MINYEAR, datetime.MAXYEAR

# -- writing -----------------------------------------------------------------------


@attrs.frozen
class WrittenFile:
    """A file that is not committed yet.

    :ivar uri: the URI of the table.
    :ivar path: the path of the file, relative to the table.
    :ivar size: the size of the file, in bytes.
    :ivar statistics: the minimum and maximum of each column in
        :data:`WITH_STATISTICS` that the file has.
    """

    uri: str
    path: str
    day: datetime.date
    size: int
    rows: int
    statistics: dict[str, tuple[int, int]]

    def to_action(self, *, has_new_rows: bool = True) -> AddAction:
        """Return the action that adds the file to a commit.

        :param has_new_rows: false if the file only replaces other files.
        """
        from deltalake.transaction import AddAction

        return AddAction(
            self.path,
            self.size,
            {DAY: self.day.isoformat()},
            int(time.time() * 1000),
            has_new_rows,
            json.dumps(
                {
                    "numRecords": self.rows,
                    "minValues": {n: low for n, (low, _) in self.statistics.items()},
                    "maxValues": {n: high for n, (_, high) in self.statistics.items()},
                    "nullCount": dict.fromkeys(self.statistics, 0),
                }
            ),
        )


class DayWriter:
    """Writes the rows of one table into files by day.

    :param uri: the URI of the table.
    :param time_column: the column that determines the day.
    :param today: the day of rows without a time, or with one in no year of Python's.
    """

    def __init__(
        self, store: ArchiveStore, uri: str, time_column: str, today: datetime.date
    ) -> None:
        self._filesystem = store.filesystem
        self._uri = uri
        self._root = store.path(uri)
        self._is_local = store.is_local
        self._time_column = time_column
        self._today = today
        self._open: dict[datetime.date, tuple[str, parquet.ParquetWriter]] = {}
        self._written: list[WrittenFile] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Write each row to the file of its day."""
        days = batch.column(self._time_column).cast(pa.date32())
        years = pc.year(days)
        is_day = pc.and_(
            pc.greater_equal(years, _YEARS[0]), pc.less_equal(years, _YEARS[1])
        )
        days = pc.if_else(pc.fill_null(is_day, False), days, pa.scalar(self._today))
        found = sorted(pc.unique(days).to_pylist())
        for day in found:
            rows = batch
            if len(found) > 1:
                rows = batch.filter(pc.equal(days, pa.scalar(day)))
            self._file(day, batch.schema).write_batch(rows)

    def close(self) -> list[WrittenFile]:
        """Finish all files, and return them."""
        while self._open:
            self._close(next(iter(self._open)))
        return self._written

    def _file(self, day: datetime.date, schema: pa.Schema) -> parquet.ParquetWriter:
        file = self._open.pop(day, None)
        if file is None:
            if len(self._open) >= _OPEN_DAYS:
                self._close(next(iter(self._open)))
            folder = f"{DAY}={day.isoformat()}"
            if self._is_local:
                self._filesystem.create_dir(f"{self._root}/{folder}", recursive=True)
            path = f"{folder}/part-{uuid.uuid4()}.zstd.parquet"
            writer = parquet.ParquetWriter(
                f"{self._root}/{path}",
                schema,
                filesystem=self._filesystem,
                compression="zstd",
                write_page_checksum=True,
            )
            file = path, writer
        # Mark the file as the most recently used one.
        self._open[day] = file
        return file[1]

    def _close(self, day: datetime.date) -> None:
        path, writer = self._open.pop(day)
        writer.close()
        full_path = f"{self._root}/{path}"
        if self._is_local:
            _sync(Path(full_path))
        size = self._filesystem.get_file_info(full_path).size
        metadata = writer.writer.metadata
        rows, bounds = metadata.num_rows, _bounds(metadata)
        self._written.append(WrittenFile(self._uri, path, day, size, rows, bounds))


def _bounds(metadata: parquet.FileMetaData) -> dict[str, tuple[int, int]]:
    """Return the minimum and maximum of the columns in :data:`WITH_STATISTICS`."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    bounds = {}
    for index, name in enumerate(metadata.schema.names):
        if name in WITH_STATISTICS:
            found = [group.column(index).statistics for group in groups]
            bounds[name] = min(s.min for s in found), max(s.max for s in found)
    return bounds


def _sync(path: Path) -> None:
    """Sync a file, the folder of its day, and the folder of the table.

    A commit will refer to the file. If the folder of its day is new, the folder of the
    table has a new entry.

    :param path: the path of the file.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
    sync_folder(path.parent)
    sync_folder(path.parent.parent)


# -- reading and checking ----------------------------------------------------------


@attrs.frozen
class ArchivedFile:
    """A file, as the log describes it.

    :ivar table_uri: the URI of the table.
    :ivar table_name: the name of the stream, or ``the wire``.
    :ivar path: the path of the file, relative to the table.
    :ivar size: the size in bytes.
    :ivar row_count: the number of rows.
    :ivar token_range: the least and the greatest token; ``None`` if unknown.
    """

    table_uri: str
    table_name: str
    path: str
    size: int
    row_count: int
    day: str
    token_range: tuple[int, int] | None

    def may_contain(self, ids: Iterable[int]) -> bool:
        """Return whether the file may have a row with one of some ids."""
        if self.token_range is None:
            return True
        low, high = self.token_range
        return any(low <= id_ <= high for id_ in ids)

    def rows_in(self, store: ArchiveStore, schema: pa.Schema) -> dataset.Dataset:
        """Return the rows of the file, which are not read yet.

        :param schema: the columns, also ``day``. Those that the file lacks are null.
        """
        # Workers that only write need neither this module, which loads pandas, nor
        # deltalake.
        from pyarrow import dataset

        root = store.path(self.table_uri)
        days = pa.schema([pa.field(DAY, pa.date32())])
        return dataset.dataset(
            f"{root}/{self.path}",
            schema=schema,
            format="parquet",
            filesystem=store.filesystem,
            partitioning=dataset.partitioning(days, flavor="hive"),
            partition_base_dir=root,
        )


@attrs.frozen
class DamagedFile:
    """A file that cannot be read.

    :ivar reason: what is wrong, as the end of a sentence about the file.
    """

    file: ArchivedFile
    reason: str

    def __str__(self) -> str:
        """Name the table, the file, its tokens, and the remedy."""
        file = self.file
        token_range = file.token_range
        tokens = "" if token_range is None else f"tokens {_range(*token_range)}, "
        return (
            f"{file.table_name}: the file {file.table_uri}/{file.path} "
            f"({tokens}{file.row_count} rows) {self.reason}; {_REPAIR}"
        )


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def files_of(table: DeltaTable, uri: str, name: str) -> list[ArchivedFile]:
    """Return the files of a table, from its log.

    :param name: the name of the stream, or ``the wire``.
    :raises PipelineError: if the log cannot be read, or is not that of an archive.
    """
    # Imported here, because tasks on executors need no Delta log.
    from synapse_replication.pipeline.archive.log import reading

    found = []
    with reading(table):
        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    for action in actions:
        bounds = action.get("min.stream_id"), action.get("max.stream_id")
        found.append(
            ArchivedFile(
                uri,
                name,
                action["path"],
                action["size_bytes"],
                action["num_records"] or 0,
                _day_of(action, uri),
                None if None in bounds else bounds,
            )
        )
    return sorted(found, key=lambda file: file.path)


def _day_of(action: Mapping[str, Any], uri: str) -> str:
    try:
        return str(action[f"partition.{DAY}"])
    except KeyError:
        raise PipelineError(
            f"the table {uri} is not partitioned by {DAY}: another program has made "
            "it; archive to a new location"
        ) from None


def wrong_sizes(
    store: ArchiveStore, files: Sequence[ArchivedFile]
) -> list[DamagedFile]:
    """Return the files that are missing, or whose size is wrong.

    :raises PipelineError: if the store cannot be reached.
    """
    sizes: dict[str, int] = {}
    for uri in {file.table_uri for file in files}:
        sizes |= _sizes(store, uri)
    found = []
    for file in files:
        size = sizes.get(f"{file.table_uri}/{file.path}")
        if size is None:
            found.append(DamagedFile(file, MISSING_REASON))
        elif size != file.size:
            reason = f"has {size} bytes instead of {file.size}"
            found.append(DamagedFile(file, reason))
    return found


def _sizes(store: ArchiveStore, uri: str) -> dict[str, int]:
    root, found = store.path(uri), store.list_folder(uri, recursive=True)
    return {uri + info.path[len(root) :]: info.size for info in found if info.is_file}


def find_damage(
    store: ArchiveStore, files: Sequence[ArchivedFile], spark: Spark
) -> list[DamagedFile]:
    """Read files on executors, and return the damaged ones.

    :param spark: called if there are files.
    """

    def check(group: Iterable[ArchivedFile]) -> list[DamagedFile]:
        reasons = ((file, _check_file(store, file)) for file in group)
        return [DamagedFile(file, reason) for file, reason in reasons if reason]

    if not files:
        return []
    found = run_tasks(check, grouped(files, lambda file: file.size), spark())
    return [each for damaged in found for each in damaged]


def merge_files(
    store: ArchiveStore, schema: pa.Schema, group: Sequence[ArchivedFile]
) -> list[WrittenFile]:
    """Write the rows of several files of a day to a new file, in a task.

    :param schema: the columns of the table.
    :return: the new file; nothing if a file is damaged.
    """
    names = [name for name in schema.names if name != DAY]
    time_column = "written_ts" if "written_ts" in names else "received_ts"
    day = datetime.date.fromisoformat(group[0].day)
    writer = DayWriter(store, group[0].table_uri, time_column, day)
    try:
        for file in group:
            rows = file.rows_in(store, schema)
            for batch in rows.to_batches(columns=names, batch_readahead=2):
                writer.write(batch)
    except (pa.ArrowException, OSError):
        writer.close()
        return []
    written = writer.close()
    is_complete = sum(f.rows for f in written) == sum(f.row_count for f in group)
    return written if is_complete else []


def _check_file(store: ArchiveStore, file: ArchivedFile) -> str | None:
    """Read a file; return what is wrong, or ``None`` if the file is intact."""
    try:
        with parquet.ParquetFile(
            f"{store.path(file.table_uri)}/{file.path}",
            filesystem=store.filesystem,
            pre_buffer=True,
            page_checksum_verification=True,
        ) as opened:
            rows = sum(batch.num_rows for batch in opened.iter_batches())
    except FileNotFoundError:
        return MISSING_REASON
    except (pa.ArrowException, OSError) as error:
        return f"is damaged ({excerpt(' '.join(str(error).split()))})"
    if rows == file.row_count:
        return None
    return f"has {rows} rows instead of {file.row_count}"
