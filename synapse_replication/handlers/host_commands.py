"""Commands for the host: all except those about rows, positions and the connection.

Theory of operation: a command is delivered to the host's
:class:`~synapse_replication.handlers.interfaces.CommandSink`. The following are not
delivered: repeats of USER_SYNC; copies of REMOTE_SERVER_UP and LOCK_RELEASED that
arrive on another link; USER_SYNC, CLEAR_USER_SYNC and LOCK_RELEASED that this process
sent itself; and USER_IP if the host does not store client IPs. REMOTE_SERVER_UP and
LOCK_RELEASED are also relayed to other peers over direct TCP.

A background process is started only if the host returns an awaitable for a command.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from synapse_replication.handlers.events import (
    BackgroundTask,
    Discarded,
    DiscardReason,
)
from synapse_replication.handlers.interfaces import (
    ReplicationConnection,
    ReplicationHost,
)
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.redaction import without_secrets
from synapse_replication.handlers.relay import RELAYED, CopyFilter
from synapse_replication.handlers.sending.sender import CommandSender
from synapse_replication.handlers.user_syncs import UserSyncDeduplicator
from synapse_replication.streams.stream import AcknowledgedStream
from synapse_replication.wire import commands


def _always(command: commands.Command) -> bool:
    return True


class HostCommandDispatcher:
    """Delivers received commands to the host, and relays some of them.

    Use it in the reactor's thread only.
    """

    def __init__(
        self,
        host: ReplicationHost,
        observer: ReplicationObserver,
        sender: CommandSender,
    ) -> None:
        self._host = host
        self._observer = observer
        self._sender = sender
        self._syncs = UserSyncDeduplicator()
        self._relayed = CopyFilter()
        self._delivered = CopyFilter()
        #: The commands for the host: whether a command must be delivered.
        self._filters: dict[type[commands.Command], Callable[[Any], bool]] = {
            commands.UserSyncCommand: self._is_news,
            commands.ClearUserSyncsCommand: self._clears_another,
            commands.FederationAckCommand: self._acknowledge,
            commands.UserIpCommand: self._stores_user_ips,
            commands.RemoteServerUpCommand: _always,
            commands.LockReleasedCommand: self._is_lock_of_another,
            commands.NewActiveTaskCommand: _always,
            commands.CancelTaskCommand: _always,
            commands.RemovePusherCommand: _always,
            commands.InvalidateCacheCommand: _always,
        }

    def dispatch(
        self,
        connection: ReplicationConnection,
        command: commands.Command,
        reached: frozenset[str] | None = None,
    ) -> None:
        """Deliver a command to the host, if the host needs it.

        :param reached: the instances to which the command was already sent; ``None`` if
            it arrived as a plain line.
        """
        if command.NAME in RELAYED:
            self._relay(connection, command, reached)
        is_wanted = self._filters.get(type(command))
        if is_wanted is None:
            return
        try:
            if not is_wanted(command) or self._is_copy(connection, command):
                return
            waiting = self._host.commands.on_command(command)
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            self._report_failure(f"handling {command.NAME}", command, error)
            return
        if waiting is not None:
            description = f"replication_{command.NAME}"
            self._host.run_as_background_process(
                description, lambda: self._wait(description, command, waiting)
            )

    async def _wait(
        self, description: str, command: commands.Command, waiting: Awaitable[None]
    ) -> None:
        with self._observer.span(BackgroundTask(description)):
            try:
                await waiting
            except Exception as error:  # noqa: BLE001 -- reported to the observer
                self._report_failure(description, command, error)

    def _report_failure(
        self, what: str, command: commands.Command, error: Exception
    ) -> None:
        if isinstance(command, commands.UserSyncCommand):
            self._syncs.forget(command)
        self._observer.failure(what, without_secrets(error, command))

    def forget_copies(self, connection: ReplicationConnection) -> None:
        """Forget the commands that arrived on a lost connection."""
        self._relayed.forget(connection)
        self._delivered.forget(connection)

    def _is_news(self, command: commands.UserSyncCommand) -> bool:
        if command.instance_id == self._host.identity.instance_id:
            return False
        if self._syncs.is_repeat(command, self._host.clock.seconds()):
            self._discard(command, DiscardReason.REPEATED)
            return False
        return True

    def _clears_another(self, command: commands.ClearUserSyncsCommand) -> bool:
        if command.instance_id == self._host.identity.instance_id:
            return False
        self._syncs.forget_process(command.instance_id)
        return True

    def _acknowledge(self, command: commands.FederationAckCommand) -> bool:
        stream: object = self._host.streams.get_streams().get("federation")
        if isinstance(stream, AcknowledgedStream):
            stream.acknowledge(command.instance_name, command.token)
        return True

    def _stores_user_ips(self, command: commands.UserIpCommand) -> bool:
        if not self._host.stores_user_ips:
            self._discard(command, DiscardReason.NOT_RESPONSIBLE)
        return self._host.stores_user_ips

    def _relay(
        self,
        connection: ReplicationConnection,
        command: commands.Command,
        reached: frozenset[str] | None,
    ) -> None:
        """Relay a command to other peers, unless it is a copy.

        A plain line that arrived on a link that this process opened is not relayed: in
        a mesh, it would circulate for ever.
        """
        if len(self._sender.links) < 2 or (reached is None and not connection.relays):
            return
        now = self._host.clock.seconds()
        if not self._relayed.check_and_record(command, connection, now):
            self._sender.relay(command, connection, reached or frozenset())

    def _is_lock_of_another(self, command: commands.LockReleasedCommand) -> bool:
        return command.instance_name != self._host.identity.instance_name

    def _is_copy(
        self, connection: ReplicationConnection, command: commands.Command
    ) -> bool:
        if command.NAME not in RELAYED or len(self._sender.links) < 2:
            # No copy can arrive on another link.
            return False
        now = self._host.clock.seconds()
        is_copy = self._delivered.check_and_record(command, connection, now)
        if is_copy:
            self._discard(command, DiscardReason.REPEATED)
        return is_copy

    def _discard(self, command: commands.Command, reason: DiscardReason) -> None:
        self._observer.observe(Discarded(command.NAME, "", reason, 1))
