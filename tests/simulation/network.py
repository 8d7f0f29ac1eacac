"""The network between processes, and to the broker: unreliable TCP connections.

Each direction of a connection is a :class:`Pipe`: bytes arrive late and in order, but
writes may be joined or split on arrival. A pipe may be *cut*: then it accepts bytes and
delivers none, without any notification (a half-open connection).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

import attrs
from twisted.internet.address import IPv4Address
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import ISystemHandle
from twisted.python.failure import Failure
from zope.interface import implementer

from tests.simulation.clock import SimulatedClock

#: The address of every server: only names matter.
SERVER_ADDRESS = IPv4Address("TCP", "127.0.0.1", 6379)


class Owner(Protocol):
    """One epoch of the process that has a connection.

    :ivar name: the name of the process.
    :ivar is_alive: whether it runs; nothing is delivered to a dead process.
    """

    name: str
    is_alive: bool

    def callLater(
        self, delay: float, func: Callable[..., object], *args: object
    ) -> object:
        """Call a function after ``delay`` s, if the process is then alive."""
        ...

    def when_running(self, func: Callable[..., object], *args: object) -> None:
        """Call a function now, or when the process resumes, if it is then alive."""


class Session(Protocol):
    """The server's end of a connection.

    :ivar reactor: the epoch of the server's process; ``None`` for the broker.
    """

    @property
    def reactor(self) -> Owner | None: ...

    def begin(self) -> None:
        """Begin, after the client's end."""
        ...

    def received(self, data: bytes) -> None:
        """Process bytes of the client."""
        ...

    def lost(self) -> None:
        """Record that the connection is closed."""
        ...


class ServerFactory(Protocol):
    """A process's factory of protocols for the connections that it accepts."""

    def buildProtocol(self, addr: Any) -> Any:
        """Return a protocol; ``None`` to refuse the connection."""
        ...


@attrs.define
class Splitting:
    """How a write is split on arrival.

    :ivar chance: the probability of a split.
    :ivar seconds: the maximum delay between the two parts, in s.
    """

    chance: float = 0.1
    seconds: float = 0.002


