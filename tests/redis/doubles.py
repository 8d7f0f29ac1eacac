"""Recorders, and a link without sockets, for the tests of Redis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import ISystemHandle
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.python.failure import Failure
from typing_extensions import override
from zope.interface import directlyProvides

from synapse_replication.handlers.events import (
    CommandsDropped,
    ConnectFailed,
    Event,
    FeatureUnavailable,
    LineRefused,
    LinkDown,
    LinkUp,
    OperationFailed,
)
from synapse_replication.handlers.interfaces import ReplicationConnection
from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import RedisOptions
from synapse_replication.wire.commands import PositionCommand, ReplicateCommand
from synapse_replication.wire.rdata import RdataGroup, ReceivedItem
from tests.support.recording_observer import RecordingObserver

_INFO = b"id=7 addr=203.0.113.7:4711 laddr=192.0.2.1:6379 fd=8 name= age=0\n"
#: The answer of Redis to CLIENT INFO.
CLIENT_INFO = b"$%d\r\n%b\r\n" % (len(_INFO), _INFO)


def rdata(token: int) -> bytes:
    """Return the line of a row."""
    return b"RDATA events writer %d [%d]" % (token, token)


def position(token: int) -> PositionCommand:
    """Return a POSITION of the writer at a token."""
    return PositionCommand("events", "writer", token, token)


class Events:
    """Records events in order, and allows waiting for them."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._waiting: list[tuple[Callable[[], bool], Deferred[None]]] = []

    def add(self, event: Any) -> None:
        self.all.append(event)
        for entry in list(self._waiting):
            condition, waiter = entry
            if condition():
                self._waiting.remove(entry)
                waiter.callback(None)

    def until(self, condition: Callable[[], bool]) -> Deferred[None]:
        """Fire once an event makes the condition true."""
        waiter: Deferred[None] = Deferred()
        if condition():
            waiter.callback(None)
        else:
            self._waiting.append((condition, waiter))
        return waiter


class OrderedObserver(RecordingObserver):
    """An observer that also adds events to those of a handler, in order."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    @override
    def observe(self, event: Event) -> None:
        super().observe(event)
        match event:
            case LinkUp(connection=connection):
                self._events.add(("made", connection))
            case LinkDown(connection=connection, reason=reason, why=why):
                self._events.add(("lost", connection, reason, why))
            case ConnectFailed(connection=connection, why=why, retry_in=delay):
                self._events.add(("again", connection, why, delay))
            case LineRefused(error=error):
                self._events.add(("refused", str(error)))
            case CommandsDropped(command=command, reason=cause, count=count):
                self._events.add(("commands_dropped", command, cause.value, count))
            case FeatureUnavailable(feature=feature, why=why):
                self._events.add(("unavailable", feature, why))
            case OperationFailed(what=what, error=failure):
                self._events.add(("failure", what, str(failure)))


class RecordingHandler:
    """A handler that sends REPLICATE on each connection and records received items.

    :ivar seen: the position that a reader would have.
    :ivar gaps: (position, token) of each row that arrived without the previous row.
    :ivar waits_for_position: skip rows until the writer's POSITION has arrived on the
        connection, as the command handler does.
    :ivar answer: called when a REPLICATE arrives.
    """

    def __init__(self, events: Events) -> None:
        self.events = events
        self.connection: ReplicationConnection | None = None
        self.chunks: list[Sequence[ReceivedItem]] = []
        self.seen = 0
        self.gaps: list[tuple[int, int]] = []
        self.waits_for_position = False
        self.answer: Callable[[], None] = lambda: None
        self._live = False

    def new_connection(self, connection: ReplicationConnection) -> None:
        self.connection = connection
        self._live = not self.waits_for_position
        self.events.add("new_connection")
        connection.send_command(ReplicateCommand())

    def ready_again(self, connection: ReplicationConnection) -> None:
        self.events.add("ready_again")

    def lost_connection(self, connection: ReplicationConnection) -> None:
        self.connection = None
        self.events.add("lost_connection")

    def received(
        self, connection: ReplicationConnection, items: Sequence[ReceivedItem]
    ) -> None:
        self.chunks.append(items)
        for item in items:
            if isinstance(item, RdataGroup) and self._live:
                for token in item.tokens:
                    assert token is not None
                    if token > self.seen + 1:
                        self.gaps.append((self.seen, token))
                    self.seen = max(self.seen, token)
            elif isinstance(item, ReplicateCommand):
                self.answer()
            elif isinstance(item, PositionCommand) and item.instance_name == "writer":
                self._live = True
                self.seen = max(self.seen, item.new_token)
        self.events.add("received")

    @property
    def items(self) -> list[ReceivedItem]:
        """All received items."""
        return [item for chunk in self.chunks for item in chunk]


class RecordingTransport(StringTransport):
    """A transport that records each write, and whether it was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.aborted = False
        directlyProvides(self, ISystemHandle)

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def abortConnection(self) -> None:
        self.aborted = True

    def take(self) -> list[bytes]:
        """Return the writes since the last call."""
        writes, self.writes = self.writes, []
        return writes


