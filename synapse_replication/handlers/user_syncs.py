"""Telling apart what a USER_SYNC says anew from what was said a moment ago.

Theory of operation: in a presence storm, or when a process connects again and tells of
all its syncing users, the same is said of the same users over and over, and for each a
host may look at, and send on, a user's presence. What was said of a user, device
and process last is remembered; the same again within :data:`REFRESH_AFTER` of when the
host was told, with a time of syncing less than :data:`RESOLUTION_MS` later, is a
repeat.

That is sound: a start after an end, or an end after a start, is never a repeat, so the
host knows at any time who syncs. It hears of a user that goes on syncing at least each
10 s, long before any host takes silence for an end. What was said before the process
told that nobody syncs with it any more, or what the host failed to take, is forgotten.

Bounded: what was said longest ago is forgotten first, and said again then.
"""

from __future__ import annotations

from typing import Final

import attrs

from synapse_replication.recent import RecentDict
from synapse_replication.wire.commands.standard import UserSyncCommand

__all__ = ["MAX_REMEMBERED", "REFRESH_AFTER", "RESOLUTION_MS", "UserSyncDeduplicator"]

#: After so long the same is news again, in s.
REFRESH_AFTER: Final = 10.0
#: By how much a later time of syncing is no news, in ms.
RESOLUTION_MS: Final = 1000
#: How many (process, user, device) are remembered.
MAX_REMEMBERED: Final = 10_000


@attrs.define
class _LastSync:
    is_syncing: bool
    last_sync_ms: int
    told_at: float


class UserSyncDeduplicator:
    """What was said last of each user, on a process, with a device."""

    def __init__(self) -> None:
        self._said: RecentDict[tuple[str, str, str | None], _LastSync] = RecentDict(
            MAX_REMEMBERED
        )

    def is_repeat(self, command: UserSyncCommand, now: float) -> bool:
        """Return whether a command says nothing new; if it does, remember it.

        :param now: monotonic, s.
        """
        key = command.instance_id, command.user_id, command.device_id
        said = self._said.get(key)
        if (
            said is not None
            and said.is_syncing is command.is_syncing
            and command.last_sync_ms - said.last_sync_ms < RESOLUTION_MS
            and now - said.told_at < REFRESH_AFTER
        ):
            return True
        self._said[key] = _LastSync(command.is_syncing, command.last_sync_ms, now)
        return False

    def forget(self, command: UserSyncCommand) -> None:
        """Forget what was said by a command: the host did not take it."""
        key = command.instance_id, command.user_id, command.device_id
        self._said.pop(key, None)

    def forget_process(self, instance_id: str) -> None:
        """Forget what was said of a process: nobody syncs with it now."""
        for key in [key for key in self._said if key[0] == instance_id]:
            del self._said[key]
