"""Commands about users: when they sync, and the addresses that they use.

Notes on the format of USER_SYNC:

* Only the device id may contain spaces, so the line is split from both ends. The text
  ``None`` as a device id means that there is no device id.
* Older peers send a form without a device id, which is also parsed. Only the form with
  a device id is sent.
"""

from __future__ import annotations

from typing import ClassVar

import attrs
import msgspec
from typing_extensions import override

from synapse_replication.wire.commands.base import Command, decode_fields

_USER_IP_FIELDS = msgspec.json.Decoder(tuple[str, str, str, str | None, int])


@attrs.frozen
class UserSyncCommand(Command):
    """Notice that a user started, continues or stopped syncing with an instance.

    :ivar instance_id: the random id of the instance's epoch.
    :ivar user_id: contains no spaces.
    :ivar device_id: may contain spaces; ``None`` if the line has no device id.
    :ivar last_sync_ms: when the user last synced with the instance, in ms since 1970.
    """

    NAME: ClassVar[str] = "USER_SYNC"
    instance_id: str
    user_id: str
    device_id: str | None
    is_syncing: bool
    last_sync_ms: int

    @classmethod
    @override
    def from_line(cls, line: str) -> UserSyncCommand:
        # Split from both ends, because a device id may contain spaces.
        ends = line.rsplit(" ", 2)
        if len(ends) != 3:
            cls._raise_unparsable("it has fewer than 4 fields")
        front, state, last_sync_ms = ends
        if state not in ("start", "end"):
            cls._raise_unparsable("the syncing state is neither start nor end")
        ids = front.split(" ", 2)
        if len(ids) < 2:
            cls._raise_unparsable("it has fewer than 4 fields")
        if "" in ids[:2]:
            cls._raise_unparsable("the instance id or the user id is empty")
        device_id = ids[2] if len(ids) == 3 else "None"
        return cls(
            cls._id(ids[0]),
            cls._id(ids[1]),
            None if device_id == "None" else cls._id(device_id),
            state == "start",
            cls._integer(last_sync_ms),
        )

    @override
    def to_line(self) -> str:
        device_id = "None" if self.device_id is None else self.device_id
        state = "start" if self.is_syncing else "end"
        return (
            f"{self.instance_id} {self.user_id} {device_id} {state} {self.last_sync_ms}"
        )


@attrs.frozen
class ClearUserSyncsCommand(Command):
    """Notice that no user syncs with an instance any more.

    :ivar instance_id: the random id of the instance's epoch.
    """

    NAME: ClassVar[str] = "CLEAR_USER_SYNC"
    instance_id: str

    @classmethod
    @override
    def from_line(cls, line: str) -> ClearUserSyncsCommand:
        return cls(cls._id(cls._word(line)))

    @override
    def to_line(self) -> str:
        return self.instance_id


@attrs.frozen
class UserIpCommand(Command):
    """Notice of a user's request. Over Redis, it is sent on a channel of its own.

    :ivar user_id: contains no spaces.
    :ivar access_token: secret, and therefore omitted from the ``repr``.
    :ivar last_seen: the time of the request, in ms since 1970.
    """

    NAME: ClassVar[str] = "USER_IP"
    user_id: str
    access_token: str = attrs.field(repr=lambda _: "<secret>")
    ip: str
    user_agent: str
    device_id: str | None
    last_seen: int

    @classmethod
    @override
    def from_line(cls, line: str) -> UserIpCommand:
        user_id, text = cls._words(line, 2)
        return cls(user_id, *decode_fields(cls, _USER_IP_FIELDS, text))

    @override
    def to_line(self) -> str:
        fields = (
            self.access_token,
            self.ip,
            self.user_agent,
            self.device_id,
            self.last_seen,
        )
        return f"{self.user_id} {self._json(fields)}"

    @classmethod
    @override
    def redis_channel_name(cls, prefix: str) -> str:
        return f"{prefix}/USER_IP"
