"""An archive as Spark data frames, without Delta's Java library.

The list of a table's files comes from one version of its Delta log, so a frame is a
snapshot: it does not change while the archive is written, compacted or purged. Replaced
files are retained until a vacuum, by default for a week. The frames of a local archive
use Spark's Parquet reader. Those of an object store, and
:meth:`ArchivedTables.map_rows` for any archive, read the files with pyarrow in tasks.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import pyarrow as pa
from pyspark.sql import DataFrame, functions as sf
from pyspark.sql.types import StructType

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.damage import (
    ArchivedFile,
    DamagedFile,
    check_file,
    files_of,
    find_damage,
)
from synapse_replication.pipeline.archive.log import (
    PurgedRange,
    archived_size,
    read_purged_ranges,
    read_state,
)
from synapse_replication.pipeline.archive.store import ArchiveStore, open_archive
from synapse_replication.pipeline.json_rows import json_rows
from synapse_replication.pipeline.local import (
    FEW_IDS,
    local_batches,
    local_frame,
)
from synapse_replication.pipeline.schemas import (
    ARCHIVED_ROWS_SCHEMA,
    ARCHIVED_WIRE_SCHEMA,
)
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.tables import (
    DAY,
    TYPE_METADATA,
    Column,
    DatabaseTable,
    standard_tables,
)

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

#: The columns that the tables of all streams have.
ARCHIVE_KEYS: Final = (
    "stream_id",
    "row_index",
    "instance_name",
    "written_ts",
    DAY,
)

#: The schema of a frame of all streams without the content of rows.
_KEYS_SCHEMA: Final = (
    "stream string NOT NULL, instance_name string NOT NULL, stream_id bigint NOT NULL, "
    "row_index int NOT NULL, written_ts timestamp, day date"
)

_MAX_ID: Final = 2**63 - 1

_DAY: Final = re.compile(rf"{DAY}=(\d{{4}}-\d\d-\d\d)/")


@attrs.frozen
class ArchivedTables:
    """The tables of an archive, each at one version.

    :ivar streams: a frame for each stream, with :data:`ARCHIVE_KEYS` and the typed
        columns of the stream's rows. A stream without rows may be missing.
    :ivar wire: the commands of recordings, with ARCHIVED_WIRE_SCHEMA; it may be empty.
    :ivar offsets: the offset up to which each stream is archived.
    :ivar purged: the range of purged tokens of each writer.
    :ivar damaged: the damaged files, which the frames omit.
    """

    streams: Mapping[str, DataFrame]
    wire: DataFrame
    offsets: Mapping[str, StreamOffset]
    purged: Sequence[PurgedRange]
    damaged: Sequence[DamagedFile]
    _wire_table: DeltaTable | None = attrs.field(repr=False)
    _session: SparkSession = attrs.field(repr=False)
    _tables: Mapping[str, DatabaseTable] = attrs.field(repr=False)
    _store: ArchiveStore = attrs.field(repr=False)
    _delta_tables: Mapping[str, DeltaTable] = attrs.field(repr=False)
    #: The intact files of the streams, without those of the wire.
    _files: Sequence[ArchivedFile] = attrs.field(repr=False)

    @property
    def uri(self) -> str:
        """The location of the archive."""
        return self._store.uri

    @property
    def has_wire(self) -> bool:
        """Whether the archive has a table of commands."""
        return self._wire_table is not None

    def lacks(self, recording: Path) -> bool:
        """Return whether the archive lacks a recording, or has it with another size."""
        if self._wire_table is None:
            return True
        size = archived_size(self._wire_table, recording.name)
        return size != recording.stat().st_size

    def keys(self, *more: str) -> DataFrame:
        """Return the rows of all streams without their content.

        :param more: the names of further columns, such as ``room_id``. Their values
            are converted to text; they are null for streams without such a column.
        :return: ``stream``, ``instance_name``, ``stream_id``, ``row_index``,
            ``written_ts``, ``day``, and ``more``.
        """
        frames = [
            frame.select(
                sf.lit(stream).alias("stream"),
                "instance_name",
                "stream_id",
                "row_index",
                "written_ts",
                DAY,
                *(
                    sf.col(name).cast("string").alias(name)
                    if name in frame.columns
                    else sf.lit(None).cast("string").alias(name)
                    for name in more
                ),
            )
            for stream, frame in self.streams.items()
        ]
        ddl = ", ".join([_KEYS_SCHEMA, *(f"`{name}` string" for name in more)])
        return _union(self._session, frames, ddl)

    def map_rows(
        self,
        work: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        schema: str,
        *columns: str,
    ) -> DataFrame:
        """Apply a function to the rows of all streams, in the tasks that read them.

        Only the results of the function are passed to Spark, not the rows. If there are
        few rows, they are read in this process, before the method returns.

        :param work: called in each task with an iterator of record batches, whose
            columns are ``stream`` and ``columns``.
        :param schema: the columns of the batches that ``work`` yields.
        :param columns: the columns to read. A column that a stream lacks is null.
        """
        files = self._files
        if not files:
            return local_frame(self._session, schema)
        schemas = {
            name: _chosen(_arrow(table), columns)
            for name, table in self._delta_tables.items()
        }
        if sum(file.rows or FEW_IDS + 1 for file in files) <= FEW_IDS:
            found = work(_read_streams(self._store, files, schemas))
            return local_batches(self._session, schema, found)
        tasks = _tasks(self._session, len(files))
        # Adjacent files have similar sizes: assign them to different tasks.
        of_tasks = [files[number::tasks] for number in range(tasks)]
        read = functools.partial(_map_files, self._store, of_tasks, schemas, work)
        # Create a partition for each number, so that no shuffle is needed.
        numbers = self._session.range(0, tasks, numPartitions=tasks)
        return numbers.mapInArrow(read, schema)

    def id_bounds(self) -> dict[str, tuple[int, int]]:
        """Return the least and the greatest token of each stream that has files.

        Only the logs of the tables are read.
        """
        by_stream: dict[str, list[ArchivedFile]] = {}
        for file in self._files:
            by_stream.setdefault(file.table, []).append(file)
        return {stream: bounds_of(files) for stream, files in by_stream.items()}

    def rows(self, *streams: str) -> DataFrame:
        """Return rows with ARCHIVED_ROWS_SCHEMA, with the content as JSON in ``row``.

        This is slower than :meth:`keys` and the typed columns of :attr:`streams`.

        :param streams: the streams to read; by default all.
        """
        frames = [
            with_json(frame, self._tables[stream])
            for stream, frame in self.streams.items()
            if not streams or stream in streams
        ]
        return _union(self._session, frames, ARCHIVED_ROWS_SCHEMA)


def bounds_of(files: Iterable[ArchivedFile]) -> tuple[int, int]:
    """Return the least and the greatest token of files.

    If a file lacks statistics, the bounds include every token.
    """
    tokens = [file.tokens or (-_MAX_ID, _MAX_ID) for file in files]
    return min(low for low, _ in tokens), max(high for _, high in tokens)


def with_json(frame: DataFrame, table: DatabaseTable) -> DataFrame:
    """Convert typed rows to rows as on the wire, with ARCHIVED_ROWS_SCHEMA."""
    names = [
        name for name in ARCHIVED_ROWS_SCHEMA.names if name not in ("stream", "row")
    ]
    columns = [column.name for column in table.columns]

    def rows_of(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            found = {
                "stream": pa.repeat(pa.scalar(table.name), batch.num_rows),
                "row": json_rows(table, batch),
            }
            yield pa.RecordBatch.from_arrays(
                [
                    found[name] if name in found else batch.column(name)
                    for name in ARCHIVED_ROWS_SCHEMA.names
                ],
                names=ARCHIVED_ROWS_SCHEMA.names,
            )

    return frame.select(*names, *columns).mapInArrow(rows_of, ARCHIVED_ROWS_SCHEMA)


def read_archive(
    session: SparkSession,
    archive: str | os.PathLike[str],
    *,
    tables: Mapping[str, DatabaseTable] | None = None,
    verify: bool = False,
) -> ArchivedTables:
    """Read an archive.

    :param tables: the columns of streams other than the standard ones; by default, they
        are read from the archive.
    :param verify: whether to read all files first, and to omit the damaged ones.
    :raises PipelineError: if the archive does not exist or cannot be read, or, without
        ``verify``, if the size of a file is wrong.
    """
    store = open_archive(archive)
    known = {**standard_tables(), **(tables or {})}
    offsets: dict[str, StreamOffset] = {}
    purged: list[PurgedRange] = []
    delta_tables: dict[str, DeltaTable] = {}
    files: list[ArchivedFile] = []
    for stream in store.streams():
        uri = store.stream_uri(stream)
        table = store.table(uri)
        if table is None:
            # A driver has written files of the table, but has not created it yet.
            continue
        if stream not in known:
            known[stream] = _table_of(stream, table)
        delta_tables[stream] = table
        files += files_of(table, uri, stream)
        offsets[stream] = read_state(table).offset
        purged += read_purged_ranges(table, stream)
    wire = store.table(store.wire_uri)
    wire_files = [] if wire is None else files_of(wire, store.wire_uri, "the wire")
    damaged = _damaged(session, store, [*files, *wire_files], verify=verify)
    broken = {each.file for each in damaged}
    intact = [file for file in files if file not in broken]
    commands = (
        local_frame(session, ARCHIVED_WIRE_SCHEMA)
        if wire is None
        else _frame(
            session, store, wire, [file for file in wire_files if file not in broken]
        ).select(*ARCHIVED_WIRE_SCHEMA.names)
    )
    frames = {
        stream: _frame(
            session, store, table, [file for file in intact if file.table == stream]
        )
        for stream, table in delta_tables.items()
    }
    return ArchivedTables(
        frames,
        commands,
        offsets,
        purged,
        damaged,
        wire,
        session,
        known,
        store,
        delta_tables,
        intact,
    )


def _damaged(
    session: SparkSession,
    store: ArchiveStore,
    files: Sequence[ArchivedFile],
    *,
    verify: bool,
) -> list[DamagedFile]:
    """Find damaged files, in tasks if there are many rows to read.

    :raises PipelineError: without ``verify``, if a file is damaged.
    """
    few = sum(file.rows for file in files) <= FEW_IDS
    damaged = find_damage(store, files, complete=verify and few)
    if not verify and damaged:
        more = f" (and {len(damaged) - 1} more files)" if len(damaged) > 1 else ""
        raise PipelineError(f"{damaged[0]}{more}")
    if verify and not few:
        found = {each.file for each in damaged}
        left = [file for file in files if file not in found]
        tasks = session.sparkContext.parallelize(left, _tasks(session, len(left)))
        reasons = tasks.map(functools.partial(check_file, store)).collect()
        damaged += [
            DamagedFile(file, reason)
            for file, reason in zip(left, reasons, strict=True)
            if reason is not None
        ]
    return damaged


def _union(
    session: SparkSession, frames: Iterable[DataFrame], schema: StructType | str
) -> DataFrame:
    frames = list(frames)
    if not frames:
        return local_frame(session, schema)
    return functools.reduce(DataFrame.unionAll, frames)


def _table_of(stream: str, table: DeltaTable) -> DatabaseTable:
    """Read the columns of an undeclared stream from its table in the archive."""
    types = {"long": "bigint", "double": "double", "boolean": "boolean"}
    columns = tuple(
        Column(
            field.name,
            str(
                field.metadata.get(TYPE_METADATA)
                or types.get(str(field.type.type), "string")
            ),
        )
        for field in table.schema().fields
        if field.name not in ARCHIVE_KEYS
    )
    return DatabaseTable(stream, columns, ((None, tuple(c.name for c in columns)),))


def _frame(
    session: SparkSession,
    store: ArchiveStore,
    table: DeltaTable,
    files: Sequence[ArchivedFile],
) -> DataFrame:
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    if not files:
        return local_frame(session, schema)
    uri = files[0].uri
    if store.is_local:
        return (
            session.read.schema(schema)
            .option("basePath", f"file://{uri}")
            .parquet(*(f"file://{uri}/{file.path}" for file in files))
            .select(*schema.names)
        )
    paths = [(file.path,) for file in files]
    read = functools.partial(_read_files, store, store.path(uri), _arrow(table))
    return (
        local_frame(session, "path string", paths)
        .repartition(_tasks(session, len(paths)))
        .mapInArrow(read, schema)
    )


def _tasks(session: SparkSession, files: int) -> int:
    return min(files, 4 * session.sparkContext.defaultParallelism)


def _arrow(table: DeltaTable) -> pa.Schema:
    return pa.schema(table.schema())


def _chosen(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """Return the fields of some columns, with the type null for missing columns."""
    return pa.schema(
        [
            schema.field(name) if name in schema.names else pa.field(name, pa.null())
            for name in names
        ]
    )


def _map_files(
    store: ArchiveStore,
    tasks: Sequence[Sequence[ArchivedFile]],
    schemas: Mapping[str, pa.Schema],
    work: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    numbers: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Apply a function to the rows of files, in a task.

    :param tasks: the files of each task.
    :param numbers: the indexes in ``tasks`` of the tasks to run, in the column ``id``.
    """
    chosen = (
        file
        for batch in numbers
        for number in batch.column("id").to_pylist()
        for file in tasks[number]
    )
    yield from work(_read_streams(store, chosen, schemas))


