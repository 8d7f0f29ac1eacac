"""The job that exports rows of an archive to a file for other programs.

Executors read the rows and apply the condition; one of them writes the file, so that
nothing passes through the driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from synapse_replication.errors import PipelineError, excerpt
from synapse_replication.pipeline.archive.snapshot import Snapshot, open_snapshot
from synapse_replication.pipeline.result_folder import (
    created_atomically,
    path_of_new_folder,
)
from synapse_replication.pipeline.scan import Batches, Scan
from synapse_replication.pipeline.spark.session import SparkJob, spark_errors_shortened

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Spark's format of times in csv and jsonl.
_TIMES: Final = "yyyy-MM-dd'T'HH:mm:ss.SSS'Z'"


def export_rows(
    archive: str,
    out: str,
    format_: str,
    where: str | None,
    spark: SparkJob,
    *,
    stream: str | None = None,
) -> int:
    """Export rows of an archive, and return their number.

    The rows are written to a temporary folder, which is renamed when it is complete.

    :param out: the folder, which the executors must see under the same path.
    :param format_: ``parquet``, ``csv`` or ``jsonl``.
    :param where: a condition on the columns, in Spark's SQL.
    :param stream: the stream to export, with the fields of its rows as columns;
        ``None`` for all streams.
    :raises PipelineError: if the archive cannot be read, the folder exists or cannot be
        written, the condition is invalid, or the archive has no such stream.
    """
    folder = path_of_new_folder(out)
    snapshot = open_snapshot(archive).intact()
    rows = _rows(snapshot, stream)
    spark.start(rows.ids)
    path = f"rows.{format_}"
    with created_atomically(folder) as temporary, _explained(where, rows.schema):
        frame = rows.frame(spark())
        if where is not None:
            frame = frame.where(where)
        return _write(frame, rows.schema, temporary / path, format_)


def _rows(archive: Snapshot, stream: str | None) -> Scan:
    if stream is None:
        return archive.json_rows(archive.schemas)
    if stream not in archive.schemas:
        raise PipelineError(
            f"--stream {excerpt(stream)}: the archive has no rows of this stream; it "
            f"has rows of {', '.join(archive.schemas) or 'no stream'}"
        )
    return archive.typed_rows(stream)


@contextlib.contextmanager
def _explained(where: str | None, schema: pa.Schema) -> Iterator[None]:
    """Name the condition in the errors that it causes."""
    try:
        with spark_errors_shortened():
            yield
    except PipelineError as error:
        # An error in a task has a Python traceback.
        cause = error.__cause__
        if where is None or cause is None or "Traceback" in str(cause):
            raise
        raise PipelineError(
            f"--where {excerpt(where)}: {error}; the columns are "
            f"{', '.join(schema.names)}"
        ) from None


# -- writing -----------------------------------------------------------------------


def _write(frame: DataFrame, schema: pa.Schema, path: Path, format_: str) -> int:
    """Write the rows of a frame to one file, and return their number."""
    if format_ != "parquet":
        frame = _as_text(frame, schema, format_)
        texts = _texts(schema)
        schema = pa.schema(
            pa.field(field.name, pa.string()) if field.name in texts else field
            for field in schema
        )
    write = partial(_write_file, path, format_, schema)
    counts = frame.repartition(1).mapInArrow(write, "rows bigint").collect()
    if not counts:
        # Without rows, Spark does not run the task.
        return sum(batch.column(0)[0].as_py() for batch in write(iter(())))
    return sum(row["rows"] for row in counts)


def _texts(schema: pa.Schema) -> set[str]:
    """Return the columns that csv and jsonl have as text of this module."""
    types = pa.types
    return {
        field.name
        for field in schema
        if types.is_timestamp(field.type) or types.is_list(field.type)
    }


def _as_text(frame: DataFrame, schema: pa.Schema, format_: str) -> DataFrame:
    """Return the columns as csv has them, or the lines of jsonl."""
    from pyspark.sql import functions

    for field in schema:
        column = frame[field.name]
        if pa.types.is_timestamp(field.type):
            column = functions.date_format(column, _TIMES)
        elif pa.types.is_list(field.type) and format_ == "csv":
            column = functions.to_json(column)
        frame = frame.withColumn(field.name, column)
    if format_ == "csv":
        return frame
    names = [name for name in schema.names if name != "row"]
    values = functions.struct(*names)
    line = functions.to_json(values, {"ignoreNullFields": "false"})
    frame = frame.withColumn("line", line)
    if "row" in schema.names:
        # The content of a row is JSON already.
        begin = functions.expr("substr(line, 1, length(line) - 1)")
        row = functions.lit(',"row":'), frame["row"], functions.lit("}")
        frame = frame.withColumn("line", functions.concat(begin, *row))
    return frame.select("line")


def _write_file(path: Path, format_: str, schema: pa.Schema, rows: Batches) -> Batches:
    """Write rows to a file, in a task; yield their number.

    :raises PipelineError: if the file cannot be written.
    """
    written = 0
    try:
        with contextlib.ExitStack() as stack:
            write = _opened(path, format_, schema, stack)
            for batch in rows:
                written += batch.num_rows
                write(batch)
    except OSError as error:
        raise PipelineError(f"cannot write {path}: {error}") from error
    yield pa.RecordBatch.from_pydict({"rows": [written]})


def _opened(
    path: Path, format_: str, schema: pa.Schema, stack: contextlib.ExitStack
) -> Any:
    """Open a file; return a function that writes a batch to it."""
    if format_ == "jsonl":
        file = stack.enter_context(path.open("w", encoding="utf-8"))

        def write_lines(batch: pa.RecordBatch) -> None:
            file.writelines(f"{line}\n" for line in batch.column(0).to_pylist())

        return write_lines
    writer: Any
    if format_ == "csv":
        from pyarrow import csv

        writer = stack.enter_context(csv.CSVWriter(path, schema))
    else:
        from pyarrow import parquet

        writer = stack.enter_context(
            parquet.ParquetWriter(path, schema, compression="zstd")
        )

    def write(batch: pa.RecordBatch) -> None:
        writer.write_table(pa.Table.from_batches([batch]).cast(schema))

    return write
