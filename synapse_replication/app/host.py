"""A host for people who have no homeserver, and the shortest example of one."""

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
    """A row sink that wants no rows: the streams' positions are kept, that is all."""

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        """Do nothing with rows."""

    def on_position(self, stream_name: str, instance_name: str, token: int) -> None:
        """Do nothing with a position."""


@attrs.define(eq=False)
class StandaloneHost:
    """A :class:`~synapse_replication.handlers.interfaces.ReplicationHost`.

    ``rows`` is set once there is a sink, which may want the host; code that is
    plugged in by ``modules`` finds it set, and ``commands`` likewise.

    :ivar send: sends commands to the other instances.
    :ivar commands: receives theirs; the ``command_sink`` of the configuration, if it
        names one.

    :ivar observer: told of everything.
    :ivar hooks: lets code subscribe to what happens; set by the process.
    :ivar fetch_from_writer: makes, of the name of a stream held in memory, what
        asks its writers for rows over HTTP, with retries. For the code that is
        plugged in by ``modules``, too, and set as ``rows`` is.
    :ivar largest_token: returns the largest token of a stream that any writer may
        have allocated, beyond which ``rows`` waits for nothing; set by the process
        if it has a database.
    """

    identity: Identity
    clock: ReactorClock
    observer: ReplicationObserver
    run_as_background_process: BackgroundProcesses
    stores_user_ips: bool
    streams: StreamTable = attrs.field(factory=StreamTable)
    send: CommandsOut = attrs.field(init=False)
    commands: CommandSink = attrs.field(init=False)
    notifier: WriteNotifier = attrs.field(factory=WriteNotifier)
    rows: ReplicationDataHandler = attrs.field(init=False)
    hooks: ReplicationHooks = attrs.field(init=False)
    fetch_from_writer: Callable[[str], UpdateFunction] = attrs.field(init=False)
    largest_token: LargestToken | None = attrs.field(init=False, default=None)

    @classmethod
    def from_config(
        cls, config: ProcessConfig, clock: ReactorClock, observer: ReplicationObserver
    ) -> StandaloneHost:
        """Make the host of a process, as yet without streams and sink."""
        return cls(
            Identity(
                config.server_name, config.instance_name, secrets.token_urlsafe(12)
            ),
            clock,
            observer,
            BackgroundProcesses(observer),
            config.stores_user_ips,
        )

    def __attrs_post_init__(self) -> None:
        self.send = CommandsOut(self.identity, self.clock)
        self.commands = SyncingUsers(own=self.send.syncing_users)

    def set_sink(self, sink: RowSink) -> None:
        """Say where received rows go."""
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
    """Return where this process runs, in one word: the machine and the process id.

    Other instances show it to their operators.
    """
    machine = re.sub(r"[^\w.-]", "_", socket.gethostname())
    return f"{machine[:200]}:{os.getpid()}"
