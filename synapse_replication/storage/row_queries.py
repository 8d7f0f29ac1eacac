"""The statements that read a stream's rows, and write those of declared streams.

A catch-up reads pages of rows (:attr:`RowQuery.sql`): each statement returns one
writer's rows in ``(%(after)s, %(up_to)s]``, in ascending order of token, and stops
after ``%(limit)s`` rows but never within a token (``WITH TIES``). A page of a declared
stream, whose rows may be large, is also bounded in bytes; the rows of the standard
streams are small. The pipeline reads ranges of the same rows, of all writers, with
statements of its own that it builds from a :class:`RowQuery`.

A query reads an index that begins with the id. Synapse's three tables of account data
are the exception: they have no such index, and no names of writers, so a query returns
the rows of all writers.

The queries of Synapse's standard streams were derived from the tables and the traffic
of a deployment, and their results were compared with the traffic row by row. Some
tables store only the newest row of an object (presence, receipts, account data, ...).
Replaced rows are not found, and are not needed, because the newest row contains the
complete state. Rows of deleted data (purged rooms, deactivated users, redacted
relations) are not found, either.

Streams held in memory (``typing``, ``federation``, ``presence_federation``) have no
tables: readers request their rows from the writers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from synapse_replication.storage.queries import id_expressions, identifier
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.pages import PAGE_BYTES
from synapse_replication.streams.standard.registry import (
    STANDARD_STREAMS,
    RowTable,
    StandardStream,
)
from synapse_replication.streams.table import TableStream


@attrs.frozen
class LookupJoin:
    """A column about an event that is joined from a further table.

    :ivar alias: the further table's alias in expressions.
    :ivar table: the further table, which has at most one row per event.
    :ivar column: the column to read from it.
    """

    alias: str
    table: str
    column: str

    @property
    def lookup(self) -> str:
        """A lateral join, which looks up each row by its key: best for few rows.

        With a plain join, PostgreSQL would scan a table of, for instance, 100,000 rows
        for each page.
        """
        return (
            f"LEFT JOIN LATERAL (SELECT {self.column} FROM {self.table} "
            f"WHERE event_id = e.event_id LIMIT 1) AS {self.alias} ON TRUE"
        )

    @property
    def join(self) -> str:
        """A plain join, which the planner may optimise: best for many rows."""
        return (
            f"LEFT JOIN {self.table} AS {self.alias} "
            f"ON {self.alias}.event_id = e.event_id"
        )


# Its hash, of many texts, is the key of the statements that were made.
@attrs.frozen(kw_only=True, cache_hash=True)
class RowQuery:
    """A query for the rows of a stream, or for some of them.

    :ivar ids: the table, and its columns with the ids and the writers.
    :ivar alias: the table's alias in expressions.
    :ivar joined: a ``JOIN`` clause that is needed to find the rows.
    :ivar details: further joins that only the columns need.
    :ivar columns: an expression for each element of a row, in order.
    :ivar kind: the kind of these rows, if the stream has several kinds of rows.
    :ivar written_ms_column: the column with the time of writing, in ms since 1970;
        ``None`` if the table has none. An older database may lack the column.
    :ivar negative: whether ids are negative and count down.
    :ivar distinct: whether the table may have several rows for one row of the stream.
    :ivar sizes: expressions whose sum is the approximate size of a row as JSON text, in
        bytes; empty if rows are never large.
    """

    ids: IdColumn
    alias: str = "source"
    joined: str = ""
    details: tuple[LookupJoin, ...] = ()
    columns: tuple[str, ...]
    kind: str | None = None
    written_ms_column: str | None = None
    negative: bool = False
    distinct: bool = False
    sizes: tuple[str, ...] = ()

    @property
    def sql(self) -> str:
        """The statement for a page of one writer's rows.

        It has the named parameters ``instance_name``, ``after`` (exclusive), ``up_to``
        (inclusive) and ``limit``. A record is a token and the row as JSON text; the
        text is ``NULL`` if the event that the row describes was deleted, or if the page
        has no room for the row: see :func:`page_sql`.
        """
        return _statement(self, large=False)

    @property
    def sql_of_large_rows(self) -> str:
        """The statement for a page with a row that :attr:`sql` returned as ``NULL``.

        It has the same parameters.
        """
        return _statement(self, large=True)

    @property
    def row_expression(self) -> str:
        """An expression for the row as JSON text. Needs the :attr:`details` joins."""
        row = f"json_build_array({', '.join(self.columns)})"
        if self.kind is not None:
            row = f"json_build_array('{self.kind}', {row})"
        return f"{row}::text"


@functools.cache
def _statement(query: RowQuery, *, large: bool) -> str:
    """Return the statement for a page; a process has few queries."""
    if query.details and not large:
        return _event_sql(query)
    return _table_sql(query, large=large)


def _table_sql(query: RowQuery, *, large: bool) -> str:
    """Return the statement for rows whose columns are all in one table."""
    ids = query.ids
    token, order, bounds = id_expressions(identifier(ids.id_column), query.negative)
    writer = "TRUE"
    if ids.writer_column is not None:
        writer = f"{identifier(ids.writer_column)} = %(instance_name)s"
    return page_sql(query, token, f"{writer} AND {bounds}", order, "%(limit)s", large)


def page_sql(
    query: RowQuery, outputs: str, condition: str, order: str, limit: str, large: bool
) -> str:
    """Return a statement for a page of rows of one table.

    PostgreSQL encodes the rows as JSON, since a timestamp or a numeric column has no
    other representation that every peer can read.

    If the query has :attr:`~RowQuery.sizes`, a row that exceeds its share of
    :data:`.PAGE_BYTES` is ``NULL``. To sum up sizes takes as long as to encode small
    rows, so it is left to a second statement.

    :param outputs: the expressions to select before the row.
    :param limit: the most rows: a number or a parameter.
    :param large: whether to return that second statement, for a page with large rows:
        the rows of the tokens that do not fit into the page are ``NULL``, except those
        of the first token. Large values that do not fit are not read.
    """
    table = f"{identifier(query.ids.table)} AS {query.alias} {query.joined}"
    page = f"""FROM {table}
        WHERE {condition}
        ORDER BY {order}
        FETCH FIRST {limit} ROWS WITH TIES"""
    row, size = query.row_expression, " + ".join(query.sizes)
    if not large:
        if size:
            row = f"CASE WHEN {size} <= {PAGE_BYTES} / {limit} THEN {row} END"
        return f"SELECT {outputs}, {row} {page}"
    id_ = f"{query.alias}.{identifier(query.ids.id_column)}"
    # No column of a declared stream has a name with a space.
    return f"""
        SELECT {outputs},
            CASE WHEN "page size" <= {PAGE_BYTES} OR {id_} = "page start"
            THEN {row} END
        FROM (
            SELECT *, sum({size}) OVER page AS "page size",
                first_value({id_}) OVER page AS "page start"
            FROM (SELECT {query.alias}.* {page}) AS {query.alias}
            WINDOW page AS (ORDER BY {order})
        ) AS {query.alias}
        ORDER BY {order}
        """


def _size(column: str, type_: Any) -> str | None:
    """Return an expression for the size of a column as text; ``None`` if it is small.

    It does not read a large text, which is stored outside of its row. Whether another
    value of more than 500 bytes is compressed is not known, so it is read.
    """
    if type_ in _SMALL_TYPES:
        return None
    size = f"octet_length({column}::text)"
    if type_ not in (str, str | None):
        stored = f"pg_column_size({column})"
        size = f"CASE WHEN {stored} > 500 THEN {size} ELSE {stored} END"
    return f"coalesce({size}, 0)"


_SMALL_TYPES = tuple(
    each for type_ in (int, float, bool) for each in (type_, type_ | None)
)


def declared_query(declaration: TableStream) -> RowQuery:
    """Return the query for the rows of a declared stream."""
    (ids,) = declaration.id_columns
    columns = tuple(
        # A column without a declared type may have any value, so it is encoded as JSON.
        f"to_json({identifier(name)})" if type_ is Any else identifier(name)
        for name, type_ in declaration.columns
    )
    sizes = (_size(identifier(name), type_) for name, type_ in declaration.columns)
    return RowQuery(
        ids=ids,
        columns=columns,
        negative=declaration.negative,
        sizes=tuple(size for size in sizes if size is not None),
    )


def insert_sql(ids: IdColumn, column_names: Iterable[str]) -> str:
    """Return the statement that inserts rows of a stream.

    Its named parameters are ``id``, ``instance_name`` (only if the table has a writer
    column) and ``rows`` (JSON text: an array of objects that map columns to values).

    :param ids: the table, and its columns with the ids and the writers.
    :param column_names: the columns of a row.
    """
    table = identifier(ids.table)
    columns = ", ".join(map(identifier, column_names))
    names, values = [identifier(ids.id_column)], ["%(id)s"]
    if ids.writer_column is not None:
        names.append(identifier(ids.writer_column))
        values.append("%(instance_name)s")
    # PostgreSQL converts JSON to the columns' types, including arrays and timestamps.
    return f"""
        INSERT INTO {table} ({", ".join(names)}, {columns})
        SELECT {", ".join(values)}, {columns}
        FROM jsonb_populate_recordset(NULL::{table}, %(rows)s::jsonb)
        """


# Converts a column, whether an array or JSON, to an array of texts.
_LIST = (
    "CASE jsonb_typeof(to_jsonb({0})) WHEN 'array' "
    "THEN ARRAY(SELECT jsonb_array_elements_text(to_jsonb({0}))) END"
)

#: The columns of an event. The database does not store when it stops being an outlier.
_OF_EVENT = "event_id, room_id, type, outlier"

_ABOUT_EVENT = (
    LookupJoin("s", "state_events", "state_key"),
    LookupJoin("r", "redactions", "redacts"),
    LookupJoin("l", "event_relations", "relates_to_id"),
    LookupJoin("m", "room_memberships", "membership"),
    LookupJoin("x", "rejections", "event_id"),
)


#: For a table other than ``events``: the join with it.
_JOINED_EVENT = f"""JOIN LATERAL (
            SELECT {_OF_EVENT} FROM events WHERE event_id = page.event_id LIMIT 1
        ) AS e ON TRUE"""


def _event_sql(query: RowQuery) -> str:
    """Return a statement that selects a page of event ids, then joins their details.

    The record of a deleted event has ``NULL`` instead of a row, so that the end of the
    page is known nevertheless. The table has the columns ``event_id`` and
    ``instance_name``.
    """
    token, order, bounds = id_expressions(query.ids.id_column, query.negative)
    event_columns = "event_id" if query.joined else _OF_EVENT
    return f"""
        SELECT {query.alias}.token,
            CASE WHEN e.event_id IS NOT NULL THEN {query.row_expression} END
        FROM (
            SELECT {token} AS token, {event_columns}
            FROM {query.ids.table}
            WHERE instance_name = %(instance_name)s AND {bounds}
            ORDER BY {order}
            FETCH FIRST %(limit)s ROWS WITH TIES
        ) AS {query.alias}
        {query.joined and "LEFT " + query.joined}
        {" ".join(detail.lookup for detail in query.details)}
        ORDER BY {query.alias}.token
        """


def _query_of(stream: StandardStream, table: RowTable) -> RowQuery:
    query = RowQuery(
        ids=table.ids,
        columns=tuple(map(_expression, table.columns)),
        kind=table.kind,
        written_ms_column=table.written_ms,
        negative=stream.negative,
        distinct=table.distinct,
    )
    if table.ids.table == "events":
        return attrs.evolve(query, alias="e", details=_ABOUT_EVENT)
    if table.ids.table == "ex_outlier_stream":
        return attrs.evolve(
            query, alias="page", joined=_JOINED_EVENT, details=_ABOUT_EVENT
        )
    return query


def _expression(column: str) -> str:
    name = column.removesuffix("[]")
    return column if name == column else _LIST.format(name)


#: The queries for the rows of Synapse's streams, by their names on the wire.
STANDARD_QUERIES: Mapping[str, tuple[RowQuery, ...]] = MappingProxyType(
    {
        stream.name: tuple(
            _query_of(stream, table) for table in stream.tables if table.columns
        )
        for stream in STANDARD_STREAMS.values()
        if stream.tables
    }
)


def queries_of(stream: StandardStream | TableStream) -> tuple[RowQuery, ...]:
    """Return the queries for a stream's rows; none if it has no tables.

    Within a token, the rows of an earlier query come first.
    """
    if isinstance(stream, TableStream):
        return (declared_query(stream),)
    return STANDARD_QUERIES.get(stream.name, ())
