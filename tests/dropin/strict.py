"""A strict host, in which the classes of the drop-in run.

Its clock jumps, its transports have no sockets, and its Redis, like the doubles in a
homeserver's own tests, supports only the commands for publishing and subscribing: any
other command raises an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IConsumer, ITCPTransport
from twisted.internet.protocol import Protocol
from twisted.internet.testing import MemoryReactorClock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import directlyProvides

from synapse_replication.dropin import redis_factories
from synapse_replication.redis.resp import ReplyParser, encode
from tests.dropin.host import FakeClock, FakeStream, HostWithHandler, fake_modules

#: The time until a write reaches the other end, in s.
LATENCY = 0.01


class MemoryTransport:
    """One end of a connection without sockets.

    Data reaches the other end in a later turn of the reactor, even if the clock jumps.
    The transport claims to be TCP, but has no handle.

    :ivar written: data that has not reached the other end.
    """

    disconnecting = False

    def __init__(self, reactor: MemoryReactorClock) -> None:
        self._reactor = reactor
        self.written = b""
        self.protocol: Any = None
        self.other: Any = None
        self._closed = False
        directlyProvides(self, ITCPTransport, IConsumer)

    def write(self, data: bytes) -> None:
        self.written += data
        self._reactor.callLater(LATENCY, self._deliver)

    def _deliver(self) -> None:
        data, self.written = self.written, b""
        if data and not self.other._closed:
            try:
                self.other.protocol.dataReceived(data)
            except Exception:
                self.loseConnection()
                raise

    def loseConnection(self) -> None:
        if not self._closed:
            for end in (self, self.other):
                end._closed = True
                end.protocol.connectionLost(Failure(ConnectionDone()))

    def abortConnection(self) -> None:
        self.loseConnection()

    def registerProducer(self, producer: object, streaming: bool) -> None: ...

    def unregisterProducer(self) -> None: ...

    def getPeer(self) -> IPv4Address:
        return IPv4Address("TCP", "192.0.2.1", 6379)

    def getHost(self) -> IPv4Address:
        return self.getPeer()

    def setTcpNoDelay(self, enabled: bool) -> None: ...


def join(reactor: MemoryReactorClock, one: Any, other: Any) -> MemoryTransport:
    """Connect two protocols; return the transport of the first."""
    ends = MemoryTransport(reactor), MemoryTransport(reactor)
    for end, peer, protocol in zip(ends, reversed(ends), (one, other), strict=True):
        end.other, end.protocol = peer, protocol
    for end in ends:
        end.protocol.makeConnection(end)
    return ends[0]


class UnknownCommandError(Exception):
    """Raised for a command that neither publishes nor subscribes."""


class StrictRedis:
    """A Redis for publishing and subscribing.

    Any other command raises an exception.

    :ivar commands: the names of the received commands, in order.
    :ivar errors: the raised exceptions.
    """

    def __init__(self) -> None:
        self.commands: list[bytes] = []
        self.errors: list[Exception] = []
        self.subscribers: list[tuple[bytes, Any]] = []

    def connection(self) -> Protocol:
        """Return the server's end of a connection."""
        return _ServerEnd(self)


class _ServerEnd(Protocol):
    transport: Any

    def __init__(self, server: StrictRedis) -> None:
        self._server = server
        self._reader = ReplyParser()

    def dataReceived(self, data: bytes) -> None:
        self._reader.feed(data)
        while (command := self._reader.gets()) is not False:
            try:
                self._answer(*command)
            except UnknownCommandError as error:
                self._server.errors.append(error)
                raise

    def _answer(self, name: bytes, *arguments: bytes) -> None:
        server, write = self._server, self.transport.write
        server.commands.append(name)
        if name == b"PING":
            write(b"+PONG\r\n" if self not in self._all() else encode(b"pong", b""))
        elif name == b"SUBSCRIBE":
            for channel in arguments:
                server.subscribers.append((channel, self))
                text = encode(b"subscribe", channel)
                write(text.replace(b"*2", b"*3", 1) + b":1\r\n")
        elif name == b"PUBLISH":
            channel, message = arguments
            found = [end for known, end in server.subscribers if known == channel]
            for end in found:
                end.transport.write(encode(b"message", channel, message))
            write(b":%d\r\n" % len(found))
        else:
            raise UnknownCommandError(name)

    def _all(self) -> list[Any]:
        return [end for _, end in self._server.subscribers]

    def connectionLost(self, reason: Any = None) -> None:
        self._server.subscribers = [
            (channel, end)
            for channel, end in self._server.subscribers
            if end is not self
        ]


class StrictReactor(MemoryReactorClock):
    """A reactor that connects every client to one Redis in memory.

    :ivar transports: the clients' transports, in the order of connecting.
    """

    def __init__(self, server: StrictRedis) -> None:
        super().__init__()
        self._server = server
        self.transports: list[MemoryTransport] = []

    def connectTCP(  # type: ignore[override]
        self, host: str, port: int, factory: Any, **_: object
    ) -> Any:
        connector = SimpleNamespace(
            disconnect=lambda: None,
            stopConnecting=lambda: None,
            connect=None,
            getDestination=lambda: IPv4Address("TCP", host, port),
        )

        def connect() -> None:
            factory.doStart()
            factory.startedConnecting(connector)
            protocol = factory.buildProtocol(None)
            lost = protocol.connectionLost

            def connection_lost(reason: Failure) -> None:
                lost(reason)
                factory.clientConnectionLost(connector, reason)

            protocol.connectionLost = connection_lost
            self.transports.append(join(self, protocol, self._server.connection()))

        connector.connect = connect
        connect()
        return connector


class StrictCluster:
    """The homeservers of several instances in a strict host.

    :param make_streams: for each name, the function that creates the stream.
    """

    def __init__(
        self,
        test: SynchronousTestCase,
        names: tuple[str, ...],
        make_streams: Mapping[str, Callable[[Any], FakeStream]],
        writers: Mapping[str, list[str]],
    ) -> None:
        fake_modules(
            test,
            make_streams,
            {
                "synapse.replication.tcp.redis": {
                    **vars(redis_factories),
                    "SynapseRedisFactory": redis_factories.DropInRedisFactory,
                }
            },
        )
        self.server = StrictRedis()
        self.reactor = StrictReactor(self.server)
        self.hosts: dict[str, Any] = {}
        for name in names:
            hs: Any = HostWithHandler(
                name, writers=SimpleNamespace(presence=["master"], **writers)
            )
            hs.get_instance_id = name.upper
            hs.reactor, hs.clock = self.reactor, FakeClock(self.reactor)
            hs.config.redis = SimpleNamespace(
                redis_enabled=True,
                redis_path=None,
                redis_use_tls=False,
                redis_host="r",
                redis_port=6379,
                redis_password=None,
            )
            outbound = redis_factories.lazyConnection(hs, host="r", port=6379)
            hs.get_outbound_redis_connection = lambda outbound=outbound: outbound
            self.hosts[name] = hs

    def start(self) -> None:
        """Start replication in every instance, and let the links come up."""
        for hs in self.hosts.values():
            hs.get_replication_command_handler().start_replication(hs)
        self.run(2)

    def run(self, seconds: float) -> None:
        """Advance the clock in steps of 0.1 s."""
        self.reactor.pump([0.1] * round(seconds * 10))
