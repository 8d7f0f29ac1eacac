"""Recorded lines in the workspace of a job."""

from __future__ import annotations

import os
from collections.abc import Sequence

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from synapse_replication.pipeline.archive.snapshot import Snapshot
from synapse_replication.pipeline.scan import Batches, Scan, Spark
from synapse_replication.pipeline.schemas import WIRE_SCHEMA
from synapse_replication.pipeline.wire_lines import find_recordings, scan_recordings
from synapse_replication.pipeline.workspace import load


def load_lines(
    workspace: duckdb.DuckDBPyConnection,
    columns: Sequence[str],
    recordings: Sequence[str | os.PathLike[str]],
    archive: Snapshot | None,
    spark: Spark,
) -> None:
    """Create the table ``wire`` of the lines of recordings and of an archive.

    A recording that is in both is read only from the archive.

    :param columns: columns of WIRE_SCHEMA; the table also has ``is_damaged``, which is
        whether a line is an invalid record.
    :param spark: called if there are many lines.
    """
    new = [
        path
        for path in find_recordings(recordings)
        if archive is None or archive.lacks(path)
    ]
    scans = [scan_recordings(new)]
    if archive is not None:
        read = {"recording", "command", "line", *columns}
        names = [name for name in WIRE_SCHEMA.names if name in read]
        wire = archive.wire(*names)
        scans.append(wire.then(_with_folder, wire.schema))
    schema = lines_schema(columns)
    batches = (
        batch
        for scan in scans
        for batch in _reduced(scan, columns, schema).collect(spark)
    )
    load(workspace, "wire", schema, batches)


def lines_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the columns of the table of :func:`load_lines`."""
    fields = [WIRE_SCHEMA.field(name) for name in columns]
    return pa.schema([*fields, pa.field("is_damaged", pa.bool_())])


def _reduced(scan: Scan, columns: Sequence[str], schema: pa.Schema) -> Scan:
    def reduce(batches: Batches) -> Batches:
        for batch in batches:
            no_command = pc.is_null(batch.column("command"))
            damaged = pc.and_(no_command, pc.equal(batch.column("line"), ""))
            chosen = [*(batch.column(name) for name in columns), damaged]
            yield pa.RecordBatch.from_arrays(chosen, schema=schema)

    return scan.then(reduce, schema)


def _with_folder(batches: Batches) -> Batches:
    """Mark the names of archived recordings."""
    for batch in batches:
        names = pc.binary_join_element_wise("archive/wire", batch.column(0), "/")
        yield batch.set_column(0, batch.schema.field(0), names)
