"""Row types of the streams of a Synapse deployment, under Synapse's names.

The fields are the elements of the JSON array, in order. Fields that newer versions of
Synapse appended have a default, so that rows of an older peer can be decoded as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import msgspec

from synapse_replication.streams.rows import (
    AttrsRowCodec,
    CheckedRowCodec,
    DecodedRows,
    decode_json,
    encode_json,
    fast_class,
)


@attrs.frozen
class EventsStreamEventRow:
    """An event was persisted, or is no longer an outlier.

    :ivar type: the event's type, for instance ``m.room.message``.
    :ivar state_key: ``None`` if it is not a state event.
    :ivar redacts: the event that it redacts.
    :ivar relates_to: the event that it relates to.
    :ivar membership: the membership, if it is an ``m.room.member`` event.
    """

    event_id: str
    room_id: str
    type: str
    state_key: str | None
    redacts: str | None
    relates_to: str | None = None
    membership: str | None = None
    rejected: bool = False
    outlier: bool = False


@attrs.frozen
class EventsStreamCurrentStateRow:
    """The current state of a room changed.

    :ivar event_id: the new state event; ``None`` if the state was removed.
    """

    room_id: str
    type: str
    state_key: str
    event_id: str | None


@attrs.frozen
class EventsStreamAllStateRow:
    """A room's current state changed so much that it must be read again."""

    room_id: str


@attrs.frozen
class UnknownEventsStreamRow:
    """The data of a row of an unknown type from a newer peer; skip such rows.

    :ivar data: the JSON value.
    """

    data: Any


@attrs.frozen
class EventsStreamRow:
    """A row of ``events``.

    :ivar type: ``ev``, ``state`` or ``state-all``; or an unknown type, if the data is
        an :class:`UnknownEventsStreamRow`.
    """

    type: str
    data: (
        EventsStreamEventRow
        | EventsStreamCurrentStateRow
        | EventsStreamAllStateRow
        | UnknownEventsStreamRow
    )


@attrs.frozen
class BackfillStreamRow:
    """An old event was persisted."""

    event_id: str
    room_id: str
    type: str
    state_key: str | None
    redacts: str | None
    relates_to: str | None = None


@attrs.frozen
class PresenceStreamRow:
    """A user's presence changed. Times are in ms since 1970."""

    user_id: str
    state: str
    last_active_ts: int
    last_federation_update_ts: int
    last_user_sync_ts: int
    status_msg: str | None
    currently_active: bool


@attrs.frozen
class PresenceFederationStreamRow:
    """A user's presence must be sent to another homeserver."""

    destination: str
    user_id: str


@attrs.frozen
class TypingStreamRow:
    """The users who are currently typing in a room."""

    room_id: str
    user_ids: list[str]


@attrs.frozen
class ReceiptsStreamRow:
    """A user read a room up to an event.

    :ivar data: the receipt's content, for instance ``{"ts": 1795207381916}``.
    """

    room_id: str
    receipt_type: str
    user_id: str
    event_id: str
    thread_id: str | None
    data: dict[str, Any]


@attrs.frozen
class PushRulesStreamRow:
    """A user's push rules changed."""

    user_id: str


@attrs.frozen
class PushersStreamRow:
    """A user's pusher was added, changed or deleted."""

    user_id: str
    app_id: str
    pushkey: str
    deleted: bool


@attrs.frozen
class CachesStreamRow:
    """An entry of a cache, or the whole cache, is out of date.

    :ivar keys: the key of the entry; ``None`` for the whole cache.
    :ivar invalidation_ts: the time of the invalidation, in ms since 1970.
    """

    cache_func: str
    keys: list[Any] | None
    invalidation_ts: int | None


@attrs.frozen
class DeviceListsStreamRow:
    """A user's devices or cross-signing signatures changed.

    :ivar user_id: the user; older peers also send rows with the name of a server.
    :ivar is_signature: whether the cross-signing signatures changed.
    :ivar hosts_calculated: whether the servers to notify have been determined.
    """

    user_id: str
    is_signature: bool
    hosts_calculated: bool = False


@attrs.frozen
class ToDeviceStreamRow:
    """New messages are available for the devices of a user, or for another server.

    :ivar entity: a user id, or the name of a server.
    """

    entity: str


@attrs.frozen
class FederationStreamRow:
    """Data must be sent to other homeservers.

    :ivar type: the kind of the data, a short word.
    """

    type: str
    data: dict[str, Any]


@attrs.frozen
class AccountDataStreamRow:
    """A user's account data changed.

    :ivar room_id: ``None`` for global account data.
    """

    user_id: str
    room_id: str | None
    data_type: str


