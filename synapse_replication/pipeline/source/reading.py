"""Reads the parts of a Spark task as Arrow batches, over the task's own connection.

The server sends columns by binary ``COPY``, and the ADBC driver converts the received
data to record batches. This module builds JSON rows from the columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import psycopg2
import pyarrow as pa
from psycopg2.extensions import make_dsn

from synapse_replication.errors import PipelineError, excerpt
from synapse_replication.pipeline.schemas import KEY_COLUMNS, ROWS_SCHEMA, json_rows
from synapse_replication.pipeline.source import connections
from synapse_replication.pipeline.source.connections import READ_TIMEOUT, settings_sql
from synapse_replication.pipeline.source.ranges import Part, range_sql

if TYPE_CHECKING:
    from adbc_driver_postgresql.dbapi import Connection

#: The approximate size of a batch, in bytes.
_BATCH_BYTES: Final = 4 * 2**20


@attrs.frozen
class SkippedId:
    """An id whose rows cannot be read because of their content.

    :ivar stream: the name of the stream.
    :ivar where: the tables and the id, for display.
    :ivar reason: PostgreSQL's reason.
    """

    stream: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.stream}: skipped {self.where}: {self.reason}"


def read_parts(
    conninfo: Mapping[str, Any],
    parts: Sequence[Part],
    schema: pa.Schema | None = ROWS_SCHEMA,
) -> Iterator[pa.RecordBatch]:
    """Read parts; yield batches with the columns of a schema.

    :param schema: columns of ROWS_SCHEMA, and others of the streams' tables, which are
        null for streams that lack them; ``None`` for all columns of the part's table.
    :raises PipelineError: if the database cannot be reached, or a query fails.
    """
    if not parts:
        return
    names = None
    if schema is not None and "row" not in schema.names:
        names = frozenset(schema.names)
    with task_connection(conninfo) as connection:
        for part in parts:
            part = attrs.evolve(part, names=names)
            for batch in read_part(connection, conninfo, part):
                yield (
                    batch
                    if schema is None
                    else pa.RecordBatch.from_arrays(
                        [_column(part, batch, field) for field in schema], schema=schema
                    )
                )


def _column(part: Part, batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    if field.name == "stream":
        return pa.repeat(pa.scalar(part.stream.name), batch.num_rows)
    if field.name == "row":
        return json_rows(part.stream.table, batch)
    if field.name in batch.schema.names:
        return batch.column(field.name).cast(field.type)
    return pa.nulls(batch.num_rows, field.type)


@contextmanager
def task_connection(conninfo: Mapping[str, Any]) -> Iterator[Connection]:
    """Open a task's connection; queries on the connection return Arrow batches.

    :raises PipelineError: if the database cannot be reached.
    """
    import adbc_driver_manager
    from adbc_driver_postgresql import dbapi

    try:
        opened = dbapi.connect(make_dsn(**{**connections.DEFAULTS, **conninfo}))
    except adbc_driver_manager.Error as error:
        raise connections.unreachable(conninfo, error) from None
    with closing(opened):
        yield opened


def read_part(
    connection: Connection,
    conninfo: Mapping[str, Any],
    part: Part,
    skipped: list[SkippedId] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Read one part; yield batches of the key columns and the typed columns.

    Closing the iterator early cancels the query.

    Theory of operation: PostgreSQL fails the whole query if one value cannot be cast,
    for instance a text that should be JSON. The part is then halved until the id is
    found, without repeating the rows that were yielded.

    :param conninfo: the parameters of the connection, for error messages.
    :param skipped: receives the ids whose rows cannot be read because of their content;
        ``None`` to fail.
    :raises PipelineError: if the query fails.
    """
    todo = [part]
    last = (part.low, 0)
    while todo:
        part = todo.pop()
        try:
            for batch in _query(connection, conninfo, part):
                if (rows := _after(batch, last)).num_rows:
                    yield rows
                    last = _last_of(rows)
        except PipelineError:
            if skipped is None:
                raise
            low, high = max(part.low, last[0] - 1), part.high
            if high - low == 1:
                found = _explain(conninfo, part.within(low, high))
                if found is None:
                    raise
                skipped.append(found)
                continue
            middle = (low + high) // 2
            todo += [part.within(middle, high), part.within(low, middle)]


def _after(batch: pa.RecordBatch, last: tuple[int, int]) -> pa.RecordBatch:
    """Return the rows of a batch after a token and an index."""
    token, index = last
    if batch.column(0)[0].as_py() > token:
        return batch
    tokens, indices = (batch.column(i).to_numpy() for i in (0, 1))
    read = (tokens < token) | ((tokens == token) & (indices <= index))
    return batch.slice(int(np.count_nonzero(read)))


def _explain(conninfo: Mapping[str, Any], part: Part) -> SkippedId | None:
    """Return why the rows of one id cannot be read; ``None`` if they can be read now.

    The ADBC driver does not say what kind of error ended a stream of rows.

    :raises PipelineError: if the reason is not the content of the rows.
    """
    try:
        with connections.read_transaction(conninfo, READ_TIMEOUT) as txn:
            txn.execute(range_sql(part))
    except PipelineError as error:
        if not isinstance(error.__cause__, psycopg2.DataError):
            raise
        tables = " or ".join(
            f"{query.rows.ids.table}.{query.rows.ids.id_column} = "
            f"{-part.high if query.rows.negative else part.high}"
            for query in part.queries
        )
        reason = excerpt(error.__cause__.diag.message_primary or "")
        return SkippedId(part.stream.name, tables, reason)
    return None


def _query(
    connection: Connection, conninfo: Mapping[str, Any], part: Part
) -> Iterator[pa.RecordBatch]:
    import adbc_driver_manager

    last = (-1, -1)
    options = {"adbc.postgresql.batch_size_hint_bytes": str(_BATCH_BYTES)}
    failures = adbc_driver_manager.Error, pa.ArrowException, OSError
    with closing(connection.cursor()) as cursor:
        try:
            with connections.explained(conninfo, failures):
                settings = settings_sql(READ_TIMEOUT, walk_indexes=part.walks_indexes)
                cursor.execute(settings)
                cursor.fetchall()
                cursor.adbc_statement.set_options(**options)
                cursor.execute(range_sql(part))
                for batch in cursor.fetch_record_batch():
                    if batch.num_rows:
                        rows = _numbered(batch, last, part)
                        last = _last_of(rows)
                        yield rows
        finally:
            cursor.adbc_cancel()
            connection.rollback()


def _numbered(
    batch: pa.RecordBatch, last: tuple[int, int], part: Part
) -> pa.RecordBatch:
    """Return the rows of a batch with their indexes among the rows of their token.

    :param last: the token and the index of the row before the batch.
    """
    tokens, *others = batch.columns
    ids = tokens.to_numpy(zero_copy_only=False)
    positions = np.arange(len(ids))
    begins = np.concatenate(([True], ids[1:] != ids[:-1]))
    index = positions - np.maximum.accumulate(np.where(begins, positions, 0))
    index[ids == last[0]] += last[1] + 1
    schema = pa.schema([*KEY_COLUMNS, *(column.arrow for column in part.columns)])
    columns = [
        values.cast(field.type)
        for values, field in zip(
            [tokens, pa.array(index), *others], schema, strict=True
        )
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _last_of(rows: pa.RecordBatch) -> tuple[int, int]:
    """Return the token and the index of the last row."""
    return rows.column(0)[-1].as_py(), rows.column(1)[-1].as_py()
