"""A host for use without a homeserver, and the shortest example of a host."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable
from typing import Any

import attrs

from synapse_replication.app.commands import CommandsOut
from synapse_replication.clock import BackgroundProcesses, ReactorClock
from synapse_replication.config.process import ProcessConfig
from synapse_replication.handlers.data import LargestToken, ReplicationDataHandler
from synapse_replication.handlers.host_parts import (
    StreamTable,
    SyncingUsers,
    WriteNotifier,
)
from synapse_replication.handlers.interfaces import CommandSink, Identity, RowSink
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.instrumentation.hooks import ReplicationHooks
from synapse_replication.streams.stream import UpdateFunction

__all__ = ["PositionsOnlySink", "StandaloneHost", "process_label"]


class PositionsOnlySink:
    """A row sink that ignores rows; the process still tracks the positions."""

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        """Ignore the rows."""

    def on_position(self, stream_name: str, instance_name: str, token: int) -> None:
        """Ignore the position."""


@attrs.define(eq=False)
class StandaloneHost:
    """A :class:`~synapse_replication.handlers.interfaces.ReplicationHost`.

    ``rows``, ``commands`` and ``fetch_from_writer`` are set before the functions of
    ``modules`` are called; the sink is created before, because it may need the host.

    :ivar send: sends commands to the other instances.
    :ivar commands: receives the commands of other instances; the configured
        ``command_sink``, if there is one.
    :ivar observer: receives all events.
    :ivar hooks: delivers events to subscribed callbacks.
    :ivar fetch_from_writer: returns, for the name of a stream held in memory, a
        function that requests its rows from their writers over HTTP, with retries.
    :ivar largest_token: returns the largest token of a stream that any writer may
        have allocated, beyond which ``rows`` never waits; set by the process if it has
        a database.
    """

    identity: Identity
    clock: ReactorClock
    observer: ReplicationObserver
    run_as_background_process: BackgroundProcesses
    stores_user_ips: bool
    hooks: ReplicationHooks
    streams: StreamTable = attrs.field(factory=StreamTable)
    send: CommandsOut = attrs.field(init=False)
    commands: CommandSink = attrs.field(init=False)
    notifier: WriteNotifier = attrs.field(factory=WriteNotifier)
    rows: ReplicationDataHandler = attrs.field(init=False)
    fetch_from_writer: Callable[[str], UpdateFunction] = attrs.field(init=False)
    largest_token: LargestToken | None = attrs.field(init=False, default=None)

    @classmethod
    def from_config(
        cls,
        config: ProcessConfig,
        clock: ReactorClock,
        observer: ReplicationObserver,
        hooks: ReplicationHooks,
    ) -> StandaloneHost:
        """Return the host of a process, still without streams and sink."""
        return cls(
            Identity(
                config.server_name, config.instance_name, secrets.token_urlsafe(12)
            ),
            clock,
            observer,
            BackgroundProcesses(observer),
            config.stores_user_ips,
            hooks,
        )

    def __attrs_post_init__(self) -> None:
        self.send = CommandsOut(self.identity, self.clock)
        self.commands = SyncingUsers(own=self.send.syncing_users)

    def set_sink(self, sink: RowSink) -> None:
        """Set the sink to which received rows are delivered."""
        self.rows = ReplicationDataHandler(
            self.streams.get_streams(),
            sink,
            self.clock,
            largest_token=self._find_largest_token,
        )
        self.notifier.add_replication_callback(self.rows.own_rows_written)

    async def _find_largest_token(self, stream_name: str) -> int | None:
        find = self.largest_token
        return None if find is None else await find(stream_name)

    def row_to_json(self, stream_name: str, row: Any) -> Any:
        """Return the JSON value of a typed row."""
        stream = self.streams.get_streams()[stream_name]
        return stream.description.codec.to_json(row)


def process_label() -> str:
    """Return the label of this process for operators, ``machine:pid``."""
    machine = re.sub(r"[^\w.-]", "_", socket.gethostname())
    return f"{machine[:200]}:{os.getpid()}"