class Pipe:
    """One direction of a connection.

    :param latency: returns the latency in s for each write.
    :param splitting: how writes are split on arrival.
    :param deliver: called with the bytes that arrive.
    :param at_end: called when the end arrives, after all bytes that were written before
        :meth:`end`.
    :ivar in_flight: the number of bytes that were written and have not arrived.
    :ivar is_cut: whether to accept bytes without delivering them.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        random: Random,
        latency: Callable[[], float],
        splitting: Splitting,
        deliver: Callable[[bytes], object],
        at_end: Callable[[], object],
    ) -> None:
        self.in_flight = 0
        self.is_cut = False
        self._splitting = splitting
        self._clock = clock
        self._random = random
        self._latency = latency
        self._deliver = deliver
        self._at_end = at_end
        self._queue: deque[tuple[float, bytes | None]] = deque()
        self._last = 0.0
        self._is_due = False
        self._is_closed = False

    def write(self, data: bytes) -> None:
        """Send bytes, which arrive after all earlier ones, unless the pipe is cut."""
        if not self._is_closed and not self.is_cut:
            self.in_flight += len(data)
            self._put(data)

    def end(self) -> None:
        """Send the end of the connection; nothing can be sent after it."""
        if not self._is_closed and not self.is_cut:
            self._put(None)
        self._is_closed = True

    def end_within(self, seconds: float) -> None:
        """Discard the bytes that would arrive too late, then send the end.

        :param seconds: the time within which bytes must arrive, in s.
        """
        limit = self._clock.rightNow + seconds
        while self._queue and self._queue[-1][0] > limit:
            self._queue.pop()
        self._last = min(self._last, limit)
        self.end()

    def close(self) -> None:
        """Discard the bytes in flight, and deliver nothing more."""
        self._is_closed = True
        self._queue.clear()

    def _put(self, data: bytes | None) -> None:
        self._last = max(self._last, self._clock.rightNow + self._latency())
        self._queue.append((self._last, data))
        self._schedule()

    def _schedule(self) -> None:
        if self._queue and not self._is_due:
            self._is_due = True
            delay = max(0.0, self._queue[0][0] - self._clock.rightNow)
            self._clock.callLater(delay, self._deliver_due)

    def _deliver_due(self) -> None:
        self._is_due = False
        now = self._clock.rightNow
        data = []
        ended = False
        while self._queue and self._queue[0][0] <= now:
            piece = self._queue.popleft()[1]
            if piece is None:
                ended = True
            else:
                data.append(piece)
        joined = b"".join(data)
        if joined and not ended and self._random.random() < self._splitting.chance:
            cut = self._random.randrange(len(joined))
            joined, second = joined[:cut], joined[cut:]
            later = now + self._random.random() * self._splitting.seconds
            self._queue.appendleft((later, second))
            self._last = max(self._last, later)
        self.in_flight -= len(joined)
        self._schedule()
        if joined and not self.is_cut:
            self._deliver(joined)
        if ended and not self.is_cut:
            self._at_end()


@implementer(ISystemHandle)
class SimulatedTransport:
    """A process's end of a connection.

    It claims to have a socket: what was written may arrive after the connection was
    lost at this end, so the sender must fence it.

    :param write: sends bytes.
    :param close: closes the connection, for a reason.
    """

    disconnecting = False

    def __init__(
        self,
        address: IPv4Address,
        write: Callable[[bytes], object],
        close: Callable[[Exception], object],
    ) -> None:
        self._address = address
        self._close = close
        self.write = write
        self.connected = True

    def writeSequence(self, data: list[bytes]) -> None:
        self.write(b"".join(data))

    def loseConnection(self) -> None:
        self.disconnecting = True
        self._close(ConnectionDone())

    def abortConnection(self) -> None:
        self.disconnecting = True
        self._close(ConnectionLost())

    def registerProducer(self, producer: object, streaming: bool) -> None:
        """Do nothing: writes are too small to need flow control."""

    def unregisterProducer(self) -> None: ...

    def pauseProducing(self) -> None: ...

    def resumeProducing(self) -> None: ...

    def setTcpNoDelay(self, enabled: bool) -> None: ...

    def setTcpKeepAlive(self, enabled: bool) -> None: ...

    def getHandle(self) -> None:
        """Return ``None``: no real socket needs to be configured."""

    def getPeer(self) -> IPv4Address:
        return SERVER_ADDRESS

    def getHost(self) -> IPv4Address:
        return self._address


class PeerSession:
    """The end of the process that accepted a connection."""

    def __init__(self, connection: Connection, reactor: Owner, protocol: Any) -> None:
        self.reactor = reactor
        self._protocol = protocol
        self._transport = SimulatedTransport(
            connection.address,
            connection.session_writes,
            lambda why: connection.end_session(),
        )

    def begin(self) -> None:
        self.reactor.when_running(self._protocol.makeConnection, self._transport)

    def received(self, data: bytes) -> None:
        self.reactor.when_running(self._protocol.dataReceived, data)

    def lost(self) -> None:
        self._transport.connected = False
        self.reactor.callLater(
            0, self._protocol.connectionLost, Failure(ConnectionDone())
        )


class Connection:
    """One connection of a process to the broker, or to another process.

    :param protocol: the client's protocol, which :meth:`begin` connects.
    :param role: ``redis`` subscribes, ``redis_out`` sends, and ``tcp`` leads to another
        process.
    :param lost: called with the reason, after ``connectionLost`` of the protocol.
    :ivar is_open: whether the connection is open from the client's point of view.
    :ivar address: the unique address of the client's end.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        reactor: Owner,
        protocol: Any,
        session_factory: Callable[[Connection], Session],
        role: str,
        lost: Callable[[Failure], object],
    ) -> None:
        self.reactor = reactor
        self.role = role
        self.is_open = True
        self.address = IPv4Address("TCP", "127.0.0.1", network.next_port())
        self._network = network
        self._lost = lost
        self._protocol = protocol
        self._session = session_factory(self)
        self._session_open = True

        def latency() -> float:
            return network.latency(*self.process_names)

        clock, random = network.clock, network.random
        self.up = Pipe(
            clock,
            random,
            latency,
            network.splitting,
            self._session_receives,
            self.end_session,
        )
        self.down = Pipe(
            clock,
            random,
            latency,
            network.splitting,
            self._client_receives,
            self._peer_left,
        )
        self.transport = SimulatedTransport(
            self.address, self.client_writes, self.client_closes
        )

    @property
    def process_names(self) -> list[str]:
        """The names of the client and, unless that is the broker, of the server."""
        server = self._session.reactor
        return [self.reactor.name] + ([] if server is None else [server.name])

    def begin(self) -> None:
        """Connect the protocols."""
        self._protocol.makeConnection(self.transport)
        self._session.begin()

    # -- the client's end -------------------------------------------------------------

    def client_writes(self, data: bytes) -> None:
        """Send bytes to the server."""
        if self.is_open and self.reactor.is_alive:
            data = self._network.before_write(self.reactor.name, self, self.up, data)
            if self.is_open:
                self.up.write(data)

    def client_closes(self, why: Exception) -> None:
        """Close the client's end of the connection."""
        if self.is_open:
            self.up.end()
            self._client_lost(why)

    def process_died(self, reactor: Owner) -> None:
        """Close a process's end as the kernel does; the protocol is not notified."""
        if self._session.reactor is reactor and self._session_open:
            self._session_open = False
            self.down.end_within(0.5)
            self._network.forget(self)
        elif self.reactor is reactor and self.is_open:
            self.is_open = False
            # Bytes of this epoch must not arrive after those of the next one.
            self.up.end_within(0.5)
            self.down.close()

    def _client_receives(self, data: bytes) -> None:
        if self.is_open:
            self.reactor.when_running(self._protocol.dataReceived, data)

    def _peer_left(self) -> None:
        self._client_lost(ConnectionDone())

    def _client_lost(self, why: Exception) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self.down.close()
        self.reactor.callLater(0, self._notify_client, Failure(why))

    def _notify_client(self, failure: Failure) -> None:
        self.transport.connected = False
        self._protocol.connectionLost(failure)
        self._lost(failure)

    # -- the server's end -------------------------------------------------------------

    def session_writes(self, data: bytes) -> None:
        """Send bytes of the process that accepted the connection to the client."""
        server = self._session.reactor
        assert server is not None
        if self._session_open and server.is_alive:
            data = self._network.before_write(server.name, self, self.down, data)
            if self._session_open:
                self.down.write(data)

    def _session_receives(self, data: bytes) -> None:
        if self._session_open:
            self._session.received(data)

    def end_session(self) -> None:
        """Close the server's end."""
        if self._session_open:
            self._session_open = False
            self._session.lost()
            self.down.end()
            self._network.forget(self)

    # -- faults ------------------------------------------------------------------------

    def reset(self, *, in_flight_arrives: bool) -> None:
        """Lose the connection at both ends.

        :param in_flight_arrives: whether bytes that were sent to the server still
            arrive, before the server's end is closed.
        """
        if not in_flight_arrives:
            self.up.close()
            self.down.close()
        self.up.end()
        self._client_lost(ConnectionLost())
        if not in_flight_arrives:
            self.end_session()


