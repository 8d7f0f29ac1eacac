"""Doubles for the ends of a line connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock as TwistedClock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from synapse_replication.handlers.interfaces import DelayedCall, ReplicationConnection
from synapse_replication.tcp.protocol import BaseReplicationStreamProtocol
from synapse_replication.wire.rdata import RdataGroup, ReceivedItem


class FakeClock(TwistedClock):
    """Twisted's test clock with the interface of the host's clock."""

    def time_msec(self) -> int:
        return 1_700_000_000_000 + int(self.seconds() * 1000)

    def call_later(
        self, delay: float, func: Callable[..., object], *args: object
    ) -> DelayedCall:
        return self.callLater(delay, func, *args)

    async def sleep(self, delay: float) -> None:
        raise NotImplementedError

    def run(self, seconds: float, step: float = 0.5) -> None:
        """Advance the clock in small steps."""
        self.pump([step] * round(seconds / step))


class RecordingHandler:
    """A handler that records its calls.

    :ivar calls: ``"new"``, ``"lost"`` and every received item, in order.
    """

    def __init__(self) -> None:
        self.calls: list[str | ReceivedItem] = []
        self.connections: list[ReplicationConnection] = []
        self.on_received: Callable[[ReplicationConnection], object] | None = None

    def new_connection(self, connection: ReplicationConnection) -> None:
        self.calls.append("new")
        self.connections.append(connection)

    def received(
        self, connection: ReplicationConnection, items: Sequence[ReceivedItem]
    ) -> None:
        self.calls.extend(items)
        if self.on_received is not None:
            self.on_received(connection)

    def ready_again(self, connection: ReplicationConnection) -> None:
        raise AssertionError("no connection over direct TCP is ever behind")

    def lost_connection(self, connection: ReplicationConnection) -> None:
        self.calls.append("lost")
        self.connections.remove(connection)

    @property
    def rows(self) -> list[bytes]:
        """All received rows."""
        groups = [call for call in self.calls if isinstance(call, RdataGroup)]
        return [row for group in groups for row in group.rows]


class PausingTransport(StringTransport):
    """A transport with a send buffer of 64 KiB, as Twisted's own.

    :ivar buffer: written data that the peer has not read.
    :ivar aborted: whether the connection was aborted.
    """

    BUFFER_SIZE = 65536

    def __init__(self) -> None:
        super().__init__()
        self.buffer = b""
        self.most_buffered = 0
        self.aborted = False
        self._has_paused = False

    def write(self, data: bytes) -> None:
        self.buffer += data
        self.most_buffered = max(self.most_buffered, len(self.buffer))
        if len(self.buffer) > self.BUFFER_SIZE and self.producer is not None:
            self._has_paused = True
            self.producer.pauseProducing()

    def abortConnection(self) -> None:
        self.aborted = True
        super().abortConnection()

    def take(self, size: int) -> bytes:
        """Read ``size`` bytes as the peer."""
        taken, self.buffer = self.buffer[:size], self.buffer[size:]
        if not self.buffer and self._has_paused and self.producer is not None:
            self._has_paused = False
            self.producer.resumeProducing()
        return taken


class Link:
    """Two connected protocols; ``pump`` moves the data between them.

    :ivar is_cut: data is lost without notice to either end, as on a half-open
        connection.
    """

    def __init__(
        self, one: BaseReplicationStreamProtocol, other: BaseReplicationStreamProtocol
    ) -> None:
        self.is_cut = False
        self._is_lost = False
        self._ends = [(one, PausingTransport()), (other, PausingTransport())]
        for protocol, transport in self._ends:
            protocol.makeConnection(transport)

    @property
    def transports(self) -> list[PausingTransport]:
        return [transport for _, transport in self._ends]

    def pump(self, chunk: int = 10**9) -> None:
        """Move all data, at most ``chunk`` bytes at a time, and then finish closes."""
        while any(transport.buffer for _, transport in self._ends):
            for (_, transport), (peer, _) in (self._ends, self._ends[::-1]):
                data = transport.take(chunk)
                if data and not self.is_cut:
                    peer.dataReceived(data)
        if not self._is_lost and any(end.disconnecting for _, end in self._ends):
            self._is_lost = True
            for protocol, _ in self._ends:
                protocol.connectionLost(Failure(ConnectionDone()))
