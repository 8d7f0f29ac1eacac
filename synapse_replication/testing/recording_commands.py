"""A command sink that records the commands that it receives, for tests to inspect."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable

from synapse_replication.handlers.interfaces import SyncingUser
from synapse_replication.wire.commands import Command


class RecordingCommands:
    """A command sink that only records the commands that it receives.

    :ivar received: the commands, in order.
    :ivar answer: the return value of :meth:`on_command`.
    :ivar error: the exception that :meth:`on_command` raises, if set.
    :ivar syncing: the users who sync with this process.
    """

    def __init__(self) -> None:
        self.received: list[Command] = []
        self.answer: Awaitable[None] | None = None
        self.error: Exception | None = None
        self.syncing: list[SyncingUser] = []

    def get_currently_syncing_users(self) -> Iterable[SyncingUser]:
        """Return the users to report on a new link."""
        return self.syncing

    def on_command(self, command: Command) -> Awaitable[None] | None:
        """Record a command."""
        self.received.append(command)
        if self.error is not None:
            raise self.error
        return self.answer
