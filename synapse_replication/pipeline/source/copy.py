"""COPY into Arrow: rows come in blocks, and no more than a few are in memory.

The server writes CSV into a pipe, from which Arrow reads; when Spark does not ask
for more, the pipe is full and the server waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from synapse_replication.errors import PipelineError

if TYPE_CHECKING:
    import pyarrow
    from psycopg2.extensions import cursor

__all__ = ["BLOCK_BYTES", "copy_batches"]

#: Bytes of CSV in one batch. Arrow reads no row that is longer than a block: where
#: there is one, the next size is taken.
BLOCK_BYTES = (2**20, 2**24, 2**28)

#: What a pipe holds.
_PIPE_BYTES = 2**16


def copy_batches(
    txn: cursor, sql: str, stream_name: str
) -> Iterator[pyarrow.RecordBatch]:
    """Read the rows of a query of :mod:`synapse_replication.pipeline.source.ranges`.

    Leaving off early cancels the query.

    :param txn: of a transaction that sees the database at one moment.
    :raises psycopg2.Error: the query fails.
    :raises PipelineError: a row is longer than any block.
    """
    import pyarrow as pa

    given = 0
    for block_bytes in BLOCK_BYTES:
        txn.execute("SAVEPOINT before_copy")
        passed_over = 0
        try:
            for batch in _copy(txn, sql, stream_name, block_bytes):
                # The same moment, the same order: what was given is not given again.
                skip = min(given - passed_over, batch.num_rows)
                passed_over += skip
                if skip < batch.num_rows:
                    given += batch.num_rows - skip
                    passed_over += batch.num_rows - skip
                    yield batch.slice(skip)
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error):
                raise
            txn.execute("ROLLBACK TO SAVEPOINT before_copy")
        else:
            return
    raise PipelineError(
        f"stream {stream_name} has a row of more than {BLOCK_BYTES[-1] >> 20} MiB, "
        "which is not read; leave the stream out of streams, or write ids in its place"
    )


def _copy(
    txn: cursor, sql: str, stream_name: str, block_bytes: int
) -> Iterator[pyarrow.RecordBatch]:
    read_end, write_end = os.pipe()
    copier = _Copier(txn, sql, write_end)
    copier.start()
    source = os.fdopen(read_end, "rb", buffering=_PIPE_BYTES)
    try:
        yield from _read_csv(source, stream_name, block_bytes)
    finally:
        # If we leave off, whoever still writes into the pipe learns it.
        source.close()
        if copier.is_alive():
            txn.connection.cancel()
        copier.join()
    if copier.error is not None:
        raise copier.error


class _Copier(threading.Thread):
    """Has the server write into the pipe: psycopg2 does not return before its end."""

    def __init__(self, txn: cursor, sql: str, write_end: int) -> None:
        super().__init__(name="COPY", daemon=True)
        self._txn = txn
        self._sql = f"COPY ({sql}) TO STDOUT WITH (FORMAT csv)"
        self._write_end = write_end
        self.error: Exception | None = None

    def run(self) -> None:
        import psycopg2

        try:
            with os.fdopen(self._write_end, "wb", buffering=_PIPE_BYTES) as sink:
                self._txn.copy_expert(self._sql, sink)
        except (psycopg2.Error, OSError) as error:
            # Given to the reader, who finds the pipe at its end.
            self.error = error


def _read_csv(
    source: Any, stream_name: str, block_bytes: int
) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow as pa
    from pyarrow import csv

    types = {
        "instance_name": pa.string(),
        "stream_id": pa.int64(),
        "row_index": pa.int32(),
        "row": pa.string(),
        "written_us": pa.int64(),
    }
    if not source.peek(1):
        return
    reader = csv.open_csv(
        pa.PythonFile(source, mode="r"),
        read_options=csv.ReadOptions(
            use_threads=False, block_size=block_bytes, column_names=list(types)
        ),
        # A number in JSON may be followed by a line end.
        parse_options=csv.ParseOptions(newlines_in_values=True),
        convert_options=csv.ConvertOptions(
            column_types=types, strings_can_be_null=False, null_values=[""]
        ),
    )
    written = pa.timestamp("us", tz="UTC")
    schema = pa.schema(
        [
            pa.field("stream", pa.string(), nullable=False),
            pa.field("instance_name", pa.string(), nullable=False),
            pa.field("stream_id", pa.int64(), nullable=False),
            pa.field("row_index", pa.int32(), nullable=False),
            pa.field("row", pa.string(), nullable=False),
            pa.field("written_ts", written),
        ]
    )
    for batch in reader:
        names = pa.repeat(pa.scalar(stream_name), batch.num_rows)
        columns = [names, *batch.columns[:4], batch.column(4).cast(written)]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)
