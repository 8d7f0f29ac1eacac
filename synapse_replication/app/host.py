"""A host for use without a homeserver, and the shortest example of a host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from synapse_replication.errors import LocalProtocolError
from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.data_handler import (
    LargestToken,
    ReplicationDataHandler,
)
from synapse_replication.handlers.host_parts import (
    MAX_USERS,
    BackgroundProcesses,
    ReactorClock,
    StreamTable,
    SyncingUsers,
    WriteNotifier,
)
from synapse_replication.handlers.interfaces import (
    CommandSink,
    Identity,
    RowSink,
    SyncingUser,
)
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.sending.unsent import SENDABLE
from synapse_replication.instrumentation.hooks import ReplicationHooks
from synapse_replication.recent import RecentDict
from synapse_replication.redis.external_cache import ExternalCache
from synapse_replication.streams.stream import UpdateFunction
from synapse_replication.wire.commands import Command, UserIpCommand, UserSyncCommand


class PositionsOnlySink:
    """A row sink that ignores rows; the process still tracks the positions."""

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        """Ignore the rows."""

    def on_position(self, stream_name: str, instance_name: str, token: int) -> None:
        """Ignore the position."""


class CommandsOut:
    """Sends commands without rows to the other instances: ``host.outgoing``.

    It is created before the command handler and connected to it later, so that the
    functions of ``modules`` can store it and subscribe to channels. While no link is
    up, the handler retains commands within a bound; see
    :mod:`~synapse_replication.handlers.sending.unsent`.

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


@attrs.define(eq=False)
class StandaloneHost:
    """A :class:`~synapse_replication.handlers.interfaces.ReplicationHost`.

    The functions that create the sinks take the host as an argument, so the host is
    created without sinks. The sinks are added before the functions of ``modules`` are
    called. The cache is added when the link is started.

    :ivar hooks: delivers events to subscribed callbacks.
    :ivar outgoing: sends commands to the other instances.
    :ivar commands: receives the commands of other instances: the configured
        ``command_sink``, or by default a :class:`.SyncingUsers`.
    :ivar observer: receives all events.
    :ivar rows: delivers received rows to the sink.
    :param stores_user_ips: whether this process stores client IPs, even if its code
        does not subscribe to ``USER_IP``.
    :ivar fetch_from_writer: returns, for the name of a stream held in memory, a
        function that requests its rows from their writers over HTTP, with retries.
    """

    identity: Identity
    clock: ReactorClock
    observer: ReplicationObserver
    hooks: ReplicationHooks
    fetch_from_writer: Callable[[str], UpdateFunction]
    _stores_user_ips: bool = False
    run_as_background_process: BackgroundProcesses = attrs.field(init=False)
    streams: StreamTable = attrs.field(factory=StreamTable, init=False)
    outgoing: CommandsOut = attrs.field(factory=CommandsOut, init=False)
    commands: CommandSink = attrs.field(init=False)
    notifier: WriteNotifier = attrs.field(factory=WriteNotifier, init=False)
    rows: ReplicationDataHandler = attrs.field(init=False)
    _cache: ExternalCache | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.run_as_background_process = BackgroundProcesses(self.observer)
        self.commands = SyncingUsers(own=self.outgoing.syncing_users)

    def set_sink(self, sink: RowSink, largest_token: LargestToken | None) -> None:
        """Set the sink to which received rows are delivered.

        :param largest_token: see :class:`.ReplicationDataHandler`.
        """
        streams = self.streams.get_streams()
        self.rows = ReplicationDataHandler(
            streams, sink, self.clock, largest_token=largest_token
        )
        self.notifier.add_replication_callback(self.rows.own_rows_written)

    def set_cache(self, cache: ExternalCache) -> None:
        """Set the cache that all processes share."""
        self._cache = cache

    @property
    def cache(self) -> ExternalCache:
        """The cache in Redis that all processes share; disabled without Redis.

        :raises LocalProtocolError: if replication has not started.
        """
        if self._cache is None:
            raise LocalProtocolError(
                "the cache cannot be used before replication starts; use it from the "
                "startService of a service that a module returns, or later"
            )
        return self._cache

    @property
    def stores_user_ips(self) -> bool:
        """Whether this process stores client IPs, or its code subscribes to them."""
        return self._stores_user_ips or UserIpCommand.NAME in self.outgoing.channels

    def row_to_json(self, stream_name: str, row: Any) -> Any:
        """Return the JSON value of a typed row."""
        stream = self.streams.get_streams()[stream_name]
        return stream.description.codec.to_json(row)
