"""Commands that the code of a stand-alone process sends.

Theory of operation: :class:`CommandsOut` is the attribute ``outgoing`` of the host. It
is created before the command handler and connected to it later, so that the functions
of ``modules`` can store it and subscribe to channels. While no link is up, the handler
retains commands within a bound; see
:mod:`~synapse_replication.handlers.sending.unsent`.
"""

from __future__ import annotations

from collections.abc import Iterable

from synapse_replication.errors import LocalProtocolError
from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.handlers.host_parts import MAX_USERS
from synapse_replication.handlers.host_values import SyncingUser
from synapse_replication.handlers.sending.unsent import SENDABLE
from synapse_replication.recent import RecentDict
from synapse_replication.wire.commands import Command, UserSyncCommand


class CommandsOut:
    """Sends commands without rows to the other instances: ``host.outgoing``.

    Call its methods in the reactor's thread. Commands may be sent once the process
    starts its services (``startService``). Subscribe to channels earlier, in the
    functions of ``modules``.
    """

    def __init__(self) -> None:
        self._handler: ReplicationCommandHandler | None = None
        self._channels: list[str] = []
        # (user_id, device_id) -> last_sync_ms, the oldest first.
        self._syncing: RecentDict[tuple[str, str | None], int] = RecentDict(MAX_USERS)

    def connect(self, handler: ReplicationCommandHandler) -> None:
        """Send through ``handler`` from now on. For the wiring of the process only."""
        self._handler = handler
        for channel in self._channels:
            handler.subscribe_to_channel(channel)

    @property
    def channels(self) -> tuple[str, ...]:
        """The additional channels to which the code of this process subscribed."""
        return tuple(self._channels)

    def subscribe_to_channel(self, channel_name: str) -> None:
        """Subscribe to a Redis channel in addition to the main one.

        :param channel_name: the part of the channel's name after ``<server_name>/``.
            Subscribe to ``USER_IP`` so that the command sink receives this command.
        :raises LocalProtocolError: if replication has started.
        """
        if self._handler is not None:
            self._handler.subscribe_to_channel(channel_name)
        if channel_name not in self._channels:
            self._channels.append(channel_name)

    # -- sending ----------------------------------------------------------------------

    def send(self, command: Command) -> None:
        """Send a command to the other instances.

        A :class:`~synapse_replication.api.UserSyncCommand` must have the random id of
        this process, ``host.identity.instance_id``. On each new link, the users that
        the command sink returns are reported again; the default sink returns those of
        :meth:`syncing_users`. When a worker stops, it withdraws its syncing users; the
        main process does not.

        :raises LocalProtocolError: if replication has not started, or the command is
            about rows, positions or connections, which this package itself sends.
        """
        if command.NAME not in SENDABLE:
            raise LocalProtocolError(
                f"{command.NAME} cannot be sent by a host's code, only one of "
                f"{', '.join(sorted(SENDABLE))}"
            )
        if self._handler is None:
            raise LocalProtocolError(
                "commands cannot be sent before replication starts; send from the "
                "startService of a service that a module returns, or later"
            )
        if isinstance(command, UserSyncCommand):
            key = command.user_id, command.device_id
            self._syncing.pop(key, None)
            if command.is_syncing:
                self._syncing[key] = command.last_sync_ms
        self._handler.sender.send(command)

    def syncing_users(self) -> Iterable[SyncingUser]:
        """Return the users that are syncing with this process.

        At most :data:`~synapse_replication.handlers.host_parts.MAX_USERS` are returned:
        those that were reported last.
        """
        return [
            SyncingUser(user_id, device_id, last_sync_ms)
            for (user_id, device_id), last_sync_ms in self._syncing.items()
        ]
