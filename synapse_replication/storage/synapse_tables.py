"""The rows of Synapse's standard streams, read from its tables.

Each query gives the rows of one writer's tokens in
``(%(after)s, %(up_to)s]``, in ascending order, and stops after ``%(limit)s`` rows
but never within a token (``WITH TIES``). It walks an index by id; only Synapse's
three tables of account data have none that begins with the id.

Derived from the tables of a deployment beside its traffic, and compared with it
row by row. Where a table keeps the newest row of a thing only (presence,
receipts, account data, ...), rows that a newer one replaced are not found any
more, and are not missed: the newer one says all that they said. The same holds
for what was deleted: purged rooms, deactivated users, redacted relations.

Streams held in memory (``typing``, ``federation``, ``presence_federation``) have
no tables: their writers are asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from synapse_replication.storage.row_queries import Detail, RangeQuery, RowQuery

__all__ = ["STANDARD_QUERIES"]


_OF_WRITER = "instance_name = %(instance_name)s"

# account_data's tables have an instance_name that nothing fills in: with several
# writers, the rows of all of them are given for each.
_OF_ANYBODY = "%(instance_name)s IS NOT NULL"


def _query(
    columns: str,
    table: str,
    id_column: str = "stream_id",
    writer: str = _OF_WRITER,
    *,
    distinct: bool = False,
    kind: str | None = None,
    lists: Collection[str] = (),
    written_ms: str | None = None,
) -> RowQuery:
    """Write the query for the rows of one table.

    :param kind: of a stream with several kinds of rows: ``[kind, [columns]]``.
    :param lists: columns that hold a list as JSON.
    """
    row = f"json_build_array('{kind}', json_build_array({columns}))::text"
    return RowQuery(
        f"""
        SELECT {id_column}, {row if kind else columns}
        FROM {table}
        WHERE {writer}
          AND {id_column} > %(after)s AND {id_column} <= %(up_to)s
        ORDER BY {id_column}
        FETCH FIRST %(limit)s ROWS WITH TIES
        """,
        RangeQuery(
            table=table,
            alias="kept",
            id_column=id_column,
            writer_column="instance_name" if writer is _OF_WRITER else None,
            columns=tuple(
                _LIST.format(column) if column in lists else column
                for column in columns.split(", ")
            ),
            kind=kind,
            written_ms=written_ms,
        ),
        distinct,
        kind is not None,
    )


# A list of texts, whether the column is an array or JSON.
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


def _event_query(
    columns: str,
    table: str,
    id_column: str,
    *,
    kind: str | None = None,
    negative: bool = False,
) -> RowQuery:
    """Ask about the events of a page, once the page is found.

    An event that is gone leaves an empty record, so that the end of the page is
    seen.

    :param table: has ``event_id``, ``instance_name`` and the id column.
    """
    if negative:
        token, order = f"-{id_column}", f"{id_column} DESC"
        bounds = f"{id_column} < -%(after)s AND {id_column} >= -%(up_to)s"
    else:
        token, order = id_column, id_column
        bounds = f"{id_column} > %(after)s AND {id_column} <= %(up_to)s"
    if table == "events":
        alias, event_columns, event = "e", _OF_EVENT, ""
    else:
        alias, event_columns = "page", "event_id"
        event = f"""JOIN LATERAL (
            SELECT {_OF_EVENT} FROM events WHERE event_id = page.event_id LIMIT 1
        ) AS e ON TRUE"""
    row = f"json_build_array({columns})"
    if kind is not None:
        row = f"json_build_array('{kind}', {row})"
    return RowQuery(
        f"""
        SELECT {alias}.token,
            CASE WHEN e.event_id IS NOT NULL
            THEN {row}::text END
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
        RangeQuery(
            table=table,
            alias=alias,
            joined=event,
            details=_ABOUT_EVENT,
            id_column=id_column,
            writer_column="instance_name",
            columns=tuple(columns.split(", ")),
            kind=kind,
            # When an outlier became none is not kept.
            written_ms="received_ts" if table == "events" else None,
            negative=negative,
        ),
        as_json=True,
    )


#: From the name of a stream on the wire to the queries for its rows. Within a
#: token, the rows of an earlier query come first.
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
            # The same changes, and those that a newer one of the user replaced.
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
        "account_data": (
            _query(
                "user_id, NULL, account_data_type",
                "account_data",
                writer=_OF_ANYBODY,
            ),
            _query(
                "user_id, room_id, account_data_type",
                "room_account_data",
                writer=_OF_ANYBODY,
            ),
            _query(
                "user_id, room_id, 'm.tag'",
                "room_tags_revisions",
                writer=_OF_ANYBODY,
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