class SimulatedNetwork:
    """All connections, and their faults.

    :ivar before_write: called with the name of a process, one of its connections, the
        pipe and the bytes before these are written; it may end the connection or the
        process, and returns the bytes to write.
    :ivar splitting: how writes are split on arrival, on all connections.
    :ivar slowness: the factor of the latencies, by process.
    :ivar refused: the (process, role) pairs whose connections are refused.
    :ivar broker_is_up: whether the broker accepts connections.
    :ivar listeners: the processes that accept connections, and their factories.
    """

    def __init__(self, clock: SimulatedClock, random: Random) -> None:
        self.clock = clock
        self.random = random
        self.splitting = Splitting()
        self.connections: list[Connection] = []
        self.slowness: dict[str, float] = {}
        self.refused: set[tuple[str, str]] = set()
        self.broker_is_up = True
        self.broker_session: Callable[[Connection], Session] | None = None
        self.before_write: Callable[[str, Connection, Pipe, bytes], bytes] = (
            lambda name, connection, pipe, data: data
        )
        self.listeners: dict[str, tuple[Owner, ServerFactory]] = {}
        self._last_port = 40_000

    def next_port(self) -> int:
        """Return an unused port."""
        self._last_port += 1
        return self._last_port

    def latency(self, *names: str) -> float:
        """Return the latency in s of a message to or from these processes."""
        slowness = max(self.slowness.get(name, 1.0) for name in names)
        return (0.001 + self.random.random() * 0.02) * slowness

    def refuses(self, name: str, role: str, server: str | None = None) -> bool:
        """Return whether a connection would be refused now.

        :param server: the name of the process to connect to; ``None`` for the broker.
        """
        if server is None:
            return not self.broker_is_up or (name, role) in self.refused
        refusing = {(name, role), (server, role)} & self.refused
        return server not in self.listeners or bool(refusing)

    def open(
        self,
        reactor: Owner,
        protocol: Any,
        role: str,
        lost: Callable[[Failure], object],
        server: str | None = None,
    ) -> Connection:
        """Open a connection; see :class:`Connection` and :meth:`refuses`."""
        make_session = self.broker_session
        if server is not None:
            owner, factory = self.listeners[server]
            accepted = factory.buildProtocol(SERVER_ADDRESS)

            def make_session(connection: Connection) -> Session:
                return PeerSession(connection, owner, accepted)

        assert make_session is not None
        connection = Connection(self, reactor, protocol, make_session, role, lost)
        self.connections.append(connection)
        connection.begin()
        return connection

    def listen(self, reactor: Owner, factory: ServerFactory) -> None:
        """Accept connections to a process."""
        self.listeners[reactor.name] = reactor, factory

    def process_died(self, reactor: Owner) -> None:
        """Close all connections of an epoch whose process has died."""
        if self.listeners.get(reactor.name, (None,))[0] is reactor:
            del self.listeners[reactor.name]
        for connection in list(self.connections):
            connection.process_died(reactor)

    def of_process(self, name: str, role: str | None = None) -> list[Connection]:
        """Return the open connections of a process."""
        return [
            connection
            for connection in self.connections
            if name in connection.process_names
            and connection.is_open
            and role in (None, connection.role)
        ]

    def forget(self, connection: Connection) -> None:
        """Remove a connection that is closed at the broker's end."""
        if connection in self.connections:
            self.connections.remove(connection)
