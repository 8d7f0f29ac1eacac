"""Buffer of the commands that were sent while there was no link.

Theory of operation: rows and positions are not retained, because the POSITION on the
next link makes readers fetch missed rows. The loss of a command in :data:`SENDABLE`
would not be recovered, so these are retained for the next link. Only the newest command
about an object is retained: a USER_SYNC replaces an earlier USER_SYNC of the same
instance, user and device; a FEDERATION_ACK replaces an earlier FEDERATION_ACK of the
same instance; a USER_IP replaces an earlier USER_IP of the same user, device and
address; any other retained command replaces an earlier identical one. A CLEAR_USER_SYNC
replaces every USER_SYNC of its instance.

The bounds apply to each command name separately, so that many commands of one name do
not displace those of another name. When a bound is exceeded, the oldest command of that
name is dropped.

See docs/failure-modes.rst: failure-accepted-commands.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Final

from synapse_replication.handlers.events import CommandDropReason, CommandsDropped
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.wire import commands

#: The largest number of retained commands of one name.
MAX_COMMANDS: Final = 10_000
#: The largest total size of the lines of one name; characters count as one byte each.
MAX_BYTES: Final = 2 * 1024 * 1024

#: The names of the commands that the code of a host sends.
SENDABLE: Final = frozenset(
    {
        commands.CancelTaskCommand.NAME,
        commands.ClearUserSyncsCommand.NAME,
        commands.FederationAckCommand.NAME,
        commands.LockReleasedCommand.NAME,
        commands.NewActiveTaskCommand.NAME,
        commands.RemoteServerUpCommand.NAME,
        commands.UserIpCommand.NAME,
        commands.UserSyncCommand.NAME,
    }
)


def _subject(command: Any, line: str) -> Hashable:
    """Return the key of a command; a later command of its name and key replaces it."""
    if command.NAME == commands.UserSyncCommand.NAME:
        return command.instance_id, command.user_id, command.device_id
    if command.NAME == commands.FederationAckCommand.NAME:
        return (command.instance_name,)
    if command.NAME == commands.UserIpCommand.NAME:
        return command.user_id, command.device_id, command.ip
    return line


class _RetainedCommands:
    """The retained commands of one name, oldest first.

    :ivar size: the total size of their lines, in bytes.
    """

    def __init__(self) -> None:
        #: By subject: the position in the order of sending, the size in bytes, and the
        #: command.
        self.commands: OrderedDict[Hashable, tuple[int, int, commands.Command]] = (
            OrderedDict()
        )
        self.size = 0

    def put(
        self, subject: Hashable, order: int, size: int, command: commands.Command
    ) -> None:
        self.remove(subject)
        self.commands[subject] = order, size, command
        self.size += size

    def remove(self, subject: Hashable) -> None:
        if (replaced := self.commands.pop(subject, None)) is not None:
            self.size -= replaced[1]

    def drop_oldest(self) -> None:
        _, (_, size, _) = self.commands.popitem(last=False)
        self.size -= size


class UnsentCommands:
    """A bounded collection of commands, returned in the order of sending.

    :param observer: notified of dropped commands.
    """

    def __init__(self, observer: ReplicationObserver) -> None:
        self._observer = observer
        self._by_name: dict[str, _RetainedCommands] = {}
        self._order = 0

    def __len__(self) -> int:
        return sum(len(of_name.commands) for of_name in self._by_name.values())

    def put(self, command: commands.Command) -> None:
        """Retain a command, if it is one of those whose loss would not be recovered."""
        name = command.NAME
        if name not in SENDABLE:
            return
        if name == commands.ClearUserSyncsCommand.NAME:
            self._forget_syncs(command)
        line = command.to_line()
        of_name = self._by_name.setdefault(name, _RetainedCommands())
        self._order += 1
        of_name.put(_subject(command, line), self._order, len(line), command)
        while len(of_name.commands) > MAX_COMMANDS or of_name.size > MAX_BYTES:
            of_name.drop_oldest()
            self._observer.observe(
                CommandsDropped(name, CommandDropReason.QUEUE_FULL, 1)
            )

    def take(self) -> list[commands.Command]:
        """Remove and return all commands, in the order of sending."""
        retained = [
            (order, command)
            for of_name in self._by_name.values()
            for order, _, command in of_name.commands.values()
        ]
        self._by_name.clear()
        return [command for _, command in sorted(retained, key=lambda each: each[0])]

    def drop(self) -> None:
        """Drop and report all commands, because there will be no further link."""
        for name, of_name in self._by_name.items():
            self._observer.observe(
                CommandsDropped(name, CommandDropReason.STOPPED, len(of_name.commands))
            )
        self._by_name.clear()

    def _forget_syncs(self, clear: Any) -> None:
        syncs = self._by_name.get(commands.UserSyncCommand.NAME)
        if syncs is not None:
            for subject, (_, _, command) in list(syncs.commands.items()):
                # Compare by attribute, because a host may send its own command classes.
                if getattr(command, "instance_id", None) == clear.instance_id:
                    syncs.remove(subject)
            if not syncs.commands:
                del self._by_name[commands.UserSyncCommand.NAME]