def _read_streams(
    store: ArchiveStore,
    files: Iterable[ArchivedFile],
    schemas: Mapping[str, pa.Schema],
) -> Iterator[pa.RecordBatch]:
    """Read files of streams; the batches have an additional column ``stream``."""
    for file in files:
        root, schema = store.path(file.uri), schemas[file.table]
        for found in _read_file(store, root, file.path, schema):
            yield pa.RecordBatch.from_arrays(
                [pa.repeat(pa.scalar(file.table), found.num_rows), *found.columns],
                names=["stream", *found.schema.names],
            )


def _read_files(
    store: ArchiveStore,
    root: str,
    schema: pa.Schema,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Read files within a task. Columns that a file lacks become null."""
    for batch in batches:
        for path in batch.column("path").to_pylist():
            yield from _read_file(store, root, path, schema)


def _read_file(
    store: ArchiveStore, root: str, path: str, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    from pyarrow import parquet

    filesystem, _ = store.filesystem()
    day = datetime.date.fromisoformat(_DAY.findall(path)[0])
    with parquet.ParquetFile(
        f"{root}/{path}", filesystem=filesystem, pre_buffer=True
    ) as file:
        names = [name for name in file.schema_arrow.names if name in schema.names]
        for found in file.iter_batches(columns=names):
            yield _completed(found, schema, day)


def _completed(
    found: pa.RecordBatch, schema: pa.Schema, day: datetime.date
) -> pa.RecordBatch:
    rows = found.num_rows
    columns = [
        pa.repeat(pa.scalar(day), rows)
        if field.name == DAY
        else found.column(field.name).cast(field.type)
        if field.name in found.schema.names
        else pa.nulls(rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
