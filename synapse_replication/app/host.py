"""A host for use without a homeserver, and the shortest example of a host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from synapse_replication.app.outgoing_commands import CommandsOut
from synapse_replication.clock import BackgroundProcesses, ReactorClock
from synapse_replication.errors import CatchUpError, LocalProtocolError
from synapse_replication.handlers.data_handler import (
    LargestToken,
    ReplicationDataHandler,
)
from synapse_replication.handlers.host_parts import (
    StreamTable,
    SyncingUsers,
    WriteNotifier,
)
from synapse_replication.handlers.host_values import Identity
from synapse_replication.handlers.interfaces import CommandSink, RowSink
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.instrumentation.hooks import ReplicationHooks
from synapse_replication.redis.external_cache import ExternalCache
from synapse_replication.streams.stream import UpdateFunction
from synapse_replication.wire.commands import UserIpCommand


class PositionsOnlySink:
    """A row sink that ignores rows; the process still tracks the positions."""

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        """Ignore the rows."""

    def on_position(self, stream_name: str, instance_name: str, token: int) -> None:
        """Ignore the position."""


def _fail_without_client(name: str) -> UpdateFunction:
    raise CatchUpError(
        f"rows of {name} cannot be requested: this host has no HTTP client"
    )


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
    :param largest_token: returns the last id that a stream's sequence allocated;
        ``None`` without a database.
    """

    identity: Identity
    clock: ReactorClock
    observer: ReplicationObserver
    hooks: ReplicationHooks
    _stores_user_ips: bool = False
    fetch_from_writer: Callable[[str], UpdateFunction] = _fail_without_client
    _largest_token: LargestToken | None = None
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

    def set_sink(self, sink: RowSink) -> None:
        """Set the sink to which received rows are delivered."""
        self.rows = ReplicationDataHandler(
            self.streams.get_streams(),
            sink,
            self.clock,
            largest_token=self._largest_token,
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
