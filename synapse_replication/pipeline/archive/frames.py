"""An archive as Spark data frames, without Delta's Java library.

The frames of a stream, and of the commands of recordings, use Spark's Parquet reader if
the archive is local. All others read the files with pyarrow in tasks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema

from synapse_replication.pipeline.archive.files import ArchivedFile
from synapse_replication.pipeline.archive.log import PurgedRange
from synapse_replication.pipeline.archive.snapshot import Snapshot, open_snapshot
from synapse_replication.pipeline.scan import Scan
from synapse_replication.pipeline.schemas import (
    ARCHIVED_ROWS_SCHEMA,
    ARCHIVED_WIRE_SCHEMA,
)
from synapse_replication.pipeline.source.offsets import StreamOffset

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    purged: Sequence[PurgedRange]
    _session: SparkSession = attrs.field(repr=False)
    _snapshot: Snapshot = attrs.field(repr=False)

    def keys(self, *more: str) -> DataFrame:
        """Return the rows of all streams without their content.

        :param more: the names of further columns, such as ``room_id``. Their values
            are converted to text; they are null for streams without such a column.
        :return: ``stream``, ``instance_name``, ``stream_id``, ``row_index``,
            ``written_ts``, ``day``, and ``more``.
        """
        keys = (n for n in ARCHIVED_ROWS_SCHEMA.names if n not in ("stream", "row"))
        return self._snapshot.rows(*keys, *more).frame(self._session)

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

    def frame(files: Sequence[ArchivedFile], scan: Scan) -> DataFrame:
        if not files or not snapshot.store.is_local:
            return scan.frame(session)
        uri = files[0].table_uri
        schema = from_arrow_schema(scan.schema)
        reader = session.read.schema(schema).option("basePath", f"file://{uri}")
        paths = (f"file://{uri}/{file.path}" for file in files)
        return reader.parquet(*paths).select(*schema.names)

    return ArchivedTables(
        {
            stream: frame(snapshot.files_of(stream), snapshot.typed_rows(stream))
            for stream in snapshot.schemas
        },
        frame(snapshot.wire_files, snapshot.wire(*ARCHIVED_WIRE_SCHEMA.names)),
        snapshot.offsets,
        snapshot.purged,
        session,
        snapshot,
    )
