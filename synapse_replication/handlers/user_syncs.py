"""Suppression of repeated USER_SYNC commands.

Theory of operation: in a presence storm, or when an instance reconnects and reports all
its syncing users, the same USER_SYNC arrives many times, and each time the host may
compute and publish a user's presence. The last delivered command for each (instance,
user, device) is stored. The next command is a repeat if its state is the same, it
arrives within :data:`REFRESH_AFTER` after that delivery, and its sync time is earlier,
or less than :data:`RESOLUTION_MS` later.

Suppression is safe: a start after an end, or an end after a start, is never a repeat,
so the host always knows which users sync. For a user who continues to sync, repeats are
suppressed for at most 10 s, and a host times users out only much later. The stored
commands of an instance are removed when its CLEAR_USER_SYNC arrives, and a command is
removed if the host failed to handle it.

Bounds: at most :data:`MAX_SYNCS` commands are stored. The one that was delivered
the longest time ago is evicted first; its next repeat is delivered.

See docs/failure-modes.rst: failure-no-flapping.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from synapse_replication.recent import GroupedRecentDict
from synapse_replication.wire.commands import UserSyncCommand

#: The time after which the same state is delivered again, in s.
REFRESH_AFTER: Final = 10.0
#: A sync time that is later by less than this, in ms, counts as unchanged.
RESOLUTION_MS: Final = 1000
#: The largest number of (instance, user, device) triples that are stored.
MAX_SYNCS: Final = 10_000


class _LastSync(Struct):
    is_syncing: bool
    last_sync_ms: int
    delivered_at: float


class UserSyncDeduplicator:
    """The last USER_SYNC for each user, by instance and device."""

    def __init__(self) -> None:
        self._last_syncs: GroupedRecentDict[_LastSync] = GroupedRecentDict(MAX_SYNCS)

    def is_repeat(self, command: UserSyncCommand, now: float) -> bool:
        """Return whether a command is a repeat; if not, store it.

        :param now: the time of the host's clock, in s.
        """
        key = command.instance_id, command.user_id, command.device_id
        last = self._last_syncs.get(key)
        if (
            last is not None
            and last.is_syncing is command.is_syncing
            and command.last_sync_ms - last.last_sync_ms < RESOLUTION_MS
            and now - last.delivered_at < REFRESH_AFTER
        ):
            return True
        self._last_syncs[key] = _LastSync(command.is_syncing, command.last_sync_ms, now)
        return False

    def forget(self, command: UserSyncCommand) -> None:
        """Remove a command, because the host failed to handle it."""
        key = command.instance_id, command.user_id, command.device_id
        if key in self._last_syncs:
            del self._last_syncs[key]

    def forget_process(self, instance_id: str) -> None:
        """Remove all commands of an instance: no user syncs with it any more."""
        self._last_syncs.remove_group(instance_id)
