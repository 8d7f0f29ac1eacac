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
no tables: their writers are asked. Spec, sections 8 and 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from synapse_replication.storage.row_queries import RangeQuery, RowQuery

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
    as_json: bool = False,
    written_ms: str | None = None,
) -> RowQuery:
    row = f"json_build_array({columns})::text"
    return RowQuery(
        f"""
        SELECT {id_column}, {row if as_json else columns}
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
            row=row,
            written_ms=written_ms,
        ),
        distinct,
        as_json,
    )


_BACKFILLED = "e.event_id, e.room_id, e.type, s.state_key, r.redacts, l.relates_to_id"
_EVENT = (
    f"'ev', json_build_array({_BACKFILLED}, m.membership, "
    "x.event_id IS NOT NULL, e.outlier)"
)


_OF_EVENT = "event_id, room_id, type, outlier"

# Each event is looked up. As a plain join, a database with some 100,000 rows would
# rather read all of a table for each page.
_ABOUT_EVENT = "".join(
    f"""
        LEFT JOIN LATERAL (
            SELECT {column} FROM {table} WHERE event_id = e.event_id LIMIT 1
        ) AS {alias} ON TRUE"""
    for alias, table, column in (
        ("s", "state_events", "state_key"),
        ("r", "redactions", "redacts"),
        ("l", "event_relations", "relates_to_id"),
        ("m", "room_memberships", "membership"),
        ("x", "rejections", "event_id"),
    )
)


def _event_query(
    columns: str, table: str, id_column: str, *, negative: bool = False
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
    return RowQuery(
        f"""
        SELECT {alias}.token,
            CASE WHEN e.event_id IS NOT NULL
            THEN json_build_array({columns})::text END
        FROM (
            SELECT {token} AS token, {event_columns}
            FROM {table}
            WHERE instance_name = %(instance_name)s AND {bounds}
            ORDER BY {order}
            FETCH FIRST %(limit)s ROWS WITH TIES
        ) AS {alias}
        {event and "LEFT " + event}{_ABOUT_EVENT}
        ORDER BY {alias}.token
        """,
        RangeQuery(
            table=table,
            alias=alias,
            joined=f"{event}{_ABOUT_EVENT}",
            id_column=id_column,
            writer_column="instance_name",
            row=f"json_build_array({columns})::text",
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
            _event_query(_EVENT, "events", "stream_ordering"),
            _event_query(_EVENT, "ex_outlier_stream", "event_stream_ordering"),
            _query(
                "'state', json_build_array(room_id, type, state_key, event_id)",
                "current_state_delta_stream",
                as_json=True,
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
