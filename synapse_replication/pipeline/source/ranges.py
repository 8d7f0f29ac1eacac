"""SQL queries that read a span of a stream: raw columns, cast to their types.

The functions only build text. Numbers are inserted unchanged; names of writers, which
come from a database or a configuration, are quoted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from synapse_replication.pipeline.source.catalog import CatalogStream
from synapse_replication.pipeline.source.offsets import Span
from synapse_replication.pipeline.tables import KIND, Column
from synapse_replication.storage.queries import identifier, literal
from synapse_replication.storage.row_queries import RowQuery

_SQL_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "string": "text",
        "bigint": "bigint",
        "double": "double precision",
        "boolean": "boolean",
        "strings": "text[]",
        # In µs since 1970, like the time of writing.
        "time": "bigint",
        "json": "text",
    }
)


@attrs.frozen
class Present:
    """The parts of a stream's schema that the database has.

    An older database may lack some of them.

    :ivar tables: the existing tables.
    :ivar written: the tables with a column for the time of writing.
    :ivar by_id: the tables with an index that begins with the id.
    :ivar by_writer: the other tables that have an index on writer and id. Their writers
        are looked up before a read, so that the read knows all of them.
    :ivar joinable: the tables of details (further columns of the stream's rows) that
        have a unique index on their key.
    """

    tables: frozenset[str]
    written: frozenset[str]
    by_id: frozenset[str]
    by_writer: frozenset[str]
    joinable: frozenset[str] = frozenset()


def range_sql(
    stream: CatalogStream,
    span: Span,
    present: Present,
    sole_writer: str,
    *,
    with_columns: bool = True,
    join_details: bool = False,
) -> str:
    """Return the query for the rows of a span.

    The columns are ``stream_id``, ``instance_name``, ``written_us`` (µs since 1970) and
    the columns of the stream's table. Rows are ordered by token, then by query, then by
    column values, so that every read returns them in the same order.

    :param sole_writer: the writer of rows that do not record their writer.
    :param with_columns: whether to read columns other than the first three.
    :param join_details: whether to join the details of each query whose detail tables
        are all in ``present.joinable``. Other details are looked up row by row.
    """
    columns = stream.table.columns if with_columns else ()
    names = "".join(f", {identifier(column.name)}" for column in columns)
    plain: list[str] = []
    distinct: list[str] = []
    for query_index, query in enumerate(stream.queries):
        if query.range.table not in present.tables:
            continue
        condition = _condition(query, span, present)
        if condition is None:
            continue
        of_query = stream.table.columns if with_columns or query.distinct else ()
        select = _select(stream, query, of_query, present, sole_writer, query_index)
        if of_query:
            select += f" {_details(query, present, join_details=join_details)}"
        select += f" WHERE {condition}"
        # If each query is sorted by the index, the final sort is incremental.
        if not query.range.negative and not join_details:
            select += f" ORDER BY {_column(query, query.range.id_column)}"
        (distinct if query.distinct else plain).append(select)
    if distinct:
        found = "\nUNION ALL\n".join(f"({select})" for select in distinct)
        grouped = "".join(
            f", {identifier(column.name)}" for column in stream.table.columns
        )
        plain.append(
            "SELECT stream_id, instance_name, min(written_us) AS written_us, "
            f"min(query_index) AS query_index{names} FROM ({found}) AS found "
            f"GROUP BY stream_id, instance_name{grouped} ORDER BY stream_id"
        )
    if not plain:
        nothing = "".join(f", {_typed('NULL', column)}" for column in columns)
        return (
            "SELECT NULL::bigint AS stream_id, NULL::text AS instance_name, "
            f"NULL::bigint AS written_us{nothing} WHERE FALSE"
        )
    rows = "\nUNION ALL\n".join(f"({select})" for select in plain)
    order = "".join(f", {_sort_key(column)}" for column in columns)
    return (
        f"SELECT stream_id, instance_name, written_us{names} FROM ({rows}) AS rows "
        f"ORDER BY stream_id, query_index{order}"
    )


def _select(
    stream: CatalogStream,
    query: RowQuery,
    columns: Sequence[Column],
    present: Present,
    sole_writer: str,
    query_index: int,
) -> str:
    range_ = query.range
    sign = "-" if range_.negative else ""
    if range_.writer_column is None:
        writer = f"{literal(sole_writer)}::text"
    else:
        writer = (
            f"coalesce({_column(query, range_.writer_column)}, {literal(sole_writer)})"
        )
    written = "NULL::bigint"
    if range_.written_ms is not None and range_.table in present.written:
        written = f"{_column(query, range_.written_ms)} * 1000"
    found = dict(
        zip(dict(stream.table.kinds)[range_.kind], range_.columns, strict=True)
    )
    if range_.kind is not None:
        found[KIND] = literal(range_.kind)
    values = "".join(
        f", {_typed(found.get(column.name, 'NULL'), column)}" for column in columns
    )
    return (
        f"SELECT {sign}{_column(query, range_.id_column)}::bigint AS stream_id, "
        f"{writer} AS instance_name, {written} AS written_us, "
        f"{query_index} AS query_index{values} "
        f"FROM {identifier(range_.table)} AS {range_.alias} {range_.joined}"
    )


def _details(query: RowQuery, present: Present, *, join_details: bool) -> str:
    details = query.range.details
    joins = join_details and all(detail.table in present.joinable for detail in details)
    return " ".join(detail.join if joins else detail.lookup for detail in details)


def _typed(expression: str, column: Column) -> str:
    if column.type == "time":
        expression = f"({expression})::bigint * 1000"
    return f"({expression})::{_SQL_TYPES[column.type]} AS {identifier(column.name)}"


def _sort_key(column: Column) -> str:
    name = identifier(column.name)
    if column.type == "strings":
        name += "::text"
    elif column.type not in ("string", "json"):
        return name
    return f'{name} COLLATE "C"'


def _column(query: RowQuery, column: str) -> str:
    return f"{query.range.alias}.{identifier(column)}"


def _condition(query: RowQuery, span: Span, present: Present) -> str | None:
    """Return the condition for a span; ``None`` if no row can satisfy it."""
    range_ = query.range
    id_ = _column(query, range_.id_column)
    if range_.negative:
        bounds = f"{id_} < {-span.low} AND {id_} >= {-span.high}"
    else:
        bounds = f"{id_} > {span.low} AND {id_} <= {span.high}"
    if range_.writer_column is None:
        return bounds if span.nameless else None
    writer = _column(query, range_.writer_column)
    # All writers in a table with an index by writer are known: they were looked up.
    walks_writers = range_.table in present.by_writer
    excluded = [w for w in span.known if w not in span.writers]
    writer_conditions: list[str] = []
    if span.others and not walks_writers:
        if span.nameless and not excluded:
            return bounds
        writer_conditions.append(
            f"NOT {_is_one_of(writer, excluded)}"
            if excluded
            else f"{writer} IS NOT NULL"
        )
    elif span.writers:
        writer_conditions.append(_is_one_of(writer, span.writers))
    if span.nameless and not walks_writers:
        writer_conditions.append(f"{writer} IS NULL")
    if not writer_conditions:
        return None
    return f"{bounds} AND ({' OR '.join(writer_conditions)})"


def _is_one_of(column: str, writers: Collection[str]) -> str:
    return f"{column} IN ({', '.join(map(literal, writers))})"


def ids_sql(
    query: RowQuery,
    span: Span,
    present: Present,
    *,
    limit: int | None = None,
    last: bool = False,
) -> str | None:
    """Return the query for the tokens of a span in one table, in order.

    The query returns at most ``limit`` tokens. If the table has an index on the id, the
    server can scan this index, and stop after ``limit`` tokens.

    :param last: whether to return the greatest token first.
    :return: the query; ``None`` if no row of the table can be in the span.
    """
    condition = _condition(query, span, present)
    if condition is None:
        return None
    range_ = query.range
    id_ = _column(query, range_.id_column)
    sign = "-" if range_.negative else ""
    order = "DESC" if last is not range_.negative else "ASC"
    sql = (
        f"SELECT {sign}{id_}::bigint AS stream_id FROM {identifier(range_.table)} "
        f"AS {range_.alias} WHERE {condition} ORDER BY {id_} {order}"
    )
    return sql if limit is None else f"{sql} LIMIT {limit}"
