"""The SQL that reads a span of a stream, for COPY and for JDBC alike.

Pure text. Numbers are put in as they are; names of writers, which come from a
database or a configuration, are quoted.
"""

from __future__ import annotations

from collections.abc import Collection

import attrs

from synapse_replication.pipeline.source.catalog import CatalogQuery, CatalogStream
from synapse_replication.pipeline.source.offsets import Span
from synapse_replication.storage.queries import identifier, literal

__all__ = ["Present", "ids_sql", "range_sql"]


@attrs.frozen
class Present:
    """What a database has of a stream: older ones are without some of it.

    :ivar tables: the tables.
    :ivar written: those of them with the column for the time of writing.
    :ivar by_id: those of them with an index that begins with the id.
    :ivar by_writer: those of the others with one that begins with writer and id;
        their writers are looked up first, so that all are known.
    """

    tables: frozenset[str]
    written: frozenset[str]
    by_id: frozenset[str]
    by_writer: frozenset[str]


def range_sql(
    stream: CatalogStream, span: Span, present: Present, sole_writer: str
) -> str:
    """Write the query for the rows of a span.

    Its columns are ``instance_name``, ``stream_id``, ``row_index``, ``row`` and
    ``written_us`` (µs since the epoch). Rows are in the order of their tokens; those
    of one token are in the order of the queries, then of their text, so that each
    reading gives them the same places.

    :param sole_writer: the writer of rows that do not tell theirs.
    """
    plain: list[str] = []
    distinct: list[str] = []
    for place, query in enumerate(stream.queries):
        if query.range.table not in present.tables:
            continue
        condition = _condition(query, span, present)
        if condition is None:
            continue
        select = _select(query, place, condition, present, sole_writer)
        (distinct if query.distinct else plain).append(select)
    if distinct:
        rows = "\nUNION ALL\n".join(f"({select})" for select in distinct)
        plain.append(
            "SELECT instance_name, stream_id, min(place) AS place, row, "
            f"min(written_us) AS written_us FROM ({rows}) AS found "
            "GROUP BY stream_id, instance_name, row ORDER BY stream_id"
        )
    if not plain:
        return (
            "SELECT NULL::text AS instance_name, NULL::bigint AS stream_id, "
            "NULL::int AS row_index, NULL::text AS row, NULL::bigint AS written_us "
            "WHERE FALSE"
        )
    rows = "\nUNION ALL\n".join(f"({select})" for select in plain)
    return (
        "SELECT instance_name, stream_id, (row_number() OVER ("
        'PARTITION BY stream_id ORDER BY place, row COLLATE "C") - 1)::int '
        f"AS row_index, row, written_us FROM ({rows}) AS rows"
    )


def _select(
    query: CatalogQuery, place: int, condition: str, present: Present, sole_writer: str
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
    # Read in the order of the index, rows need no more than a little sorting.
    order = "" if range_.negative else f" ORDER BY {_column(query, range_.id_column)}"
    return (
        f"SELECT {writer} AS instance_name, "
        f"{sign}{_column(query, range_.id_column)}::bigint AS stream_id, "
        f"{place} AS place, {range_.row} AS row, {written} AS written_us "
        f"FROM {identifier(range_.table)} AS {range_.alias} {range_.joined} "
        f"WHERE {condition}{order}"
    )


def _column(query: CatalogQuery, column: str) -> str:
    return f"{query.range.alias}.{identifier(column)}"


def _condition(query: CatalogQuery, span: Span, present: Present) -> str | None:
    """Write what rows of the table are in the span; ``None`` if none can be."""
    range_ = query.range
    id_ = _column(query, range_.id_column)
    if range_.negative:
        bounds = f"{id_} < {-span.low} AND {id_} >= {-span.high}"
    else:
        bounds = f"{id_} > {span.low} AND {id_} <= {span.high}"
    if range_.writer_column is None:
        return bounds if span.nameless else None
    writer = _column(query, range_.writer_column)
    # Where the index begins with the writer, all of them were looked up.
    walks_writers = range_.table in present.by_writer
    excluded = [w for w in span.known if w not in span.writers]
    of_whom: list[str] = []
    if span.others and not walks_writers:
        if span.nameless and not excluded:
            return bounds
        of_whom.append(
            f"NOT {_is_one_of(writer, excluded)}"
            if excluded
            else f"{writer} IS NOT NULL"
        )
    elif span.writers:
        of_whom.append(_is_one_of(writer, span.writers))
    if span.nameless and not walks_writers:
        of_whom.append(f"{writer} IS NULL")
    return f"{bounds} AND ({' OR '.join(of_whom)})" if of_whom else None


def _is_one_of(column: str, writers: Collection[str]) -> str:
    return f"{column} IN ({', '.join(map(literal, writers))})"


def ids_sql(
    query: CatalogQuery,
    span: Span,
    present: Present,
    *,
    limit: int | None = None,
    last: bool = False,
) -> str | None:
    """Write the query for the tokens of a span in one table, in order.

    It walks the index of ids and stops after ``limit`` rows.

    :param last: the greatest first.
    :return: ``None`` if no row of the table can be in the span.
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
