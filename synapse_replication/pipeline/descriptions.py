"""Descriptions of the archive's columns and tables, for Delta Lake and the manual.

A test checks that docs/pipeline.rst contains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from synapse_replication.storage.synapse_tables import STANDARD_QUERIES

#: The meaning of each column, by name.
COLUMNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "stream_id": "The token, as on the wire; positive also for backfill.",
        "row_index": "The index among the rows of one token, from 0.",
        "instance_name": "The writer; empty if it is unknown.",
        "written_ts": "When the row was written, in UTC; null if unknown.",
        "day": "The day of written_ts or, if that is null, of archiving.",
        "kind": "What happened: ev (an event was persisted), state or state-all.",
        "event_id": "The event.",
        "room_id": "The room.",
        "type": "The type of the event, for instance m.room.message.",
        "state_key": "The state key of a state event; null for other events.",
        "redacts": "The event that this event redacts.",
        "relates_to": "The event to which this event relates.",
        "membership": "The membership in an m.room.member event.",
        "rejected": "Whether the event was rejected.",
        "outlier": "Whether the event is an outlier.",
        "user_id": "The user.",
        "state": "The presence: online, unavailable or offline.",
        "last_active_ts": "When the user was active last, in UTC.",
        "last_federation_update_ts": "When other servers were told last, in UTC.",
        "last_user_sync_ts": "When the user synced last, in UTC.",
        "status_msg": "The user's status message.",
        "currently_active": "Whether the user is active now.",
        "destination": "The homeserver to which the change is sent.",
        "user_ids": "The users who are typing.",
        "receipt_type": "The type of the receipt, for instance m.read.",
        "thread_id": "The thread; null if the receipt is not for a thread.",
        "data": "The content, as JSON; ts in it is in ms since 1970.",
        "app_id": "The application of the pusher.",
        "pushkey": "The key of the pusher.",
        "deleted": "Whether the pusher was deleted.",
        "cache_func": "The name of the cache.",
        "keys": "The key of the entry; null for the whole cache.",
        "invalidation_ts": "When the entry became invalid, in UTC.",
        "is_signature": "Whether a signature changed, and not a device.",
        "hosts_calculated": "Whether the destinations are known.",
        "entity": "The user, with @, or the homeserver with messages.",
        "data_type": "The type of the account data.",
        "action": "What was done to the profile.",
        "affected_fields": "The fields of the profile that changed.",
        "rejection_status_changed": "Whether the event's rejection changed.",
        "origin": "The homeserver of the media; null for local media.",
        "media_id": "The media.",
        "quarantined": "Whether the media is quarantined now.",
    }
)

#: The columns that identify an object, in the streams whose tables have only the newest
#: or pending row of each object. The tables of all other streams have a row for each
#: change.
OBJECTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "account_data": ("user_id", "room_id", "data_type"),
        "device_lists": ("user_id",),
        "presence": ("user_id",),
        "pushers": ("user_id", "app_id", "pushkey"),
        "receipts": ("room_id", "receipt_type", "user_id", "thread_id"),
        "sticky_events": ("room_id", "event_id"),
        "thread_subscriptions": ("user_id", "room_id", "event_id"),
        "to_device": ("entity",),
    }
)


def describe_table(stream: str) -> str:
    """Return the description of a stream's table: its sources and what they retain."""
    if stream not in STANDARD_QUERIES:
        return f"Rows of the stream {stream}, which the configuration declares."
    tables = ", ".join(query.range.table for query in STANDARD_QUERIES[stream])
    retained = (
        "only the newest or pending row of each object: older rows are here only if "
        "they were archived before they were replaced"
        if stream in OBJECTS
        else "one row for each change"
    )
    return f"Rows of the stream {stream}, from {tables}, which have {retained}."
