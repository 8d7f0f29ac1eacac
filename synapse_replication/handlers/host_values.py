"""Values that a host supplies to replication."""

from __future__ import annotations

from msgspec import Struct


class Identity(Struct, frozen=True):
    """The names of this process.

    :ivar server_name: the homeserver's name; also the name of the Redis channel.
    :ivar instance_name: the configured name of this instance, ``master`` for the main
        process. It identifies writers.
    :ivar instance_id: a random id, chosen at each start.
    """

    server_name: str
    instance_name: str
    instance_id: str


class SyncingUser(Struct, frozen=True):
    """A user who is syncing with this process.

    :ivar device_id: ``None`` if it is unknown.
    :ivar last_sync_ms: when the user last synced, in ms since 1970.
    """

    user_id: str
    device_id: str | None
    last_sync_ms: int
