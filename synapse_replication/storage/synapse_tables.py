"""Queries for the rows of Synapse's standard streams in Synapse's tables.

Each query returns one writer's rows in ``(%(after)s, %(up_to)s]``, in ascending order
of token, and stops after ``%(limit)s`` rows but never within a token (``WITH TIES``).
A query reads an index that begins with the id. Synapse's three tables of account data
are the exception: they have no such index, and no names of writers, so a query returns
the rows of all writers.

The queries were derived from the tables and the traffic of a deployment, and their
results were compared with the traffic row by row. Some tables store only the newest row
of an object (presence, receipts, account data, ...). Replaced rows are not found, and
are not needed, because the newest row contains the complete state. Rows of deleted data
(purged rooms, deactivated users, redacted relations) are not found, either.

Streams held in memory (``typing``, ``federation``, ``presence_federation``) have no
tables: readers request their rows from the writers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec.structs import replace

from synapse_replication.storage.queries import id_expressions
from synapse_replication.storage.row_queries import (
    LookupJoin,
    RowQuery,
    RowQueryParts,
    query_of_one_table,
)
from synapse_replication.streams.standard.registry import (
    STANDARD_STREAMS,
    RowTable,
    StandardStream,
)

# Converts a column, whether an array or JSON, to an array of texts.
_LIST = (
    "CASE jsonb_typeof(to_jsonb({0})) WHEN 'array' "
    "THEN ARRAY(SELECT jsonb_array_elements_text(to_jsonb({0}))) END"
)

#: The tables with ids of events. The database does not store when an event stops being
#: an outlier.
_EVENT_TABLES = frozenset({"events", "ex_outlier_stream"})
_OF_EVENT = "event_id, room_id, type, outlier"

_ABOUT_EVENT = (
    LookupJoin("s", "state_events", "state_key"),
    LookupJoin("r", "redactions", "redacts"),
    LookupJoin("l", "event_relations", "relates_to_id"),
    LookupJoin("m", "room_memberships", "membership"),
    LookupJoin("x", "rejections", "event_id"),
)


#: For a table other than ``events``: its alias, the column that identifies the event,
#: and the join with ``events``.
_JOINED_EVENT = (
    "page",
    "event_id",
    f"""JOIN LATERAL (
            SELECT {_OF_EVENT} FROM events WHERE event_id = page.event_id LIMIT 1
        ) AS e ON TRUE""",
)


def _event_query(parts: RowQueryParts) -> RowQuery:
    """Return a query that selects a page of event ids, then joins the events' details.

    The record of a deleted event has ``NULL`` instead of a row, so that the end of the
    page is known nevertheless.

    :param parts: a table with ``event_id``, ``instance_name`` and the id column.
    """
    token, order, bounds = id_expressions(parts.id_column, parts.negative)
    alias, event_columns, event = "e", _OF_EVENT, ""
    if parts.table != "events":
        alias, event_columns, event = _JOINED_EVENT
    parts = replace(parts, alias=alias, joined=event, details=_ABOUT_EVENT)
    return RowQuery(
        f"""
        SELECT {alias}.token,
            CASE WHEN e.event_id IS NOT NULL THEN {parts.row_expression} END
        FROM (
            SELECT {token} AS token, {event_columns}
            FROM {parts.table}
            WHERE instance_name = %(instance_name)s AND {bounds}
            ORDER BY {order}
            FETCH FIRST %(limit)s ROWS WITH TIES
        ) AS {alias}
        {event and "LEFT " + event}
        {" ".join(detail.lookup for detail in _ABOUT_EVENT)}
        ORDER BY {alias}.token
        """,
        parts,
    )


def _query_of(stream: StandardStream, table: RowTable) -> RowQuery:
    parts = RowQueryParts(
        table=table.ids.table,
        alias="source",
        id_column=table.ids.id_column,
        writer_column=table.ids.writer_column,
        columns=tuple(map(_expression, table.columns)),
        kind=table.kind,
        written_ms_column=table.written_ms,
        negative=stream.negative,
    )
    if parts.table in _EVENT_TABLES:
        return _event_query(parts)
    return query_of_one_table(parts, distinct=table.distinct)


def _expression(column: str) -> str:
    name = column.removesuffix("[]")
    return column if name == column else _LIST.format(name)


#: The queries for a stream's rows by its name on the wire. Within a token, the rows of
#: an earlier query come first.
STANDARD_QUERIES: Mapping[str, tuple[RowQuery, ...]] = MappingProxyType(
    {
        stream.name: tuple(
            _query_of(stream, table) for table in stream.tables if table.columns
        )
        for stream in STANDARD_STREAMS.values()
        if stream.tables
    }
)
