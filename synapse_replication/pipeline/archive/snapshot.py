"""One version of an archive: its files, without the damaged ones, and their rows.

The list of a table's files comes from one version of its Delta log, so a snapshot does
not change while the archive is written, compacted or purged. Replaced files are
retained until a vacuum, by default for a week. The files are read with pyarrow.
"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import pyarrow as pa
import pyarrow.compute as pc

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.damage import (
    ArchivedFile,
    DamagedFile,
    files_of,
    find_damage,
    open_file,
    wrong_sizes,
)
from synapse_replication.pipeline.archive.log import (
    PurgedRange,
    archived_size,
    read_purged_ranges,
    read_state,
)
from synapse_replication.pipeline.archive.store import ArchiveStore, open_archive
from synapse_replication.pipeline.json_rows import json_rows
from synapse_replication.pipeline.scan import FEW_KEYS, Batches, Scan, grouped
from synapse_replication.pipeline.schemas import (
    ARCHIVED_ROWS_SCHEMA,
    ARCHIVED_WIRE_SCHEMA,
    DAY,
    with_texts,
)
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.tables import (
    TYPE_METADATA,
    Column,
    DatabaseTable,
    standard_tables,
)

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

_MAX_ID: Final = 2**63 - 1


@attrs.frozen
class Snapshot:
    """One version of an archive.

    :ivar store: the location of the archive.
    :ivar tables: the table of each stream. A stream without rows may be missing.
    :ivar columns: the columns of each stream.
    :ivar wire_table: the table of recorded commands; ``None`` if there is none.
    :ivar offsets: the offset up to which each stream is archived.
    :ivar purged: the range of purged tokens of each writer.
    :ivar damaged: the damaged files that were found, which are not read.
    :ivar files: the other files of the streams.
    :ivar wire_files: the other files of ``wire_table``.
    """

    store: ArchiveStore
    tables: Mapping[str, DeltaTable]
    columns: Mapping[str, DatabaseTable]
    wire_table: DeltaTable | None
    offsets: Mapping[str, StreamOffset]
    purged: Sequence[PurgedRange]
    damaged: Sequence[DamagedFile]
    files: Sequence[ArchivedFile]
    wire_files: Sequence[ArchivedFile]

    def lacks(self, recording: Path) -> bool:
        """Return whether the archive lacks a recording, or has it with another size."""
        if self.wire_table is None:
            return True
        size = archived_size(self.wire_table, recording.name)
        return size != recording.stat().st_size

    def id_bounds(self) -> dict[str, tuple[int, int]]:
        """Return the least and the greatest token of each stream that has files.

        Only the logs of the tables are read.
        """
        by_stream: dict[str, list[ArchivedFile]] = {}
        for file in self.files:
            by_stream.setdefault(file.table, []).append(file)
        return {stream: bounds_of(files) for stream, files in by_stream.items()}

    def verified(self, spark: Callable[[], SparkSession]) -> Snapshot:
        """Read all files, and return a snapshot without the damaged ones.

        :param spark: returns the session; called if there are many rows.
        """
        files = [*self.files, *self.wire_files]
        collect = functools.partial(Scan.collect, spark=spark, few=FEW_KEYS)
        return self._without(find_damage(self.store, files, collect))

    def _without(self, damaged: Iterable[DamagedFile]) -> Snapshot:
        all_damaged = [*self.damaged, *damaged]
        bad = {each.file for each in all_damaged}
        return attrs.evolve(
            self,
            damaged=all_damaged,
            files=[file for file in self.files if file not in bad],
            wire_files=[file for file in self.wire_files if file not in bad],
        )

    def rows(self, *columns: str) -> Scan:
        """Return the rows of all streams, without most of their content.

        :param columns: :data:`~.tables.KEY_COLUMNS`, ``day``, and text columns such as
            ``room_id``, which are null for streams that lack them.
        :return: ``stream`` and ``columns``.
        """
        schema = with_texts(ARCHIVED_ROWS_SCHEMA, *columns)
        return self._scan(self.files, schema, _with_stream)

    def wire(self, *columns: str) -> Scan:
        """Return the recorded commands, with some columns of ARCHIVED_WIRE_SCHEMA."""
        schema = pa.schema([ARCHIVED_WIRE_SCHEMA.field(name) for name in columns])
        return self._scan(self.wire_files, schema, lambda file, batch: batch)

    def intact(self) -> Snapshot:
        """Return this snapshot.

        :raises PipelineError: if a file is damaged.
        """
        if self.damaged:
            number = len(self.damaged) - 1
            more = f" (and {number} more files)" if number else ""
            raise PipelineError(f"{self.damaged[0]}{more}")
        return self

    def json_rows(
        self, stream: str, first: int = -_MAX_ID, last: int = _MAX_ID
    ) -> Scan:
        """Return the rows of a stream with tokens from ``first`` to ``last``.

        :return: ARCHIVED_ROWS_SCHEMA.
        """
        table = self.columns[stream]

        def convert(file: ArchivedFile, batch: pa.RecordBatch) -> pa.RecordBatch:
            ids = batch.column("stream_id")
            within = pc.and_(pc.greater_equal(ids, first), pc.less_equal(ids, last))
            return to_json_rows(table, batch.filter(within))

        files = [
            file
            for file in self.files
            if file.table == stream and _overlaps(file, first, last)
        ]
        schema = pa.schema(self.tables[stream].schema())
        scan = self._scan(files, schema, convert)
        return attrs.evolve(scan, schema=ARCHIVED_ROWS_SCHEMA)

    def typed_rows(self, stream: str) -> Scan:
        """Return the rows of a stream with the columns of its table."""
        files = [file for file in self.files if file.table == stream]
        schema = pa.schema(self.tables[stream].schema())
        return self._scan(files, schema, lambda file, batch: batch)

    def _scan(
        self,
        files: Sequence[ArchivedFile],
        schema: pa.Schema,
        convert: Callable[[ArchivedFile, pa.RecordBatch], pa.RecordBatch],
    ) -> Scan:
        read = functools.partial(_read_files, self.store, schema, convert)
        ids = sum(file.rows for file in files)
        return Scan(schema, grouped(files), read, ids)


def open_snapshot(
    archive: str | os.PathLike[str],
    tables: Mapping[str, DatabaseTable] | None = None,
) -> Snapshot:
    """Read the logs of an archive, and the sizes of its files.

    :param tables: the columns of streams other than the standard ones; by default, they
        are read from the archive.
    :raises PipelineError: if the archive does not exist or cannot be read.
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
    snapshot = Snapshot(
        store, delta_tables, known, wire, offsets, purged, (), files, wire_files
    )
    return snapshot._without(wrong_sizes(store, [*files, *wire_files]))


