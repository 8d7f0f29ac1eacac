"""An archive as Spark data frames, without Delta's Java library.

The frames of a local archive use Spark's Parquet reader. Those of an object store read
the files with pyarrow in tasks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import pyarrow as pa
from pyspark.sql import DataFrame, functions as sf
from pyspark.sql.pandas.types import from_arrow_schema

from synapse_replication.pipeline.archive.damage import ArchivedFile
from synapse_replication.pipeline.archive.log import PurgedRange
from synapse_replication.pipeline.archive.snapshot import (
    Snapshot,
    open_snapshot,
    to_json_rows,
)
from synapse_replication.pipeline.scan import Scan, table_frame
from synapse_replication.pipeline.schemas import (
    ARCHIVED_ROWS_SCHEMA,
    ARCHIVED_WIRE_SCHEMA,
)
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.tables import DatabaseTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@attrs.frozen
class ArchivedTables:
    """The tables of an archive, each at one version.

    :ivar streams: a frame for each stream, with :data:`~.tables.KEY_COLUMNS`, the typed
        columns of the stream's rows, and ``day``. A stream without rows may be missing.
    :ivar wire: the commands of recordings, with ARCHIVED_WIRE_SCHEMA; it may be empty.
    :ivar offsets: the offset up to which each stream is archived.
    :ivar purged: the range of purged tokens of each writer.
    """

    streams: Mapping[str, DataFrame]
    wire: DataFrame
    offsets: Mapping[str, StreamOffset]
    purged: Sequence[PurgedRange]
    _session: SparkSession = attrs.field(repr=False)
    _tables: Mapping[str, DatabaseTable] = attrs.field(repr=False)

    def keys(self, *more: str) -> DataFrame:
        """Return the rows of all streams without their content.

        :param more: the names of further columns, such as ``room_id``. Their values
            are converted to text; they are null for streams without such a column.
        :return: ``stream``, ``instance_name``, ``stream_id``, ``row_index``,
            ``written_ts``, ``day``, and ``more``.
        """
        names = [name for name in ARCHIVED_ROWS_SCHEMA.names if name != "row"]
        fields = [
            *(ARCHIVED_ROWS_SCHEMA.field(name) for name in names),
            *(pa.field(name, pa.string()) for name in more),
        ]
        frames = [
            frame.select(
                sf.lit(stream).alias("stream"),
                *names[1:],
                *(
                    sf.col(name).cast("string").alias(name)
                    if name in frame.columns
                    else sf.lit(None).cast("string").alias(name)
                    for name in more
                ),
            )
            for stream, frame in self.streams.items()
        ]
        return _union(self._session, frames, pa.schema(fields))

    def rows(self, *streams: str) -> DataFrame:
        """Return rows with ARCHIVED_ROWS_SCHEMA, with the content as JSON in ``row``.

        This is slower than :meth:`keys` and the typed columns of :attr:`streams`.

        :param streams: the streams to read; by default all.
        """
        frames = [
            _with_json(frame, self._tables[stream])
            for stream, frame in self.streams.items()
            if not streams or stream in streams
        ]
        return _union(self._session, frames, ARCHIVED_ROWS_SCHEMA)


def read_archive(
    session: SparkSession,
    archive: str | os.PathLike[str],
    *,
    tables: Mapping[str, DatabaseTable] | None = None,
) -> ArchivedTables:
    """Read an archive.

    :param tables: the columns of streams other than the standard ones; by default, they
        are read from the archive.
    :raises PipelineError: if the archive does not exist or cannot be read, or if the
        size of a file is wrong.
    """
    snapshot = open_snapshot(archive, tables).intact()
    streams = {}
    for stream in snapshot.tables:
        files = [file for file in snapshot.files if file.table == stream]
        rows = snapshot.typed_rows(stream)
        streams[stream] = _frame(session, snapshot, files, rows)
    wire = snapshot.wire(*ARCHIVED_WIRE_SCHEMA.names)
    return ArchivedTables(
        streams,
        _frame(session, snapshot, snapshot.wire_files, wire),
        snapshot.offsets,
        snapshot.purged,
        session,
        snapshot.columns,
    )


def _frame(
    session: SparkSession,
    snapshot: Snapshot,
    files: Sequence[ArchivedFile],
    scan: Scan,
) -> DataFrame:
    if not files or not snapshot.store.is_local:
        return scan.frame(session)
    uri = files[0].uri
    schema = from_arrow_schema(scan.schema)
    return (
        session.read.schema(schema)
        .option("basePath", f"file://{uri}")
        .parquet(*(f"file://{uri}/{file.path}" for file in files))
        .select(*schema.names)
    )


def _with_json(frame: DataFrame, table: DatabaseTable) -> DataFrame:
    def convert(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield to_json_rows(table, batch)

    names = [n for n in ARCHIVED_ROWS_SCHEMA.names if n not in ("stream", "row")]
    columns = [column.name for column in table.columns]
    schema = from_arrow_schema(ARCHIVED_ROWS_SCHEMA)
    return frame.select(*names, *columns).mapInArrow(convert, schema)


def _union(
    session: SparkSession, frames: Iterable[DataFrame], schema: pa.Schema
) -> DataFrame:
    frames = list(frames)
    if not frames:
        return table_frame(session, schema.empty_table())
    return functools.reduce(DataFrame.unionAll, frames)
