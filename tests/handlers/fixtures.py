"""A command handler with one connection, for the tests of receiving."""

from __future__ import annotations

import attrs

from synapse_replication.handlers.command_handler import (
    HandlerOptions,
    ReplicationCommandHandler,
)
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.handlers.timer import Backoff
from synapse_replication.testing.doubles import MemoryConnection, SourceStream
from synapse_replication.wire.rdata import read_lines
from tests.support.recording_observer import RecordingHost


@attrs.frozen
class Row:
    """A row with one text."""

    text: str


@attrs.define
class Receiving:
    """A handler and everything around it.

    :ivar stream: the first of the host's streams.
    """

    host: RecordingHost
    handler: ReplicationCommandHandler
    connection: MemoryConnection
    stream: SourceStream

    def receive(self, *lines: str, connection: MemoryConnection | None = None) -> None:
        """Deliver lines to the handler in one chunk."""
        self.handler.received(
            connection or self.connection, read_lines([line.encode() for line in lines])
        )

    def connect(self, name: str = "another") -> MemoryConnection:
        """Add a connection."""
        connection = MemoryConnection(name)
        self.handler.new_connection(connection)
        return connection

    def reconnect(self) -> None:
        """Lose the connection and establish another one."""
        self.handler.lost_connection(self.connection)
        self.connection = self.connect("memory")

    def texts(self) -> list[tuple[str, int, list[str]]]:
        """Return (writer, token, texts) of the rows delivered."""
        return [
            (writer, token, [row.text for row in rows])
            for _, writer, token, rows in self.host.rows.rows
        ]

    def run_pending_calls(self) -> None:
        """Run the calls that are due now."""
        self.host.reactor.advance(0)


def receiving(
    *more: SourceStream,
    receiver: ReceiverOptions | None = None,
    page_rows: int = 100,
    idempotent: bool = False,
    resettable: bool = False,
    held_in_memory: bool = False,
    observer: ReplicationObserver | None = None,
) -> Receiving:
    """Build a handler that follows ``events`` and has one connection.

    :param observer: used in place of the host's.

    Retries back off from 1 s to at most 8 s, without jitter.
    """
    stream = SourceStream(
        "events",
        Row,
        page_rows=page_rows,
        idempotent=idempotent,
        resettable=resettable,
        held_in_memory=held_in_memory,
    )
    host = RecordingHost(stream, *more)
    options = receiver or ReceiverOptions()
    options = attrs.evolve(options, backoff=Backoff(1.0, 8.0, jitter=lambda: 0.0))
    handler = ReplicationCommandHandler(
        host, observer or host.observer, options=HandlerOptions(receiver=options)
    )
    connection = MemoryConnection()
    handler.new_connection(connection)
    connection.take()
    return Receiving(host, handler, connection, stream)
