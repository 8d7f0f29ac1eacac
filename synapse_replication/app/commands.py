"""Commands that the code of a stand-alone process sends.

Theory of operation: :class:`CommandsOut` is what code inside a process calls
``host.send``. It exists before the command handler does, so that code which is plugged
in by ``modules`` can keep it and subscribe to channels at once; it is connected to the
handler right after. What it sends while there is no link is kept by the handler.
"""

from __future__ import annotations

from collections.abc import Iterable

from synapse_replication.errors import LocalProtocolError
from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.handlers.host_parts import MAX_USERS
from synapse_replication.handlers.interfaces import Clock, Identity, SyncingUser
from synapse_replication.recent import RecentDict

__all__ = ["CommandsOut"]


class CommandsOut:
    """Sends commands without rows to the other instances: ``host.send``.

    For the reactor's thread. Commands may be sent once the process starts its services
    (``startService``); channels are subscribed to before, when ``modules`` are called.

    :param identity: of this process.
    :param clock: for the times of commands that are sent without one.
    """

    def __init__(self, identity: Identity, clock: Clock) -> None:
        self._identity = identity
        self._clock = clock
        self._handler: ReplicationCommandHandler | None = None
        self._channels: list[str] = []
        # (user_id, device_id) -> last_sync_ms, the oldest first.
        self._syncing: RecentDict[tuple[str, str | None], int] = RecentDict(MAX_USERS)

    def connect(self, handler: ReplicationCommandHandler) -> None:
        """Send through a handler from now on. For the process alone."""
        self._handler = handler
        for channel in self._channels:
            handler.subscribe_to_channel(channel)

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels that were subscribed to before replication starts."""
        return tuple(self._channels)

    def subscribe_to_channel(self, channel_name: str) -> None:
        """Receive what is published on a Redis channel besides the main one.

        :param channel_name: what follows ``<server_name>/``; ``USER_IP`` has the
            command sink's ``on_user_ip`` called.
        :raises LocalProtocolError: if replication has started.
        """
        if self._handler is not None:
            self._handler.subscribe_to_channel(channel_name)
        elif channel_name not in self._channels:
            self._channels.append(channel_name)

    # -- sending ----------------------------------------------------------------------

    def send_user_sync(
        self,
        user_id: str,
        device_id: str | None,
        is_syncing: bool,
        last_sync_ms: int | None = None,
    ) -> None:
        """Announce that a user began or ceased to sync with this process.

        Users who sync are announced again on each new link, and taken back when the
        process stops.

        :param last_sync_ms: when the user was last seen, in ms since the epoch; now
            if not given.
        """
        if last_sync_ms is None:
            last_sync_ms = self._clock.time_msec()
        handler = self._connected()
        key = user_id, device_id
        self._syncing.pop(key, None)
        if is_syncing:
            self._syncing[key] = last_sync_ms
        handler.send_user_sync(
            self._identity.instance_id, user_id, device_id, is_syncing, last_sync_ms
        )

    def syncing_users(self) -> Iterable[SyncingUser]:
        """Return the users who sync with this process, as they were announced."""
        return [
            SyncingUser(user_id, device_id, last_sync_ms)
            for (user_id, device_id), last_sync_ms in self._syncing.items()
        ]

    def send_user_ip(
        self,
        user_id: str,
        access_token: str,
        ip: str,
        user_agent: str,
        device_id: str | None,
        last_seen_ms: int | None = None,
    ) -> None:
        """Report that a client was seen, to the instance that stores addresses.

        :param last_seen_ms: in ms since the epoch; now if not given.
        """
        if last_seen_ms is None:
            last_seen_ms = self._clock.time_msec()
        self._connected().send_user_ip(
            user_id, access_token, ip, user_agent, device_id, last_seen_ms
        )

    def send_federation_ack(self, token: int) -> None:
        """Announce up to which token this federation sender has sent."""
        self._connected().send_federation_ack(token)

    def send_remote_server_up(self, server: str) -> None:
        """Announce that a remote server is reachable again."""
        self._connected().send_remote_server_up(server)

    def send_lock_released(self, lock_name: str, lock_key: str) -> None:
        """Announce that this process released a lock."""
        self._connected().send_lock_released(
            self._identity.instance_name, lock_name, lock_key
        )

    def send_new_active_task(self, task_id: str) -> None:
        """Announce that a task waits to be run."""
        self._connected().send_new_active_task(task_id)

    def send_cancel_task(self, task_id: str) -> None:
        """Announce that a task is to be cancelled."""
        self._connected().send_cancel_task(task_id)

    def _connected(self) -> ReplicationCommandHandler:
        if self._handler is None:
            raise LocalProtocolError(
                "commands cannot be sent before replication starts; send from the "
                "startService of a service that a module returns, or later"
            )
        return self._handler
