"""Query for the rows of a table, of all writers, between two tokens of its stream."""

from __future__ import annotations

from synapse_replication.storage.database import Transaction
from synapse_replication.storage.queries import identifier
from synapse_replication.storage.row_queries import RowQueryParts
from synapse_replication.streams.between import PositionedRow, RowsBetween
from synapse_replication.streams.rows import RowCodec
from synapse_replication.streams.tokens import (
    MultiWriterStreamToken,
    PersistedPosition,
    SqlBounds,
    rows_between,
)


def read_rows_between(
    txn: Transaction,
    query: RowQueryParts,
    codec: RowCodec[object],
    writer: str,
    low: MultiWriterStreamToken,
    high: MultiWriterStreamToken,
    limit: int,
) -> RowsBetween:
    """Read one page of rows; call it in a database thread.

    :param txn: the cursor of the transaction.
    :param writer: the only writer of a table without a writer column.
    :param low: exclusive lower bound.
    :param high: inclusive upper bound.
    :param limit: the maximum number of rows; a number below 1 counts as 1. The page
        may exceed the limit, because all rows of its last id are returned.
    """
    limit = max(limit, 1)
    id_ = f"{query.alias}.{identifier(query.id_column)}"
    token = f"(-{id_})" if query.negative else id_
    writer_column = "%s"
    names: tuple[str, ...] = (writer,)
    if query.writer_column is not None:
        writer_column, names = f"{query.alias}.{identifier(query.writer_column)}", ()
        bounds = rows_between(low, high, id_column=token, writer_column=writer_column)
    else:
        positions = [each.get_stream_pos_for_instance(writer) for each in (low, high)]
        bounds = SqlBounds(f"{token} > %s AND {token} <= %s", tuple(positions))
    # The index is on the column, not on its negation: add bounds on the column itself.
    index = f"{id_} < %s AND {id_} >= %s AND " if query.negative else ""
    index_bounds = (-low.stream, -high.get_max_stream_pos()) if query.negative else ()
    txn.execute(
        f"SELECT {token}, {writer_column}, {query.row_expression} "
        f"FROM {identifier(query.table)} AS {query.alias} {query.joined} "
        f"WHERE {index}{bounds.sql} "
        f"ORDER BY {token} FETCH FIRST %s ROWS WITH TIES",
        (*names, *index_bounds, *bounds.parameters, limit),
    )
    records = txn.fetchall()
    rows = codec.decode([text for _, _, text in records]).rows
    positioned = [
        PositionedRow(PersistedPosition(name, position), row)
        for (position, name, _), row in zip(records, rows, strict=True)
    ]
    if len(records) < limit:
        return RowsBetween(positioned, high, False)
    upto = low.after_partial_read(high, records[-1][0])
    return RowsBetween(positioned, upto, upto != high)
