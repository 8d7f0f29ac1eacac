"""Commands for the host: all except those about rows, positions and the connection.

Theory of operation: a command is delivered to the host's
:class:`~synapse_replication.handlers.interfaces.CommandSink`. The following are not
delivered: repeats of USER_SYNC; copies of REMOTE_SERVER_UP and LOCK_RELEASED that
arrive on another link; USER_SYNC, CLEAR_USER_SYNC and LOCK_RELEASED that this process
sent itself; and USER_IP if the host does not store client IPs. If a peer that connected
to this process sends REMOTE_SERVER_UP or LOCK_RELEASED, the command is also relayed to
the other peers that connected to this process.

``on_<COMMAND>`` methods are synchronous. They return an awaitable only if the host
returns one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from synapse_replication.handlers.interfaces import (
    ReplicationConnection,
    ReplicationHost,
)
from synapse_replication.handlers.observer import DiscardReason, ReplicationObserver
from synapse_replication.handlers.relay import CopyFilter
from synapse_replication.handlers.sending.sender import CommandSender
from synapse_replication.handlers.user_syncs import UserSyncDeduplicator
from synapse_replication.wire.commands.base import Command
from synapse_replication.wire.commands.legacy import (
    InvalidateCacheCommand,
    RemovePusherCommand,
)
from synapse_replication.wire.commands.standard import (
    CancelTaskCommand,
    FederationAckCommand,
    LockReleasedCommand,
    NewActiveTaskCommand,
    RemoteServerUpCommand,
)
from synapse_replication.wire.commands.users import (
    ClearUserSyncsCommand,
    UserIpCommand,
    UserSyncCommand,
)

_Waiting: TypeAlias = Awaitable[None] | None


class HostCommandHandler(CommandSender):
    """Handler that delivers received commands to the host and relays some of them.

    Use it in the reactor's thread only.
    """

    def __init__(
        self,
        host: ReplicationHost,
        observer: ReplicationObserver,
        *,
        passive: bool,
        retains_unsent: bool,
    ) -> None:
        super().__init__(host, observer, passive=passive, retains_unsent=retains_unsent)
        self._syncs = UserSyncDeduplicator()
        self._relayed = CopyFilter()
        self._delivered = CopyFilter()

    def _host_command_handlers(
        self,
    ) -> dict[type[Command], Callable[..., _Waiting]]:
        return {
            UserSyncCommand: self.on_USER_SYNC,
            ClearUserSyncsCommand: self.on_CLEAR_USER_SYNC,
            FederationAckCommand: self.on_FEDERATION_ACK,
            UserIpCommand: self.on_USER_IP,
            RemoteServerUpCommand: self.on_REMOTE_SERVER_UP,
            LockReleasedCommand: self.on_LOCK_RELEASED,
            NewActiveTaskCommand: self.on_NEW_ACTIVE_TASK,
            CancelTaskCommand: self.on_CANCEL_TASK,
            RemovePusherCommand: self.on_REMOVE_PUSHER,
            InvalidateCacheCommand: self.on_INVALIDATE_CACHE,
        }

    def _forget_copies(self, connection: ReplicationConnection) -> None:
        """Forget the commands that arrived on a lost connection."""
        self._relayed.forget(connection)
        self._delivered.forget(connection)

    def on_USER_SYNC(
        self, connection: ReplicationConnection, command: UserSyncCommand
    ) -> _Waiting:
        """Notify the host that a user starts, continues or stops syncing."""
        if command.instance_id == self._host.identity.instance_id:
            return None
        if self._syncs.is_repeat(command, self._host.clock.seconds()):
            self._observer.discarded(command.NAME, "", DiscardReason.REPEATED, 1)
            return None
        try:
            waiting = self._host.commands.on_user_sync(
                command.instance_id,
                command.user_id,
                command.device_id,
                command.is_syncing,
                command.last_sync_ms,
            )
        except Exception:
            self._syncs.forget(command)
            raise
        return None if waiting is None else self._wait_for_sync(command, waiting)

    async def _wait_for_sync(
        self, command: UserSyncCommand, waiting: Awaitable[None]
    ) -> None:
        try:
            await waiting
        except Exception:
            self._syncs.forget(command)
            raise

    def on_CLEAR_USER_SYNC(
        self, connection: ReplicationConnection, command: ClearUserSyncsCommand
    ) -> _Waiting:
        """Notify the host that no user is syncing with an instance any more."""
        if command.instance_id == self._host.identity.instance_id:
            return None
        self._syncs.forget_process(command.instance_id)
        return self._host.commands.on_clear_user_sync(command.instance_id)

    def on_FEDERATION_ACK(
        self, connection: ReplicationConnection, command: FederationAckCommand
    ) -> _Waiting:
        """Notify the host of the token up to which a federation sender has sent."""
        return self._host.commands.on_federation_ack(
            command.instance_name, command.token
        )

    def on_USER_IP(
        self, connection: ReplicationConnection, command: UserIpCommand
    ) -> _Waiting:
        """Notify the host that a client was seen, if the host stores client IPs."""
        if not self._host.stores_user_ips:
            reason = DiscardReason.NOT_RESPONSIBLE
            self._observer.discarded(command.NAME, "", reason, 1)
            return None
        return self._host.commands.on_user_ip(
            command.user_id,
            command.access_token,
            command.ip,
            command.user_agent,
            command.device_id,
            command.last_seen,
        )

    def on_REMOTE_SERVER_UP(
        self, connection: ReplicationConnection, command: RemoteServerUpCommand
    ) -> _Waiting:
        """Notify the host that a remote server is reachable.

        Copies of the command on other links are discarded; see :meth:`_relay`.
        """
        if not self._relay(connection, command):
            return None
        return self._host.commands.on_remote_server_up(command.data)

    def on_LOCK_RELEASED(
        self, connection: ReplicationConnection, command: LockReleasedCommand
    ) -> _Waiting:
        """Notify the host that another instance released a lock.

        Copies of the command on other links are discarded; see :meth:`_relay`.
        """
        if command.instance_name == self._instance_name:
            return None
        if not self._relay(connection, command):
            return None
        return self._host.commands.on_lock_released(
            command.instance_name, command.lock_name, command.lock_key
        )

    def on_NEW_ACTIVE_TASK(
        self, connection: ReplicationConnection, command: NewActiveTaskCommand
    ) -> _Waiting:
        """Notify the host that a task is ready to run."""
        return self._host.commands.on_new_active_task(command.data)

    def on_CANCEL_TASK(
        self, connection: ReplicationConnection, command: CancelTaskCommand
    ) -> _Waiting:
        """Notify the host that a task is to be cancelled."""
        return self._host.commands.on_cancel_task(command.data)

    def on_REMOVE_PUSHER(
        self, connection: ReplicationConnection, command: RemovePusherCommand
    ) -> _Waiting:
        """Ask the host to remove a pusher, as an older peer requests."""
        return self._host.commands.on_remove_pusher(
            command.app_id, command.push_key, command.user_id
        )

    def on_INVALIDATE_CACHE(
        self, connection: ReplicationConnection, command: InvalidateCacheCommand
    ) -> _Waiting:
        """Ask the host to invalidate a cache entry, as an older peer requests."""
        return self._host.commands.on_invalidate_cache(command.cache_func, command.keys)

    def _relay(self, connection: ReplicationConnection, command: Command) -> bool:
        """Relay a command to the other peers that connected to this process.

        A copy is not relayed again. A command that arrived on a link that this process
        opened is not relayed, and no command is relayed on such a link: the server at
        the link's other end relays commands, too, so in a mesh the command would
        circulate for ever.

        :return: whether the command is not a copy and must be delivered to the host.
        """
        if len(self._links) < 2:
            # There is no peer to relay to, and no copy can arrive on another link.
            return True
        now = self._host.clock.seconds()
        if connection.relays and not self._relayed.is_copy(command, connection, now):
            for other in list(self._links):
                if other.relays and other is not connection:
                    self._send_to(other, command)
        if self._delivered.is_copy(command, connection, now):
            self._observer.discarded(command.NAME, "", DiscardReason.REPEATED, 1)
            return False
        return True
