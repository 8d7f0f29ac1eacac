"""One version of an archive: its files, without the damaged ones, and their rows.

The list of a table's files comes from one version of its Delta log, so a snapshot does
not change while the archive is written, compacted or purged. Replaced files are
retained until a vacuum, by default for a week. The files are read with pyarrow.

For notebooks, :func:`read_archive` returns the rows as data frames of Spark, without
Delta's Java library. The frames of a stream, and of the commands of recordings, use
Spark's Parquet reader if the archive is local. All others read the files with pyarrow
in tasks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive import log
from synapse_replication.pipeline.archive.files import (
    ArchivedFile,
    DamagedFile,
    files_of,
    find_damage,
    wrong_sizes,
)
from synapse_replication.pipeline.archive.store import ArchiveStore
from synapse_replication.pipeline.scan import Batches, Scan, Spark, grouped
from synapse_replication.pipeline.schemas import (
    ARCHIVED_ROWS_SCHEMA,
    ARCHIVED_WIRE_SCHEMA,
    TYPE_METADATA,
    Column,
    DatabaseTable,
    json_rows,
    standard_tables,
    with_texts,
)
from synapse_replication.pipeline.source.offsets import StreamOffset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

_MAX_ID: Final = 2**63 - 1

#: Converts a batch of a file.
_Convert = Callable[[ArchivedFile, pa.RecordBatch], pa.RecordBatch]


@attrs.frozen
class Snapshot:
    """One version of an archive.

    :ivar store: the location of the archive.
    :ivar schemas: the schema of each stream's table. A stream without rows may be
        missing.
    :ivar columns: the columns of each stream, also of others.
    :ivar wire_table: the table of recorded commands; ``None`` if there is none.
    :ivar offsets: the offset up to which each stream is archived.
    :ivar purged: the range of purged tokens of each writer.
    :ivar damaged: the damaged files that were found, which are not read.
    :ivar files: the other files of the streams.
    :ivar wire_files: the other files of ``wire_table``.
    """

    store: ArchiveStore
    schemas: Mapping[str, pa.Schema]
    columns: Mapping[str, DatabaseTable]
    wire_table: DeltaTable | None
    offsets: Mapping[str, StreamOffset]
    purged: Sequence[log.PurgedRange]
    damaged: Sequence[DamagedFile]
    files: Sequence[ArchivedFile]
    wire_files: Sequence[ArchivedFile]

    def lacks(self, recording: Path) -> bool:
        """Return whether the archive lacks a recording, or has it with another size."""
        if self.wire_table is None:
            return True
        size = log.archived_size(self.wire_table, recording.name)
        return size != recording.stat().st_size

    def files_of(self, stream: str) -> list[ArchivedFile]:
        """Return the files of a stream."""
        return [file for file in self.files if file.table_name == stream]

    def id_bounds(self) -> dict[str, tuple[int, int]]:
        """Return the least and the greatest token of each stream that has files.

        Only the logs of the tables are read.
        """
        streams = {file.table_name for file in self.files}
        return {stream: bounds_of(self.files_of(stream)) for stream in streams}

    def verified(self, spark: Spark) -> Snapshot:
        """Read all files, and return a snapshot without the damaged ones.

        :param spark: called if there are files.
        """
        files = [*self.files, *self.wire_files]
        return self._without(find_damage(self.store, files, spark))

    def _without(self, damaged: Iterable[DamagedFile]) -> Snapshot:
        all_damaged = [*self.damaged, *damaged]
        bad = {each.file for each in all_damaged}
        return attrs.evolve(
            self,
            damaged=all_damaged,
            files=[file for file in self.files if file not in bad],
            wire_files=[file for file in self.wire_files if file not in bad],
        )

    def intact(self) -> Snapshot:
        """Return this snapshot.

        :raises PipelineError: if a file is damaged.
        """
        if self.damaged:
            number = len(self.damaged) - 1
            more = f" (and {number} more files)" if number else ""
            raise PipelineError(f"{self.damaged[0]}{more}")
        return self

    def rows(self, *columns: str) -> Scan:
        """Return the rows of all streams, without most of their content.

        :param columns: :data:`~.schemas.KEY_COLUMNS`, ``day``, and further columns such
            as ``room_id``, which are converted to text, and are null for streams that
            lack them.
        :return: ``stream`` and ``columns``.
        """
        schema = with_texts(ARCHIVED_ROWS_SCHEMA, *columns)
        return self._scan(self.files, _with_stream, schema, schema)

    def json_rows(
        self, streams: Container[str], ids: Mapping[str, Collection[int]] | None = None
    ) -> Scan:
        """Return the rows of streams.

        :param ids: the ids of the rows, by stream; ``None`` for all rows.
        :return: ARCHIVED_ROWS_SCHEMA.
        """
        convert = functools.partial(_to_json_rows, self.columns)
        files = [file for file in self.files if file.table_name in streams]
        if ids is not None:
            files = [file for file in files if file.may_contain(ids[file.table_name])]
        return self._scan(files, convert, ARCHIVED_ROWS_SCHEMA, ids=ids)

    def rows_frame(self, session: SparkSession, *columns: str) -> DataFrame:
        """Return the rows of :meth:`rows`; Spark's reader reads a local archive."""
        scan = self.rows(*columns)
        if not self.store.is_local or not self.files:
            return scan.frame(session)
        from pyspark.sql import functions as sf

        frames = []
        for stream, table in self.schemas.items():
            if files := self.files_of(stream):
                frame = self._parquet(session, files, table)
                frames.append(
                    frame.select(
                        sf.lit(stream).alias("stream"),
                        *(
                            (sf.col(n) if n in table.names else sf.lit(None))
                            .cast(_spark_type(scan.schema.field(n)))
                            .alias(n)
                            for n in columns
                        ),
                    )
                )
        return functools.reduce(lambda some, more: some.unionAll(more), frames)

    def wire_frame(self, session: SparkSession) -> DataFrame:
        """Return the recorded commands, with ARCHIVED_WIRE_SCHEMA."""
        if not self.store.is_local or not self.wire_files:
            return self.wire(*ARCHIVED_WIRE_SCHEMA.names).frame(session)
        return self._parquet(session, self.wire_files, ARCHIVED_WIRE_SCHEMA)

    def typed_frame(self, session: SparkSession, stream: str) -> DataFrame:
        """Return the rows of a stream with the columns of its table."""
        files = self.files_of(stream)
        if not self.store.is_local or not files:
            return self.typed_rows(stream).frame(session)
        return self._parquet(session, files, self.schemas[stream])

    def _parquet(
        self, session: SparkSession, files: Sequence[ArchivedFile], schema: pa.Schema
    ) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        uri = files[0].table_uri
        reader = session.read.schema(from_arrow_schema(schema))
        paths = (f"file://{uri}/{file.path}" for file in files)
        return (
            reader.option("basePath", f"file://{uri}")
            .parquet(*paths)
            .select(*schema.names)
        )

    def typed_rows(self, stream: str) -> Scan:
        """Return the rows of a stream with the columns of its table."""
        schema = self.schemas[stream]
        return self._scan(self.files_of(stream), None, schema, schema)

    def wire(self, *columns: str) -> Scan:
        """Return the recorded commands, with some columns of ARCHIVED_WIRE_SCHEMA."""
        schema = pa.schema([ARCHIVED_WIRE_SCHEMA.field(name) for name in columns])
        return self._scan(self.wire_files, None, schema, schema)

    def _scan(
        self,
        files: Sequence[ArchivedFile],
        convert: _Convert | None,
        result: pa.Schema,
        schema: pa.Schema | None = None,
        ids: Mapping[str, Collection[int]] | None = None,
    ) -> Scan:
        """Return the rows of files.

        :param convert: ``None`` to leave the batches as they are.
        :param schema: the columns to read, which are null in files that lack them;
            ``None`` for all columns of the stream's table.
        :param ids: the ids of the rows, by stream; ``None`` for all rows.
        """
        store, schemas = self.store, self.schemas

        def read(files: Iterable[ArchivedFile]) -> Batches:
            for file in files:
                columns = schema or schemas[file.table_name]
                if file.table_name in schemas:
                    columns = _with_lists(columns, schemas[file.table_name])
                dataset = file.rows_in(store, columns)
                condition = None
                if ids is not None:
                    condition = pc.field("stream_id").isin(sorted(ids[file.table_name]))
                # Small buffers suffice, because files are read one by one.
                for batch in dataset.to_batches(filter=condition, batch_readahead=2):
                    yield convert(file, batch) if convert else batch

        tasks = grouped(files, lambda file: file.size)
        return Scan(result, tasks, read, sum(file.row_count for file in files))