def bounds_of(files: Iterable[ArchivedFile]) -> tuple[int, int]:
    """Return the least and the greatest token of files.

    If a file lacks statistics, the bounds include every token.
    """
    tokens = [file.tokens or (-_MAX_ID, _MAX_ID) for file in files]
    return min(low for low, _ in tokens), max(high for _, high in tokens)


def to_json_rows(table: DatabaseTable, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert typed rows to rows as on the wire, with ARCHIVED_ROWS_SCHEMA."""
    found = {
        "stream": pa.repeat(pa.scalar(table.name), batch.num_rows),
        "row": json_rows(table, batch),
    }
    return pa.RecordBatch.from_arrays(
        [
            found[name] if name in found else batch.column(name)
            for name in ARCHIVED_ROWS_SCHEMA.names
        ],
        schema=ARCHIVED_ROWS_SCHEMA,
    )


def _overlaps(file: ArchivedFile, first: int, last: int) -> bool:
    low, high = bounds_of([file])
    return low <= last and first <= high


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
        if field.name not in ARCHIVED_ROWS_SCHEMA.names
    )
    return DatabaseTable(stream, columns, ((None, tuple(c.name for c in columns)),))


def _with_stream(file: ArchivedFile, batch: pa.RecordBatch) -> pa.RecordBatch:
    stream = pa.repeat(pa.scalar(file.table), batch.num_rows)
    return batch.set_column(0, batch.schema.field(0), stream)


def _read_files(
    store: ArchiveStore,
    schema: pa.Schema,
    convert: Callable[[ArchivedFile, pa.RecordBatch], pa.RecordBatch],
    files: Iterable[ArchivedFile],
) -> Batches:
    """Read files. Columns that a file lacks become null."""
    for file in files:
        day = datetime.date.fromisoformat(file.day)
        with open_file(store, file, pre_buffer=True) as opened:
            names = [name for name in opened.schema_arrow.names if name in schema.names]
            for batch in opened.iter_batches(columns=names):
                yield convert(file, _completed(batch, schema, day))


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
