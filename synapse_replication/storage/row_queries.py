"""Descriptions of the queries for a stream's rows.

A catch-up reads pages of rows with them, and the pipeline reads ranges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from synapse_replication.storage.queries import id_expressions, identifier

if TYPE_CHECKING:
    from synapse_replication.streams.table import TableStream


class Detail(Struct, frozen=True):
    """A column that is joined from a further table, with at most one value per row.

    :ivar alias: the further table's alias in expressions.
    :ivar table: the further table, which has at most one row per key.
    :ivar column: the column to read from it.
    :ivar key: the key column, which has the same name in both tables.
    :ivar of: the alias of the table whose rows the column is joined to.
    """

    alias: str
    table: str
    column: str
    key: str = "event_id"
    of: str = "e"

    @property
    def lookup(self) -> str:
        """A lateral join, which looks up each row by its key: best for few rows.

        With a plain join, PostgreSQL would scan a table of, for instance, 100,000 rows
        for each page.
        """
        return (
            f"LEFT JOIN LATERAL (SELECT {self.column} FROM {self.table} "
            f"WHERE {self.key} = {self.of}.{self.key} LIMIT 1) AS {self.alias} ON TRUE"
        )

    @property
    def join(self) -> str:
        """A plain join, which the planner may optimise: best for many rows."""
        return (
            f"LEFT JOIN {self.table} AS {self.alias} "
            f"ON {self.alias}.{self.key} = {self.of}.{self.key}"
        )


class RangeQuery(Struct, frozen=True, kw_only=True):
    """The parts of a query for all rows between two ids, of all writers.

    :ivar table: the table with the ids.
    :ivar alias: the table's alias in expressions.
    :ivar joined: a ``JOIN`` clause that is needed to find the rows.
    :ivar details: further joins that only the columns need.
    :ivar id_column: the column with the ids, which are negative if ``negative``.
    :ivar writer_column: the column with the writers; ``None`` if the table has none.
    :ivar columns: an expression for each element of a row, in order.
    :ivar kind: the kind of these rows, if the stream has several kinds of rows.
    :ivar written_ms: the column with the time of writing, in ms since 1970; ``None`` if
        the table has none. The column may be missing in an older database.
    :ivar negative: whether ids count down.
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
        """An expression for the row as JSON text. Needs the :attr:`details` joins."""
        row = f"json_build_array({', '.join(self.columns)})"
        if self.kind is not None:
            row = f"json_build_array('{self.kind}', {row})"
        return f"{row}::text"


class RowQuery(Struct, frozen=True):
    """A query for the rows of a stream, or for some of them.

    :ivar sql: the query, with the named parameters ``instance_name``, ``after``
        (exclusive), ``up_to`` (inclusive) and ``limit``.
    :ivar range: the parts of a query for the same rows, but of all writers and without
        a limit.
    :ivar distinct: whether the table may have several rows for one row of the stream.
    :ivar as_json: if true, a record is a token and the row as JSON text; the text is
        ``NULL`` if the event that the row describes was deleted. If false, a record is
        a token and the elements of the row, which psycopg2 converted to values that
        JSON can represent.
    """

    sql: str
    range: RangeQuery
    distinct: bool = False
    as_json: bool = False


def declared_query(declaration: TableStream) -> RowQuery:
    """Return the query for the rows of a declared stream."""
    id_column = identifier(declaration.id_column)
    columns = ", ".join(map(identifier, declaration.column_names))
    token, order, bounds = id_expressions(id_column, declaration.negative)
    if declaration.writer_column is None:
        writer = "TRUE"
    else:
        writer = f"{identifier(declaration.writer_column)} = %(instance_name)s"
    # PostgreSQL encodes the row as JSON, since a timestamp or a numeric column has no
    # other representation that every peer can read.
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
            alias="source",
            id_column=declaration.id_column,
            writer_column=declaration.writer_column,
            columns=tuple(
                # A column without a declared type may have any value, so it is encoded
                # as JSON.
                f"to_json({identifier(name)})" if type_ is Any else identifier(name)
                for name, type_ in declaration.columns
            ),
            negative=declaration.negative,
        ),
        as_json=True,
    )
