"""Queries for the rows of a stream, as facts: text and its meaning, no driver.

What pages of catch-up are read by; the pipeline reads ranges by them. Spec, sections
1, 7 and 9.
"""

from __future__ import annotations

import attrs

from synapse_replication.storage.queries import identifier
from synapse_replication.streams.table import TableStream

__all__ = ["RangeQuery", "RowQuery", "declared_query"]


@attrs.frozen(kw_only=True)
class RangeQuery:
    """The parts of a query for all rows between two ids, of any writers.

    :ivar table: the table with the ids.
    :ivar alias: what the expressions call it.
    :ivar joined: what is joined to it for the row, with ``JOIN`` in front.
    :ivar id_column: the ids, below zero if ``negative``.
    :ivar writer_column: the writers; ``None`` if the table does not tell.
    :ivar row: an expression for the row, JSON text.
    :ivar written_ms: the column with the time of writing, ms since the epoch;
        ``None`` if the table has none. Older databases are without some of them.
    :ivar negative: ids count down.
    """

    table: str
    alias: str
    joined: str = ""
    id_column: str
    writer_column: str | None
    row: str
    written_ms: str | None = None
    negative: bool = False


@attrs.frozen
class RowQuery:
    """A query for the rows of a stream, or for some of them.

    :ivar sql: with the named parameters ``instance_name``, ``after`` (open),
        ``up_to`` (closed) and ``limit``.
    :ivar range: the same without a limit, for readers of history.
    :ivar distinct: its table has several rows for one row of the stream.
    :ivar as_json: a record is a token and JSON text, a whole row, or ``NULL`` for
        none; else a token and the places of a row, which the driver has made values
        that JSON can say.
    """

    sql: str
    range: RangeQuery
    distinct: bool = False
    as_json: bool = False


def declared_query(declaration: TableStream) -> RowQuery:
    """Write the query for the rows of a declared stream."""
    id_column = identifier(declaration.id_column)
    columns = ", ".join(map(identifier, declaration.column_names))
    if declaration.negative:
        token, order = f"-{id_column}", f"{id_column} DESC"
        bounds = f"{id_column} < -%(after)s AND {id_column} >= -%(up_to)s"
    else:
        token, order = id_column, id_column
        bounds = f"{id_column} > %(after)s AND {id_column} <= %(up_to)s"
    if declaration.writer_column is None:
        writer = "TRUE"
    else:
        writer = f"{identifier(declaration.writer_column)} = %(instance_name)s"
    # As JSON, whatever the types of the columns: a time or a number without limit
    # has no other form that every peer reads.
    return RowQuery(
        f"""
        SELECT {token}, json_build_array({columns})::text
        FROM {identifier(declaration.table)}
        WHERE {writer} AND {bounds}
        ORDER BY {order}
        FETCH FIRST %(limit)s ROWS WITH TIES
        """,
        RangeQuery(
            table=declaration.table,
            alias="kept",
            id_column=declaration.id_column,
            writer_column=declaration.writer_column,
            row=f"json_build_array({columns})::text",
            negative=declaration.negative,
        ),
        as_json=True,
    )
