"""The streams of a Synapse deployment: the properties common to all processes.

The writers of each stream are configured in ``stream_writers``, under the keys given
here; ``master`` writes every stream that is not configured, except ``caches``, which
every instance may write.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.rows import RowCodec
from synapse_replication.streams.stream import StreamDescription

_ROW_TYPES = "synapse_replication.streams.standard.row_types"

#: The tables that store ids of a standard stream, but whose rows are not on the wire.
TABLES_WITHOUT_ROWS = frozenset({"device_lists_remote_pending"})

#: The instance name of the main process.
MAIN_INSTANCE = "master"


class StandardStream(Struct, frozen=True, kw_only=True):
    """One of the streams that every Synapse deployment has.

    :ivar name: the name on the wire.
    :ivar codec: the name of its row type or its codec in
        :mod:`synapse_replication.streams.standard.row_types`.
    :ivar idempotent: see :class:`StreamDescription`, as for the next three.
    :ivar writers_key: the key of ``stream_writers`` that names its writers; ``None`` if
        they cannot be configured.
    :ivar any_instance_writes: whether every instance may write it without being
        declared, so that it has no positions in ``stream_positions``.
    :ivar sequence: the sequence of its ids; ``None`` if it is held in memory.
    :ivar id_columns: the columns that store its ids.
    :ivar positions_name: its name in ``stream_positions``; ``None`` if it has no
        positions there.
    :ivar negative: whether ids are stored as negative numbers; tokens on the wire are
        positive.
    :ivar key: for a stream held in memory, returns the key that a row describes, if
        rows replace older rows of the same key.
    """

    name: str
    codec: str
    idempotent: bool = False
    resettable: bool = False
    held_in_memory: bool = False
    announce_own_moves_only: bool = False
    writers_key: str | None = None
    any_instance_writes: bool = False
    sequence: str | None = None
    id_columns: tuple[IdColumn, ...] = ()
    positions_name: str | None = None
    negative: bool = False
    key: Callable[[Any], Hashable] | None = None

    @property
    def description(self) -> StreamDescription:
        """Its name, row type and properties."""
        return _describe(self)


@functools.cache
def _describe(stream: StandardStream) -> StreamDescription:
    # Most processes decode the rows of few standard streams, or of none.
    row_types = importlib.import_module(
        "synapse_replication.streams.standard.row_types"
    )
    kind = getattr(row_types, stream.codec)
    is_codec = issubclass(kind, RowCodec)
    ids = stream.id_columns
    return StreamDescription(
        stream.name,
        kind(stream.name) if is_codec else RowCodec(stream.name, kind),
        idempotent=stream.idempotent,
        resettable=stream.resettable,
        held_in_memory=stream.held_in_memory,
        announce_own_moves_only=stream.announce_own_moves_only,
        id_column=f"{ids[0].table}.{ids[0].id_column}" if ids else "",
        negative=stream.negative,
    )


def _in_memory(
    name: str,
    row_type: str,
    writers_key: str | None = None,
    key: Callable[[Any], Hashable] | None = None,
) -> StandardStream:
    return StandardStream(
        name=name,
        codec=row_type,
        resettable=True,
        held_in_memory=True,
        writers_key=writers_key,
        key=key,
    )


def _in_tables(
    name: str,
    codec: str,
    sequence: str,
    id_columns: Sequence[tuple[str, str, str | None]],
    *,
    writers_key: str | None = None,
    positions_name: str | None = None,
    negative: bool = False,
) -> StandardStream:
    return StandardStream(
        name=name,
        codec=codec,
        writers_key=writers_key,
        sequence=sequence,
        id_columns=tuple(IdColumn(*columns) for columns in id_columns),
        positions_name=positions_name or name,
        negative=negative,
    )


def _simple(table: str) -> tuple[tuple[str, str, str | None], ...]:
    return ((table, "stream_id", "instance_name"),)


_EVENT_IDS = (
    ("events", "stream_ordering", "instance_name"),
    ("ex_outlier_stream", "event_stream_ordering", "instance_name"),
)

_STREAMS = (
    _in_tables(
        "events",
        "EventsRowCodec",
        "events_stream_seq",
        (*_EVENT_IDS, *_simple("current_state_delta_stream")),
        writers_key="events",
    ),
    _in_tables(
        "backfill",
        "BackfillStreamRow",
        "events_backfill_stream_seq",
        _EVENT_IDS,
        writers_key="events",
        negative=True,
    ),
    _in_tables(
        "presence",
        "PresenceStreamRow",
        "presence_stream_sequence",
        _simple("presence_stream"),
        writers_key="presence",
        positions_name="presence_stream",
    ),
    _in_memory(
        "presence_federation",
        "PresenceFederationStreamRow",
        "presence",
        attrgetter("destination", "user_id"),
    ),
    _in_memory("typing", "TypingStreamRow", "typing", attrgetter("room_id")),
    _in_tables(
        "receipts",
        "ReceiptsStreamRow",
        "receipts_sequence",
        _simple("receipts_linearized"),
        writers_key="receipts",
    ),
    _in_tables(
        "push_rules",
        "PushRulesStreamRow",
        "push_rules_stream_sequence",
        _simple("push_rules_stream"),
        writers_key="push_rules",
        positions_name="push_rules_stream",
    ),
    _in_tables(
        "pushers",
        "PushersStreamRow",
        "pushers_sequence",
        (("pushers", "id", "instance_name"), *_simple("deleted_pushers")),
    ),
    StandardStream(
        name="caches",
        codec="CachesStreamRow",
        idempotent=True,
        resettable=True,
        announce_own_moves_only=True,
        any_instance_writes=True,
        sequence="cache_invalidation_stream_seq",
        id_columns=(
            IdColumn(
                "cache_invalidation_stream_by_instance", "stream_id", "instance_name"
            ),
        ),
    ),
    _in_tables(
        "device_lists",
        "DeviceListsStreamRow",
        "device_lists_sequence",
        (
            *_simple("device_lists_stream"),
            *_simple("user_signature_stream"),
            *_simple("device_lists_outbound_pokes"),
            *_simple("device_lists_changes_in_room"),
            *_simple("device_lists_remote_pending"),
        ),
        writers_key="device_lists",
        positions_name="device_lists_stream",
    ),
    _in_tables(
        "to_device",
        "ToDeviceStreamRow",
        "device_inbox_sequence",
        (*_simple("device_inbox"), *_simple("device_federation_outbox")),
        writers_key="to_device",
    ),
    _in_memory("federation", "FederationStreamRow"),
    _in_tables(
        "account_data",
        "AccountDataStreamRow",
        "account_data_sequence",
        # The tables have an instance_name, but Synapse does not fill it in.
        (
            ("account_data", "stream_id", None),
            ("room_account_data", "stream_id", None),
            ("room_tags_revisions", "stream_id", None),
        ),
        writers_key="account_data",
    ),
    _in_tables(
        "profile_updates",
        "ProfileUpdatesStreamRow",
        "profile_updates_sequence",
        _simple("profile_updates"),
        writers_key="events",
    ),
    _in_tables(
        "sticky_events",
        "StickyEventsStreamRow",
        "sticky_events_sequence",
        _simple("sticky_events"),
        writers_key="events",
    ),
    _in_tables(
        "thread_subscriptions",
        "ThreadSubscriptionsStreamRow",
        "thread_subscriptions_sequence",
        _simple("thread_subscriptions"),
        writers_key="thread_subscriptions",
    ),
    _in_tables(
        "un_partial_stated_room",
        "UnPartialStatedRoomStreamRow",
        "un_partial_stated_room_stream_sequence",
        _simple("un_partial_stated_room_stream"),
        positions_name="un_partial_stated_room_stream",
    ),
    _in_tables(
        "un_partial_stated_event",
        "UnPartialStatedEventStreamRow",
        "un_partial_stated_event_stream_sequence",
        _simple("un_partial_stated_event_stream"),
        positions_name="un_partial_stated_event_stream",
    ),
    _in_tables(
        "quarantined_media",
        "QuarantinedMediaStreamRow",
        "quarantined_media_id_seq",
        _simple("quarantined_media_changes"),
        writers_key="quarantined_media_changes",
    ),
)

#: The standard streams by their names on the wire.
STANDARD_STREAMS: Mapping[str, StandardStream] = MappingProxyType(
    {stream.name: stream for stream in _STREAMS}
)
