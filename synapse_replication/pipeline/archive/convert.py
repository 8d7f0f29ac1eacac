"""Converts an archive of an older version of this package to Delta tables.

Such an archive has Parquet files with rows as JSON below ``rows/stream=NAME/day=DAY``,
commands below ``wire/day=DAY``, and manifests of its batches below ``_meta``. The
newest manifest below ``_meta/rows`` has the offsets. The manifests below ``_meta/wire``
list the archived recordings. Rows retain their days, so that a later purge removes the
same rows.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import attrs
import pyarrow as pa

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.files import DayWriter
from synapse_replication.pipeline.archive.log import (
    PurgedRange,
    commit_properties,
    purged_properties,
    read_state,
)
from synapse_replication.pipeline.archive.store import (
    ArchiveStore,
    open_store,
    reason_of,
)
from synapse_replication.pipeline.archive.table import ArchiveTable
from synapse_replication.pipeline.source.offsets import StreamOffset, offsets_from_json
from synapse_replication.pipeline.tables import (
    KIND,
    WIRE_ARROW_SCHEMA,
    WIRE_TABLE_SCHEMA,
    Column,
    StreamTable,
    standard_tables,
)

if TYPE_CHECKING:
    from synapse_replication.pipeline.progress import JobProgress

__all__ = ["Converted", "convert_archive"]

#: The number of rows that are converted at a time.
_AT_ONCE: Final = 50_000


@attrs.frozen
class Converted:
    """The result of a conversion."""

    rows: int
    commands: int
    streams: int


def convert_archive(
    old: str,
    archive: str,
    tables: Mapping[str, StreamTable] | None = None,
    progress: JobProgress | None = None,
) -> Converted:
    """Convert an archive to a new location; the old archive is not changed.

    :param tables: the columns of streams other than the standard ones.
    :param progress: shows a step for each table, and counts the converted files.
    :raises PipelineError: if the old archive does not exist, has a manifest or a
        Parquet file that cannot be read, or has an interrupted batch; if a stream is
        unknown; or if the new location is unusable or already contains an archive.
    :raises OSError: if a folder cannot be read, or a file cannot be written.
    """
    source = Path(old).absolute()
    _check(source)
    store = open_store(archive)
    if store.streams() or store.table(store.wire_uri) is not None:
        raise PipelineError(
            f"{store.uri} contains an archive; choose a new location, or remove the "
            "files there if they are from an interrupted conversion"
        )
    known = {**standard_tables(), **(tables or {})}
    offsets = _offsets(source)
    purged = _purged(source)
    rows = streams = 0
    folders = sorted((source / "rows").glob("stream=*"))
    if progress is not None:
        progress.expect(len(folders) + 1)
    for folder in folders:
        stream = unquote(folder.name.removeprefix("stream="))
        if stream not in known:
            raise PipelineError(
                f"stream {stream} is unknown; pass the configuration that declares it "
                "(-c)"
            )
        offset = offsets.get(stream, StreamOffset())
        if progress is not None:
            progress.begin(f"convert {stream}")
        rows += _convert_stream(store, folder, known[stream], offset, progress)
        streams += 1
        if ranges := [each for each in purged if each.stream == stream]:
            _record_purged(store, stream, ranges)
    if progress is not None:
        progress.begin("convert recordings of the wire")
    return Converted(rows, _convert_wire(store, source, progress), streams)


def _check(source: Path) -> None:
    if not (source / "_meta" / "archive.json").exists():
        raise PipelineError(
            f"{source} is not an archive of an older version: it has no "
            "_meta/archive.json"
        )
    pending = sorted((source / "_meta").glob("*/*.pending.json"))
    if pending:
        raise PipelineError(
            f"{pending[0]} belongs to an interrupted batch; run 'pipeline archive "
            "--once' of the version that created the archive, then convert"
        )


def _manifests(source: Path, kind: str) -> Iterator[dict[str, Any]]:
    for path in sorted((source / "_meta" / kind).glob("*.json")):
        try:
            yield json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise PipelineError(f"{path} cannot be read: {error}") from error


def _offsets(source: Path) -> dict[str, StreamOffset]:
    newest: dict[str, Any] | None = None
    for manifest in _manifests(source, "rows"):
        newest = manifest
    if newest is None:
        return {}
    (offsets,) = newest["batch"]["inputs"]
    return offsets_from_json(offsets)


def _purged(source: Path) -> list[PurgedRange]:
    return [
        PurgedRange(
            value["stream"],
            value["instance_name"],
            value["first_token"],
            value["last_token"],
        )
        for record in _manifests(source, "purges")
        for value in record["rows"]
    ]


def _record_purged(store: ArchiveStore, stream: str, ranges: list[PurgedRange]) -> None:
    table = store.table(store.stream_uri(stream))
    assert table is not None
    table.alter.set_table_properties(
        purged_properties(ranges),
        raise_if_not_exists=False,
        commit_properties=commit_properties(read_state(table), new=False),
    )


def _convert_stream(
    store: ArchiveStore,
    folder: Path,
    columns: StreamTable,
    offset: StreamOffset,
    progress: JobProgress | None,
) -> int:
    uri = store.stream_uri(columns.name)
    table = ArchiveTable(store, uri, columns.name, columns.archive_schema)
    files = []
    for path in _counted(folder.glob("day=*/*.parquet"), progress):
        writer = DayWriter(store, uri, "written_ts", _day_of(path))
        for batch in _batches(path):
            writer.write(_typed(batch, columns))
        files += writer.close()
    table.commit(files, offset)
    return sum(file.rows for file in files)


def _convert_wire(
    store: ArchiveStore, source: Path, progress: JobProgress | None
) -> int:
    recordings = {
        name: size
        for manifest in _manifests(source, "wire")
        for name, size in manifest["batch"]["inputs"]
    }
    if not recordings:
        return 0
    table = ArchiveTable(store, store.wire_uri, "the wire", WIRE_TABLE_SCHEMA)
    files = []
    for path in _counted((source / "wire").glob("day=*/*.parquet"), progress):
        writer = DayWriter(store, store.wire_uri, "received_ts", _day_of(path))
        for batch in _batches(path):
            columns = [
                batch.column(field.name).cast(field.type) for field in WIRE_ARROW_SCHEMA
            ]
            writer.write(pa.RecordBatch.from_arrays(columns, schema=WIRE_ARROW_SCHEMA))
        files += writer.close()
    table.commit(files, recordings=recordings)
    return sum(file.rows for file in files)


def _counted(paths: Iterable[Path], progress: JobProgress | None) -> Iterator[Path]:
    """Yield paths in order, and show how many have been yielded."""
    ordered = sorted(paths)
    for number, path in enumerate(ordered):
        if progress is not None:
            progress.count(number, len(ordered))
        yield path


def _day_of(path: Path) -> datetime.date:
    return datetime.date.fromisoformat(path.parent.name.removeprefix("day="))


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
            yield from file.iter_batches(batch_size=_AT_ONCE)
    except (pa.ArrowException, OSError) as error:
        raise PipelineError(
            f"{path} cannot be read: {reason_of(error)}; restore the file from a "
            "backup, and convert again"
        ) from error


def _typed(batch: pa.RecordBatch, table: StreamTable) -> pa.RecordBatch:
    rows = [json.loads(text) for text in batch.column("row").to_pylist()]
    kinds = dict(table.kinds)
    fields: dict[str, list[Any]] = {column.name: [] for column in table.columns}
    for row in rows:
        kind, values = (None, row) if None in kinds else (row[0], row[1])
        found = dict(zip(kinds[kind], values, strict=False))
        if kind is not None:
            found[KIND] = kind
        for column in table.columns:
            fields[column.name].append(_value(found.get(column.name), column))
    schema = table.arrow_schema
    columns = [
        pa.array(fields[field.name], field.type)
        if field.name in fields
        else _timestamp(batch.column(field.name), field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _timestamp(values: pa.Array, type_: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(type_) and values.type.tz is None:
        # The old files have times in UTC, without a zone.
        return values.cast(pa.timestamp("us")).cast(pa.int64()).cast(type_)
    return values.cast(type_)


def _value(value: Any, column: Column) -> Any:
    if value is None or column.type != "json":
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