class MemoryLink:
    """A link on a reactor, clock and connections in memory.

    Connection 0 is the sending one, 1 the subscribed one.
    """

    def __init__(
        self,
        options: RedisOptions | None = None,
        channels: Sequence[str] = (),
        extension: Any = None,
    ) -> None:
        self.reactor = MemoryReactorClock()
        # So that the factories and connectors are those of the reactor.
        self.reactor.nameResolver = None  # type: ignore[assignment]
        self.events = Events()
        self.observer = OrderedObserver(self.events)
        self.handler = RecordingHandler(self.events)
        self.link = RedisReplicationLink(
            self.reactor,
            options or RedisOptions(),
            "hs",
            self.handler,
            self.observer,
            self.on_lost,
            channels,
            extension=extension,
        )
        self.link.start()
        #: The indexes of the connections that were attempted again.
        self.reconnections: list[int] = []
        for index, connector in enumerate(self.reactor.connectors):
            connector.connect = partial(self.reconnections.append, index)
        self.protocols: list[Any] = [None, None]
        self.transports: list[RecordingTransport] = []
        for index in (0, 1):
            self.transports.append(self.connect(index))

    def on_lost(self, count: int) -> None:
        self.events.add(("on_lost", count))
        self.link.sender.publish("POSITION", "hs", [b"POSITION events writer 9 9"])

    def factory(self, index: int) -> Any:
        """Return the factory of a connection."""
        return self.reactor.tcpClients[index][2]

    def connect(
        self, index: int, transport: RecordingTransport | None = None
    ) -> RecordingTransport:
        """Establish a connection."""
        factory = self.factory(index)
        factory.doStart()
        factory.startedConnecting(self.reactor.connectors[index])
        self.protocols[index] = protocol = factory.buildProtocol(None)
        transport = transport or RecordingTransport()
        protocol.makeConnection(transport)
        if len(self.transports) == 2:
            self.transports[index] = transport
        return transport

    def lose(self, index: int) -> None:
        """Close a connection from the peer's side."""
        reason = Failure(ConnectionDone())
        factory = self.factory(index)
        self.protocols[index].connectionLost(reason)
        factory.clientConnectionLost(self.reactor.connectors[index], reason)

    def greet(self) -> None:
        """Answer PING, after CLIENT KILL if it was sent."""
        killed = b"" if len(self.protocols[0]._awaited) < 2 else b":1\r\n"
        self.deliver_data(0, killed + b"+PONG\r\n")

    def acknowledge(self) -> None:
        """Answer everything that the sending connection awaits."""
        awaited = list(self.protocols[0]._awaited)
        self.deliver_data(
            0,
            b"".join(b":1\r\n" * count if count else CLIENT_INFO for count in awaited),
        )

    def establish(self) -> None:
        """Answer the handshakes of both connections."""
        self.greet()
        self.deliver_data(1, b"*3\r\n$9\r\nsubscribe\r\n$2\r\nhs\r\n:1\r\n")
        self.reactor.advance(0)
        self.acknowledge()
        for transport in self.transports:
            transport.take()

    def deliver_data(self, index: int, data: bytes) -> None:
        """Deliver data from Redis."""
        self.protocols[index].dataReceived(data)
