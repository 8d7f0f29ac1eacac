"""The calls by which the code of a host uses a command handler.

They have the names and arguments of the handler's methods in Synapse, so that code
written for one runs on the other: ``send_<command>()`` sends a command to the other
instances, and ``on_<COMMAND>(connection, command)`` handles one that a connection of
the host's own has received. Both are thin: what they do is defined by
:class:`~synapse_replication.handlers.sending.command_sender.CommandSender` and
:class:`~synapse_replication.handlers.command_handler.ReplicationCommandHandler`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from synapse_replication.handlers.interfaces import (
    ReplicationConnection,
    ReplicationHost,
)
from synapse_replication.handlers.sending.command_sender import CommandSender
from synapse_replication.streams.stream import JsonValue, Stream
from synapse_replication.wire import commands
from synapse_replication.wire.rdata import ReceivedItem


class HostCalls:
    """The methods of a command handler that a host calls.

    Call them in the reactor's thread.

    :ivar host: the host.
    :ivar sender: sends this process's commands, rows and positions on all connections.
    """

    host: ReplicationHost
    sender: CommandSender

    def received(
        self, connection: ReplicationConnection, items: Sequence[ReceivedItem]
    ) -> None:
        """Handle items that arrived on a connection, in order."""
        raise NotImplementedError

    # -- streams ----------------------------------------------------------------------

    def get_streams(self) -> Mapping[str, Stream]:
        """Return the streams that this process follows, by name."""
        return self.host.streams.get_streams()

    def get_streams_to_replicate(self) -> Sequence[Stream]:
        """Return the streams that this process writes."""
        return self.host.streams.get_streams_to_replicate()

    async def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        """Deliver rows to the host's data handler, as if they had been received.

        :param rows: parsed rows of one token.
        """
        waiting = self.host.rows.on_rdata(stream_name, instance_name, token, rows)
        if waiting is not None:
            await waiting

    def stream_update(
        self, stream_name: str, token: int | None, data: JsonValue
    ) -> None:
        """Send one row immediately, without the streamer.

        :param token: the row's token; ``None`` if more rows of the same token follow.
        """
        self.sender.stream_update(stream_name, token, data)

    def send_positions_to_connection(self) -> None:
        """Announce the positions of the streams that this process writes."""
        self.sender.announce_positions()

    # -- sending ----------------------------------------------------------------------

    def connected(self) -> bool:
        """Return whether there is a link to send on."""
        return self.sender.connected()

    def send_command(self, cmd: commands.Command) -> None:
        """Send a command on every link, or retain it for the next link."""
        self.sender.send(cmd)

    def send_federation_ack(self, token: int) -> None:
        """Report the token up to which this federation sender has sent."""
        name = self.host.identity.instance_name
        self.sender.send(commands.FederationAckCommand(name, token))

    def send_user_sync(
        self,
        instance_id: str,
        user_id: str,
        device_id: str | None,
        is_syncing: bool,
        last_sync_ms: int,
    ) -> None:
        """Report that a user started, continues or stopped syncing.

        :param instance_id: the random id of the process with which the user syncs.
        :param last_sync_ms: when the user last synced, in ms since 1970.
        """
        self.sender.send(
            commands.UserSyncCommand(
                instance_id, user_id, device_id, is_syncing, last_sync_ms
            )
        )

    def send_user_ip(
        self,
        user_id: str,
        access_token: str,
        ip: str,
        user_agent: str,
        device_id: str | None,
        last_seen: int,
    ) -> None:
        """Report that a client was seen.

        :param last_seen: when it was seen, in ms since 1970.
        """
        self.sender.send(
            commands.UserIpCommand(
                user_id, access_token, ip, user_agent, device_id, last_seen
            )
        )

    def send_remote_server_up(self, server: str) -> None:
        """Report that a remote server is reachable again."""
        self.sender.send(commands.RemoteServerUpCommand(server))

    def send_remove_pusher(self, app_id: str, push_key: str, user_id: str) -> None:
        """Ask the main process to remove a pusher."""
        self.sender.send(commands.RemovePusherCommand(app_id, push_key, user_id))

    def send_invalidate_cache(
        self, cache_func: str, keys: Sequence[JsonValue] | None
    ) -> None:
        """Ask the main process to invalidate a cache everywhere.

        :param cache_func: the name of the cached function.
        :param keys: the arguments of the stale entry; ``None`` for the whole cache.
        """
        arguments = None if keys is None else list(keys)
        self.sender.send(commands.InvalidateCacheCommand(cache_func, arguments))

    def send_new_active_task(self, task_id: str) -> None:
        """Report that a task is ready to run."""
        self.sender.send(commands.NewActiveTaskCommand(task_id))

    def send_cancel_task(self, task_id: str) -> None:
        """Report that a task was cancelled: the process that runs it ends it."""
        self.sender.send(commands.CancelTaskCommand(task_id))

    def on_lock_released(
        self, instance_name: str, lock_name: str, lock_key: str
    ) -> None:
        """Send LOCK_RELEASED if a lock of this process was released."""
        if instance_name == self.host.identity.instance_name:
            self.sender.send(
                commands.LockReleasedCommand(instance_name, lock_name, lock_key)
            )

    # -- receiving --------------------------------------------------------------------

    def receive_command(self, connection: Any, command: Any) -> None:
        """Handle a command that a connection of the host has received."""
        self.received(connection, [command])

    def _receive(self, conn: Any, cmd: Any) -> None:
        self.receive_command(conn, cmd)

    async def _receive_awaitable(self, conn: Any, cmd: Any) -> None:
        self.receive_command(conn, cmd)

    on_CANCEL_TASK = _receive_awaitable
    on_CLEAR_USER_SYNC = _receive
    on_FEDERATION_ACK = _receive
    on_INVALIDATE_CACHE = _receive
    on_LOCK_RELEASED = _receive
    on_NEW_ACTIVE_TASK = _receive
    on_POSITION = _receive
    on_RDATA = _receive
    on_REMOTE_SERVER_UP = _receive
    on_REMOVE_PUSHER = _receive
    on_REPLICATE = _receive
    on_USER_IP = _receive
    on_USER_SYNC = _receive
