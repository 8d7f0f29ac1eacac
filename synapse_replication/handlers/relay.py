"""Telling apart a command that is news from a copy that came by another way.

Theory of operation: over direct TCP a command for everybody (REMOTE_SERVER_UP,
LOCK_RELEASED) reaches an instance by several links: two instances may be connected both
ways, and a server relays what it receives. A command carries no id, so a copy is known
by its link: each link carries each event once. The link that brought an event first is
its *origin*. The same text on another link within :data:`WINDOW` is a copy; on the
origin itself it is a new event, for instance a lock that was released again.

Bounded: beyond :data:`MAX_REMEMBERED` commands, the one received longest ago is
forgotten; at worst a copy is then delivered too.
"""

from __future__ import annotations

from typing import Final

from synapse_replication.handlers.interfaces import ReplicationConnection
from synapse_replication.recent import RecentDict
from synapse_replication.wire.commands.standard import Command

__all__ = ["MAX_REMEMBERED", "WINDOW", "CopyFilter"]

#: How long the same command on another link is a copy, in s.
WINDOW: Final = 2.0
#: How many commands are remembered.
MAX_REMEMBERED: Final = 1000


class CopyFilter:
    """Remembers which link brought each command first."""

    def __init__(self) -> None:
        self._origins: RecentDict[Command, tuple[ReplicationConnection, float]] = (
            RecentDict(MAX_REMEMBERED)
        )

    def is_copy(
        self, command: Command, connection: ReplicationConnection, now: float
    ) -> bool:
        """Return whether a command came before by another link; if not, remember it.

        :param now: monotonic, s.
        """
        origin = self._origins.get(command)
        if (
            origin is not None
            and origin[0] is not connection
            and now - origin[1] < WINDOW
        ):
            return True
        self._origins[command] = (connection, now)
        return False

    def forget(self, connection: ReplicationConnection) -> None:
        """Forget a link that is gone: what another one brings is news."""
        for command in [
            command
            for command, (origin, _) in self._origins.items()
            if origin is connection
        ]:
            del self._origins[command]
