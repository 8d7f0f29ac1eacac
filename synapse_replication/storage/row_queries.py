"""Queries for the rows of a stream, as facts: text and its meaning, no driver.

Pages of catch-up are read by them, and the ranges of the pipeline.
"""

from __future__ import annotations

from typing import Any

import attrs

from synapse_replication.storage.queries import identifier
from synapse_replication.streams.table import TableStream

__all__ = ["Detail", "RangeQuery", "RowQuery", "declared_query"]


@attrs.frozen
class Detail:
    """A column of another table, of which a row has one value or none.

    :ivar alias: what the expressions call the table.
    :ivar table: has one row for a key at most.
    :ivar key: the column of the key, by the same name here and there.
    :ivar of: the alias of the table that the key is looked up for.
    """

    alias: str
    table: str
    column: str
    key: str = "event_id"
    of: str = "e"

    @property
    def lookup(self) -> str:
        """A join that looks up each row: best for few rows.

        As a plain join, a database with some 100,000 rows would rather read all of a
        table for each page.
        """
        return (
            f"LEFT JOIN LATERAL (SELECT {self.column} FROM {self.table} "
            f"WHERE {self.key} = {self.of}.{self.key} LIMIT 1) AS {self.alias} ON TRUE"
        )

    @property
    def join(self) -> str:
        """A join that the server may do as it likes: best for many rows."""
        return (
            f"LEFT JOIN {self.table} AS {self.alias} "
            f"ON {self.alias}.{self.key} = {self.of}.{self.key}"
        )


@attrs.frozen(kw_only=True)
class RangeQuery:
    """The parts of a query for all rows between two ids, of any writers.

    :ivar table: the table with the ids.
    :ivar alias: what the expressions call it.
    :ivar joined: what is joined to it to find its rows, with ``JOIN`` in front.
    :ivar details: what is looked up for the columns alone.
    :ivar id_column: the ids, below zero if ``negative``.
    :ivar writer_column: the writers; ``None`` if the table does not tell.
    :ivar columns: an expression for each place of a row, in order.
    :ivar kind: of a stream with several kinds of rows, the kind of these.
    :ivar written_ms: the column with the time of writing, ms since the epoch;
        ``None`` if the table has none. Older databases are without some of them.
    :ivar negative: ids count down.
    """

    table: str
    alias: str
    joined: str = ""
    details: tuple[Detail, ...] = ()
    id_column: str
    writer_column: str | None
    columns: tuple[str, ...]
    kind: str | None = None
    written_ms: str | None = None
    negative: bool = False

    @property
    def row(self) -> str:
        """An expression for the row, JSON text. Wants :attr:`details` joined."""
        row = f"json_build_array({', '.join(self.columns)})"
        if self.kind is not None:
            row = f"json_build_array('{self.kind}', {row})"
        return f"{row}::text"


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
            columns=tuple(
                # A column without a type is any value: JSON text.
                f"to_json({identifier(name)})" if type_ is Any else identifier(name)
                for name, type_ in declaration.columns
            ),
            negative=declaration.negative,
        ),
        as_json=True,
    )