def open_snapshot(archive: str | os.PathLike[str]) -> Snapshot:
    """Read the logs of an archive, and the sizes of its files.

    :raises PipelineError: if the archive does not exist or cannot be read.
    """
    store = ArchiveStore.existing(archive)
    columns = standard_tables()
    schemas: dict[str, pa.Schema] = {}
    offsets: dict[str, StreamOffset] = {}
    purged: list[log.PurgedRange] = []
    files: list[ArchivedFile] = []
    for stream, uri, table in store.tables():
        schema = schemas[stream] = pa.schema(table.schema())
        columns.setdefault(stream, _table_of(stream, schema))
        files += files_of(table, uri, stream)
        offsets[stream] = log.read_state(table).offset
        purged += log.read_purged_ranges(table, stream)
    wire = store.table(store.wire_uri)
    wire_files = [] if wire is None else files_of(wire, store.wire_uri, "the wire")
    snapshot = Snapshot(
        store, schemas, columns, wire, offsets, purged, (), files, wire_files
    )
    return snapshot._without(wrong_sizes(store, [*files, *wire_files]))  # noqa: SLF001 -- of this class


def bounds_of(files: Iterable[ArchivedFile]) -> tuple[int, int]:
    """Return the least and the greatest token of files.

    If a file lacks statistics, the bounds include every token.
    """
    tokens = [file.token_range or (-_MAX_ID, _MAX_ID) for file in files]
    return min(low for low, _ in tokens), max(high for _, high in tokens)


