"""Commands that are relayed, and detection of their copies.

Theory of operation: over direct TCP, a broadcast command (REMOTE_SERVER_UP,
LOCK_RELEASED) reaches an instance over several links: two instances may be connected in
both directions, and instances relay commands. A process that speaks the extension
relays it to all peers, with the names of the instances to which it was sent; it is
never sent to one of them again, so it cannot circulate. A plain line does not carry
these names; it is relayed only from one client of this process to the others.

A command has no id, so a copy is
identified by its link: a link transmits each event only once. The link on which a
command was last received as a new event is its *origin*. If the same command arrives on
another link within :data:`COPY_WINDOW` of that event, it is a copy. Otherwise it is a
new event, for instance the release of a lock that was acquired again.

Bounds: at most :data:`MAX_ORIGINS` commands are stored. To make room, the command
that has not been a new event for the longest time is evicted; at worst, a copy of it is
then delivered.

See docs/failure-modes.rst: failure-echoed-command.
"""

from __future__ import annotations

from typing import Final

from synapse_replication.handlers.interfaces import ReplicationConnection
from synapse_replication.recent import RecentDict
from synapse_replication.wire import commands

#: The names of the commands that are relayed.
RELAYED: Final = frozenset(
    {commands.LockReleasedCommand.NAME, commands.RemoteServerUpCommand.NAME}
)

#: The time for which the same command on another link is a copy, in s.
COPY_WINDOW: Final = 2.0
#: The largest number of commands that are stored.
MAX_ORIGINS: Final = 1000


class CopyFilter:
    """Filter that stores the origin of each command; see the module's docstring."""

    def __init__(self) -> None:
        self._origins: RecentDict[
            commands.Command, tuple[ReplicationConnection, float]
        ] = RecentDict(MAX_ORIGINS)

    def check_and_record(
        self, command: commands.Command, connection: ReplicationConnection, now: float
    ) -> bool:
        """Return whether a command is a copy; if not, store the link as its origin.

        :param now: the time of the host's clock, in s.
        """
        origin = self._origins.get(command)
        if (
            origin is not None
            and origin[0] is not connection
            and now - origin[1] < COPY_WINDOW
        ):
            return True
        self._origins[command] = (connection, now)
        return False

    def forget(self, connection: ReplicationConnection) -> None:
        """Remove the commands whose origin is a lost link.

        If such a command arrives on another link, it is then a new event.
        """
        for command in [
            command
            for command, (origin, _) in self._origins.items()
            if origin is connection
        ]:
            del self._origins[command]
