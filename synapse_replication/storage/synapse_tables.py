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

from collections.abc import Collection, Mapping
from types import MappingProxyType

from synapse_replication.storage.queries import id_expressions
from synapse_replication.storage.row_queries import (
    Detail,
    RangeQuery,
    RowQuery,
    query_of_one_table,
)


def _query(
    columns: str,
    table: str,
    id_column: str = "stream_id",
    writer_column: str | None = "instance_name",
    *,
    distinct: bool = False,
    kind: str | None = None,
    lists: Collection[str] = (),
    written_ms: str | None = None,
) -> RowQuery:
    """Return the query for the rows of one table.

    :param distinct: whether the table may have several rows for one row of the stream.
    :param kind: the kind of the rows, if the stream has several; a row is then
        ``[kind, [columns]]``.
    :param lists: columns that contain a JSON list.
    :param written_ms: the column with the time of writing, ms since 1970.
    """
    return query_of_one_table(
        RangeQuery(
            table=table,
            alias="source",
            id_column=id_column,
            writer_column=writer_column,
            columns=tuple(
                _LIST.format(column) if column in lists else column
                for column in columns.split(", ")
            ),
            kind=kind,
            written_ms=written_ms,
        ),
        distinct=distinct,
    )


# Converts a column, whether an array or JSON, to an array of texts.
_LIST = (
    "CASE jsonb_typeof(to_jsonb({0})) WHEN 'array' "
    "THEN ARRAY(SELECT jsonb_array_elements_text(to_jsonb({0}))) END"
)

_BACKFILLED = "e.event_id, e.room_id, e.type, s.state_key, r.redacts, l.relates_to_id"
_EVENT = f"{_BACKFILLED}, m.membership, x.event_id IS NOT NULL, e.outlier"


_OF_EVENT = "event_id, room_id, type, outlier"

_ABOUT_EVENT = (
    Detail("s", "state_events", "state_key"),
    Detail("r", "redactions", "redacts"),
    Detail("l", "event_relations", "relates_to_id"),
    Detail("m", "room_memberships", "membership"),
    Detail("x", "rejections", "event_id"),
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


def _event_query(
    columns: str,
    table: str,
    id_column: str,
    *,
    kind: str | None = None,
    negative: bool = False,
) -> RowQuery:
    """Return a query that selects a page of event ids, then joins the events' details.

    The record of a deleted event has ``NULL`` instead of a row, so that the end of the
    page is known nevertheless.

    :param table: a table with ``event_id``, ``instance_name`` and the id column.
    """
    token, order, bounds = id_expressions(id_column, negative)
    is_events = table == "events"
    alias, event_columns, event = ("e", _OF_EVENT, "") if is_events else _JOINED_EVENT
    of = RangeQuery(
        table=table,
        alias=alias,
        joined=event,
        details=_ABOUT_EVENT,
        id_column=id_column,
        writer_column="instance_name",
        columns=tuple(columns.split(", ")),
        kind=kind,
        # The database does not store when an event stops being an outlier.
        written_ms="received_ts" if is_events else None,
        negative=negative,
    )
    return RowQuery(
        f"""
        SELECT {alias}.token, CASE WHEN e.event_id IS NOT NULL THEN {of.row} END
        FROM (
            SELECT {token} AS token, {event_columns}
            FROM {table}
            WHERE instance_name = %(instance_name)s AND {bounds}
            ORDER BY {order}
            FETCH FIRST %(limit)s ROWS WITH TIES
        ) AS {alias}
        {event and "LEFT " + event}
        {" ".join(detail.lookup for detail in _ABOUT_EVENT)}
        ORDER BY {alias}.token
        """,
        of,
    )


#: The queries for a stream's rows by its name on the wire. Within a token, the rows of
#: an earlier query come first.
STANDARD_QUERIES: Mapping[str, tuple[RowQuery, ...]] = MappingProxyType(
    {
        "events": (
            _event_query(_EVENT, "events", "stream_ordering", kind="ev"),
            _event_query(
                _EVENT, "ex_outlier_stream", "event_stream_ordering", kind="ev"
            ),
            _query(
                "room_id, type, state_key, event_id",
                "current_state_delta_stream",
                kind="state",
            ),
        ),
        "backfill": (
            _event_query(_BACKFILLED, "events", "stream_ordering", negative=True),
            _event_query(
                _BACKFILLED,
                "ex_outlier_stream",
                "event_stream_ordering",
                negative=True,
            ),
        ),
        "presence": (
            _query(
                "user_id, state, last_active_ts, last_federation_update_ts, "
                "last_user_sync_ts, status_msg, currently_active",
                "presence_stream",
            ),
        ),
        "receipts": (
            _query(
                "room_id, receipt_type, user_id, event_id, thread_id, data::json",
                "receipts_linearized",
            ),
        ),
        "push_rules": (_query("user_id", "push_rules_stream", distinct=True),),
        "pushers": (
            _query("user_name, app_id, pushkey, FALSE", "pushers", "id"),
            _query("user_id, app_id, pushkey, TRUE", "deleted_pushers"),
        ),
        "caches": (
            _query(
                "cache_func, keys, invalidation_ts",
                "cache_invalidation_stream_by_instance",
                written_ms="invalidation_ts",
            ),
        ),
        "device_lists": (
            _query("user_id, FALSE, FALSE", "device_lists_stream", distinct=True),
            # The changes above, and earlier changes of the same users, which
            # device_lists_stream no longer contains.
            _query(
                "user_id, FALSE, FALSE",
                "device_lists_changes_in_room",
                distinct=True,
                written_ms="inserted_ts",
            ),
            _query("from_user_id, TRUE, FALSE", "user_signature_stream"),
            _query(
                "user_id, FALSE, TRUE",
                "device_lists_outbound_pokes",
                distinct=True,
                written_ms="ts",
            ),
        ),
        "to_device": (
            _query("user_id", "device_inbox", distinct=True),
            _query(
                "destination",
                "device_federation_outbox",
                distinct=True,
                written_ms="queued_ts",
            ),
        ),
        # Synapse does not fill in the instance_name of these tables: with several
        # writers, each writer's query returns the rows of all of them.
        "account_data": (
            _query(
                "user_id, NULL, account_data_type",
                "account_data",
                writer_column=None,
            ),
            _query(
                "user_id, room_id, account_data_type",
                "room_account_data",
                writer_column=None,
            ),
            _query(
                "user_id, room_id, 'm.tag'",
                "room_tags_revisions",
                writer_column=None,
            ),
        ),
        "profile_updates": (
            _query(
                "user_id, action, affected_fields",
                "profile_updates",
                lists=["affected_fields"],
                written_ms="inserted_ts",
            ),
        ),
        "sticky_events": (_query("room_id, event_id", "sticky_events"),),
        "thread_subscriptions": (
            _query("user_id, room_id, event_id", "thread_subscriptions"),
        ),
        "un_partial_stated_room": (_query("room_id", "un_partial_stated_room_stream"),),
        "un_partial_stated_event": (
            _query(
                "event_id, rejection_status_changed", "un_partial_stated_event_stream"
            ),
        ),
        "quarantined_media": (
            _query("origin, media_id, quarantined", "quarantined_media_changes"),
        ),
    }
)
