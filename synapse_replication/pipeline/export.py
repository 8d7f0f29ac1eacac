"""The job that exports rows of an archive to a file for other programs."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa

from synapse_replication.errors import PipelineError, excerpt
from synapse_replication.pipeline.archive.snapshot import Snapshot, open_snapshot
from synapse_replication.pipeline.scan import Scan
from synapse_replication.pipeline.workspace import (
    batches_as,
    created_atomically,
    open_workspace,
    path_of_new_folder,
)

#: The options of each format.
OPTIONS = {
    "parquet": "FORMAT parquet, COMPRESSION zstd",
    "csv": "FORMAT csv, HEADER",
    "jsonl": "FORMAT json",
}


def export_rows(
    archive: str,
    out: str,
    format_: str,
    where: str | None,
    *,
    stream: str | None = None,
) -> int:
    """Export rows of an archive, and return their number.

    The rows are written to a temporary folder, which is renamed when it is complete.

    :param format_: ``parquet``, ``csv`` or ``jsonl``.
    :param where: a condition on the columns, in SQL.
    :param stream: the stream to export, with the fields of its rows as columns;
        ``None`` for all streams.
    :raises PipelineError: if the archive cannot be read, the folder exists or cannot be
        written, the condition is invalid, or the archive has no such stream.
    """
    folder = path_of_new_folder(out)
    snapshot = open_snapshot(archive).intact()
    rows = _rows(snapshot, stream)
    with created_atomically(folder) as temporary:
        return _write(rows, temporary / f"rows.{format_}", format_, where)


def _rows(archive: Snapshot, stream: str | None) -> Scan:
    if stream is None:
        return archive.json_rows(archive.schemas)
    if stream not in archive.schemas:
        raise PipelineError(
            f"--stream {excerpt(stream)}: the archive has no rows of this stream; it "
            f"has rows of {', '.join(archive.schemas) or 'no stream'}"
        )
    return archive.typed_rows(stream)


def _write(scan: Scan, path: Path, format_: str, where: str | None) -> int:
    schema, rows = scan.schema, scan.batches()
    condition = "" if where is None else f"WHERE ({where}\n)"
    query = f"SELECT {_columns(schema, format_)} FROM archived {condition}"
    target = str(path).replace("'", "''")
    with open_workspace() as workspace, batches_as(workspace, "archived", schema, rows):
        try:
            ((count,),) = workspace.execute(
                f"COPY ({query}) TO '{target}' ({OPTIONS[format_]})"
            ).fetchall()
        except duckdb.IOException as error:
            raise OSError(str(error)) from error
        except duckdb.Error as error:
            if where is None:
                raise
            raise PipelineError(
                f"--where {excerpt(where)}: {str(error).splitlines()[0]}; the columns "
                f"are {', '.join(schema.names)}"
            ) from None
    return int(count)


def _columns(schema: pa.Schema, format_: str) -> str:
    """Return the columns, with times and JSON rows as the format has them."""
    if format_ == "parquet":
        return "*"
    times = (f'"{f.name}"' for f in schema if pa.types.is_timestamp(f.type))
    changed = [
        f"strftime({name} AT TIME ZONE 'UTC', '%Y-%m-%dT%H:%M:%S.%gZ') AS {name}"
        for name in times
    ]
    if format_ == "jsonl" and "row" in schema.names:
        changed.append('"row"::JSON AS "row"')
    return f"* REPLACE ({', '.join(changed)})" if changed else "*"