def _to_json_rows(
    tables: Mapping[str, DatabaseTable], file: ArchivedFile, batch: pa.RecordBatch
) -> pa.RecordBatch:
    """Convert typed rows to rows as on the wire, with ARCHIVED_ROWS_SCHEMA."""
    found = {
        "stream": pa.repeat(pa.scalar(file.table_name), batch.num_rows),
        "row": json_rows(tables[file.table_name], batch),
    }
    return pa.RecordBatch.from_arrays(
        [
            found[name] if name in found else batch.column(name)
            for name in ARCHIVED_ROWS_SCHEMA.names
        ],
        schema=ARCHIVED_ROWS_SCHEMA,
    )


def _table_of(stream: str, schema: pa.Schema) -> DatabaseTable:
    """Return the columns of an undeclared stream, from its table in the archive."""
    types = {pa.int64(): "bigint", pa.float64(): "double", pa.bool_(): "boolean"}
    columns = []
    for field in schema:
        if field.name not in ARCHIVED_ROWS_SCHEMA.names:
            marked = (field.metadata or {}).get(TYPE_METADATA.encode())
            type_ = marked.decode() if marked else types.get(field.type, "string")
            columns.append(Column(field.name, type_))
    names = tuple(column.name for column in columns)
    return DatabaseTable(stream, tuple(columns), ((None, names),))