@attrs.frozen
class TagAccountDataStreamRow:
    """A user's tags of a room changed: older peers send this in a stream of its own.

    :ivar data: the tags, usually a text that contains a JSON object.
    """

    user_id: str
    room_id: str
    data: Any


@attrs.frozen
class ProfileUpdatesStreamRow:
    """A user's profile, or its visibility, changed.

    :ivar action: for instance ``update`` or ``joined_room``.
    :ivar affected_fields: for instance ``["displayname"]``.
    """

    user_id: str
    action: str
    affected_fields: list[str] | None = None


@attrs.frozen
class StickyEventsStreamRow:
    """A sticky event was persisted."""

    room_id: str
    event_id: str


@attrs.frozen
class ThreadSubscriptionsStreamRow:
    """A user subscribed to a thread or unsubscribed from it.

    :ivar event_id: the thread's root.
    """

    user_id: str
    room_id: str
    event_id: str


@attrs.frozen
class UnPartialStatedRoomStreamRow:
    """The full state of a partially joined room became known."""

    room_id: str


@attrs.frozen
class UnPartialStatedEventStreamRow:
    """The full state at an event became known."""

    event_id: str
    rejection_status_changed: bool


@attrs.frozen
class QuarantinedMediaStreamRow:
    """A piece of media was quarantined, or its quarantine was lifted.

    :ivar origin: the server of origin; ``None`` for local media.
    """

    origin: str | None
    media_id: str
    quarantined: bool


_FastEventsRow = fast_class(EventsStreamRow)


class EventsRowCodec(CheckedRowCodec[EventsStreamRow]):
    """Codec of rows of the form ``[type, data]``, where the type determines the data.

    The data of a row of an unknown type becomes an :class:`UnknownEventsStreamRow`, and
    the row counts as one with extra fields.
    """

    def __init__(self, stream_name: str) -> None:
        super().__init__(stream_name, EventsStreamRow)
        #: The type of the data of each kind of row.
        self.row_types: Mapping[str, type[Any]] = {
            "ev": EventsStreamEventRow,
            "state": EventsStreamCurrentStateRow,
            "state-all": EventsStreamAllStateRow,
        }
        self._codecs: dict[str, AttrsRowCodec[Any]] = {
            kind: AttrsRowCodec(stream_name, row_type)
            for kind, row_type in self.row_types.items()
        }
        self._by_row_type = {codec.row_type: codec for codec in self._codecs.values()}
        # One decoder parses both elements of the most frequent rows in one pass.
        usual = tuple.__class_getitem__((Literal["ev"], self._codecs["ev"].types))
        self._decode_event = msgspec.json.Decoder(usual).decode

    def decode(self, texts: Sequence[bytes | str]) -> DecodedRows[EventsStreamRow]:
        """Decode several rows.

        :raises RowDecodeError: if one of them is not a row of this stream.
        """
        decode, fast = self._decode_event, self._codecs["ev"].fast_class
        rows = []
        try:
            for text in texts:
                try:
                    kind, fields = decode(text)
                except msgspec.ValidationError:
                    row, is_newer = self.parse(decode_json(text))
                    if is_newer:
                        return super().decode(texts)
                else:
                    data = fast(*fields)
                    data.__class__ = EventsStreamEventRow
                    row = _FastEventsRow(kind, data)
                    row.__class__ = EventsStreamRow
                rows.append(row)
        except (msgspec.MsgspecError, ValueError):
            return super().decode(texts)
        return DecodedRows(rows)

    def parse(self, value: Any) -> tuple[EventsStreamRow, bool]:
        """Return the row for a JSON value, and whether it has unknown fields."""
        if (
            not isinstance(value, list)
            or len(value) < 2
            or not isinstance(value[0], str)
        ):
            raise ValueError("a row must be a JSON array of a type and its data")
        if value[0].startswith("$"):
            # Peers of before 2019 send the data of an event, which begins with its id.
            value = ["ev", value]
        kind, data = value[:2]
        codec = self._codecs.get(kind)
        if codec is None:
            return EventsStreamRow(kind, UnknownEventsStreamRow(data)), True
        row, more = codec.parse(data)
        return EventsStreamRow(kind, row), more or len(value) > 2

    def to_json(self, row: EventsStreamRow) -> Any:
        """Return the JSON value of a row."""
        data = row.data
        if isinstance(data, UnknownEventsStreamRow):
            return [row.type, data.data]
        return [row.type, self._by_row_type[type(data)].to_json(data)]

    def _encode(self, row: EventsStreamRow) -> bytes:
        codec = self._by_row_type.get(type(row.data))
        if codec is None:
            return encode_json(self.to_json(row))
        fields = codec.fields_of(row.data)
        return encode_json((row.type, fields), fields.count(None))
