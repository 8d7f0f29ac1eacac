"""Commands that were sent while this process had no link, kept for the next one.

Theory of operation: rows and positions are not kept, because the POSITION on the next
link makes readers fetch what they miss. Nothing brings back any other command, so it
is kept here. Only the newest one about a thing is kept: a USER_SYNC replaces an earlier
one of the same process, user and device, a FEDERATION_ACK an earlier one of the same
instance, and any other command an earlier one with the same arguments. A
CLEAR_USER_SYNC replaces every USER_SYNC of its process.

The bounds hold for each command name by itself, so that a flood of one command does
not displace another. Beyond them the oldest command of that name is dropped.

See docs/failure-modes.rst: failure-accepted-commands.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final

from synapse_replication.handlers.observer import CommandDropReason
from synapse_replication.wire.commands.standard import (
    CancelTaskCommand,
    ClearUserSyncsCommand,
    Command,
    FederationAckCommand,
    LockReleasedCommand,
    NewActiveTaskCommand,
    RemoteServerUpCommand,
    UserIpCommand,
    UserSyncCommand,
)

__all__ = ["MAX_BYTES", "MAX_COMMANDS", "UnsentCommands"]

#: The most commands of one name that are kept.
MAX_COMMANDS: Final = 10_000
#: The most bytes of their lines, also for each name.
MAX_BYTES: Final = 2 * 1024 * 1024

_KEPT: Final = frozenset(
    {
        CancelTaskCommand.NAME,
        ClearUserSyncsCommand.NAME,
        FederationAckCommand.NAME,
        LockReleasedCommand.NAME,
        NewActiveTaskCommand.NAME,
        RemoteServerUpCommand.NAME,
        UserIpCommand.NAME,
        UserSyncCommand.NAME,
    }
)


def _subject(command: Any, line: str) -> Hashable:
    """Return what a command is about, within its name."""
    if command.NAME == UserSyncCommand.NAME:
        return command.instance_id, command.user_id, command.device_id
    if command.NAME == FederationAckCommand.NAME:
        return (command.instance_name,)
    if command.NAME == UserIpCommand.NAME:
        return command.user_id, command.device_id, command.ip
    return line


class _OneName:
    """The kept commands of one name, oldest first."""

    def __init__(self) -> None:
        #: By subject: the order of sending, the size in bytes, and the command.
        self.commands: OrderedDict[Hashable, tuple[int, int, Command]] = OrderedDict()
        self.size = 0

    def put(self, subject: Hashable, order: int, size: int, command: Command) -> None:
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
    """Keeps commands within bounds and returns them in the order of sending.

    :param dropped: called with a command's name, the reason and the number of
        commands that were dropped.
    """

    def __init__(
        self,
        dropped: Callable[[str, CommandDropReason, int], object],
        max_commands: int = MAX_COMMANDS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._dropped = dropped
        self._max_commands = max_commands
        self._max_bytes = max_bytes
        self._by_name: dict[str, _OneName] = {}
        self._order = 0

    def __len__(self) -> int:
        return sum(len(of_name.commands) for of_name in self._by_name.values())

    def put(self, command: Command) -> None:
        """Keep a command, unless something else makes up for its loss."""
        name = command.NAME
        if name not in _KEPT:
            return
        if name == ClearUserSyncsCommand.NAME:
            self._forget_syncs(command)
        line = command.to_line()
        of_name = self._by_name.setdefault(name, _OneName())
        self._order += 1
        of_name.put(_subject(command, line), self._order, len(line), command)
        while (
            len(of_name.commands) > self._max_commands or of_name.size > self._max_bytes
        ):
            of_name.drop_oldest()
            self._dropped(name, CommandDropReason.QUEUE_FULL, 1)

    def take(self) -> list[Command]:
        """Return all commands, in the order of sending, and keep none."""
        kept = [
            (order, command)
            for of_name in self._by_name.values()
            for order, _, command in of_name.commands.values()
        ]
        self._by_name.clear()
        return [command for _, command in sorted(kept, key=lambda each: each[0])]

    def drop(self) -> None:
        """Drop all commands: there will be no further link."""
        for name, of_name in self._by_name.items():
            self._dropped(name, CommandDropReason.STOPPED, len(of_name.commands))
        self._by_name.clear()

    def _forget_syncs(self, clear: Any) -> None:
        syncs = self._by_name.get(UserSyncCommand.NAME)
        if syncs is not None:
            for subject, (_, _, command) in list(syncs.commands.items()):
                # A host's own class of command may be here, so by attribute.
                if getattr(command, "instance_id", None) == clear.instance_id:
                    syncs.remove(subject)
            if not syncs.commands:
                del self._by_name[UserSyncCommand.NAME]
