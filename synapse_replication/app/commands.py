"""Commands that the code of a stand-alone process sends.

Theory of operation: :class:`CommandsOut` is the attribute ``send`` of the host. It is
created before the command handler and connected to it later, so that the functions of
``modules`` can store it and subscribe to channels. While no link is up, the handler
retains commands within a bound; see
:mod:`~synapse_replication.handlers.sending.unsent`.
"""

from __future__ import annotations

from collections.abc import Iterable

from synapse_replication.errors import LocalProtocolError
from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.handlers.host_parts import MAX_USERS
from synapse_replication.handlers.interfaces import Clock, Identity, SyncingUser
from synapse_replication.recent import RecentDict


class CommandsOut:
    """Sends commands without rows to the other instances: ``host.send``.

    Call its methods in the reactor's thread. Commands may be sent once the process
    starts its services (``startService``). Subscribe to channels earlier, in the
    functions of ``modules``.

    :param identity: the identity of this process.
    :param clock: supplies the time of commands that are sent without one.
    """

    def __init__(self, identity: Identity, clock: Clock) -> None:
        self._identity = identity
        self._clock = clock
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
            Subscribe to ``USER_IP`` to have the command sink's ``on_user_ip`` called.
        :raises LocalProtocolError: if replication has started.
        """
        if self._handler is not None:
            self._handler.subscribe_to_channel(channel_name)
        if channel_name not in self._channels:
            self._channels.append(channel_name)

    # -- sending ----------------------------------------------------------------------

    def send_user_sync(
        self,
        user_id: str,
        device_id: str | None,
        is_syncing: bool,
        last_sync_ms: int | None = None,
    ) -> None:
        """Report that a user started or stopped syncing with this process.

        On each new link, the users that the command sink returns are reported again;
        the default sink returns those of :meth:`syncing_users`. When a worker stops, it
        withdraws its syncing users; the main process does not.

        :param last_sync_ms: when the user was last seen, in ms since the Unix epoch;
            by default the current time.
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
        """Return the users that are syncing with this process.

        At most :data:`~synapse_replication.handlers.host_parts.MAX_USERS` are returned:
        those that were reported last.
        """
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
        """Report a client's address to the instance that stores addresses.

        :param last_seen_ms: when the client was seen, in ms since the Unix epoch; by
            default the current time.
        """
        if last_seen_ms is None:
            last_seen_ms = self._clock.time_msec()
        self._connected().send_user_ip(
            user_id, access_token, ip, user_agent, device_id, last_seen_ms
        )

    def send_federation_ack(self, token: int) -> None:
        """Acknowledge the rows of the stream ``federation`` up to a token."""
        self._connected().send_federation_ack(token)

    def send_remote_server_up(self, server: str) -> None:
        """Report that a remote server is reachable again."""
        self._connected().send_remote_server_up(server)

    def send_lock_released(self, lock_name: str, lock_key: str) -> None:
        """Report that this process released a lock."""
        self._connected().send_lock_released(
            self._identity.instance_name, lock_name, lock_key
        )

    def send_new_active_task(self, task_id: str) -> None:
        """Report that a new task is ready to run."""
        self._connected().send_new_active_task(task_id)

    def send_cancel_task(self, task_id: str) -> None:
        """Request that a task be cancelled."""
        self._connected().send_cancel_task(task_id)

    def _connected(self) -> ReplicationCommandHandler:
        if self._handler is None:
            raise LocalProtocolError(
                "commands cannot be sent before replication starts; send from the "
                "startService of a service that a module returns, or later"
            )
        return self._handler