def _with_stream(file: ArchivedFile, batch: pa.RecordBatch) -> pa.RecordBatch:
    stream = pa.repeat(pa.scalar(file.table_name), batch.num_rows)
    batch = batch.set_column(0, batch.schema.field(0), stream)
    for index, field in enumerate(batch.schema):
        if pa.types.is_list(field.type):
            texts = _texts(batch.column(index))
            batch = batch.set_column(index, pa.field(field.name, pa.string()), texts)
    return batch


def _with_lists(schema: pa.Schema, table: pa.Schema) -> pa.Schema:
    """Return a schema with the lists of a table; Arrow cannot cast these to text."""
    lists = {field.name: field for field in table if pa.types.is_list(field.type)}
    return pa.schema([lists.get(field.name, field) for field in schema])


def _texts(lists: pa.Array) -> pa.Array:
    """Convert lists of texts to texts like those of Spark: ``[a, b]``."""
    return pa.array(
        (
            None
            if texts is None
            else f"[{', '.join('null' if each is None else each for each in texts)}]"
            for texts in lists.to_pylist()
        ),
        pa.string(),
    )


# -- data frames -------------------------------------------------------------------


@attrs.frozen
class ArchivedTables:
    """The tables of an archive, each at one version.

    :ivar streams: a frame for each stream, with :data:`~.schemas.KEY_COLUMNS`, the
        typed columns of the stream's rows, and ``day``. A stream without rows may be
        missing.
    :ivar wire: the commands of recordings, with ARCHIVED_WIRE_SCHEMA; it may be empty.
    :ivar offsets: the offset up to which each stream is archived.
    :ivar purged: the range of purged tokens of each writer.
    """

    streams: Mapping[str, DataFrame]
    wire: DataFrame
    offsets: Mapping[str, StreamOffset]
    purged: Sequence[log.PurgedRange]
    _session: SparkSession = attrs.field(repr=False)
    _snapshot: Snapshot = attrs.field(repr=False)

    def create_views(self) -> None:
        """Add a temporary view for each stream, and ``wire`` for the recordings.

        The views have the names of the streams, and replace others of these names.
        """
        for stream, frame in self.streams.items():
            frame.createOrReplaceTempView(stream)
        self.wire.createOrReplaceTempView("wire")

    def keys(self, *more: str) -> DataFrame:
        """Return the rows of all streams without their content.

        :param more: the names of further columns, such as ``room_id``. Their values
            are converted to text; they are null for streams without such a column.
        :return: ``stream``, ``instance_name``, ``stream_id``, ``row_index``,
            ``written_ts``, ``day``, and ``more``.
        """
        keys = (n for n in ARCHIVED_ROWS_SCHEMA.names if n not in ("stream", "row"))
        return self._snapshot.rows_frame(self._session, *keys, *more)

    def rows(self, *streams: str) -> DataFrame:
        """Return rows with ARCHIVED_ROWS_SCHEMA, with the content as JSON in ``row``.

        This is slower than :meth:`keys` and the typed columns of :attr:`streams`.

        :param streams: the streams to read; by default all.
        """
        scan = self._snapshot.json_rows(streams or self._snapshot.schemas)
        return scan.frame(self._session)


def read_archive(
    session: SparkSession, archive: str | os.PathLike[str]
) -> ArchivedTables:
    """Read an archive.

    :raises PipelineError: if the archive does not exist or cannot be read, or if the
        size of a file is wrong.
    """
    snapshot = open_snapshot(archive).intact()
    return ArchivedTables(
        {stream: snapshot.typed_frame(session, stream) for stream in snapshot.schemas},
        snapshot.wire_frame(session),
        snapshot.offsets,
        snapshot.purged,
        session,
        snapshot,
    )


def _spark_type(field: pa.Field) -> DataType:
    from pyspark.sql.pandas.types import from_arrow_type

    return from_arrow_type(field.type)
