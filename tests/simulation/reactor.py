"""The reactor of one simulated process, and its connector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.base import DelayedCall
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.protocol import ClientFactory
from twisted.python.failure import Failure

from tests.simulation.clock import SimulatedClock
from tests.simulation.network import (
    SERVER_ADDRESS,
    SimulatedNetwork,
)

#: The port on which processes accept connections of other processes.
PEER_PORT = 9092


class ProcessReactor:
    """The clock and the network of one epoch of a process.

    :ivar is_alive: whether the process runs; after its end, no scheduled call is made.
    """

    def __init__(
        self, clock: SimulatedClock, network: SimulatedNetwork, name: str
    ) -> None:
        self.name = name
        self.is_alive = True
        self._clock = clock
        self._network = network

    def kill(self) -> None:
        """End the process, as ``kill -9`` does."""
        self.is_alive = False
        self._network.process_died(self)

    def seconds(self) -> float:
        """Return the simulated time in s."""
        return self._clock.rightNow

    def callLater(
        self, delay: float, func: Callable[..., object], *args: object, **kw: object
    ) -> DelayedCall:
        """Call a function after ``delay`` s, if the process is then alive."""
        return self._clock.callLater(delay, self._call, func, args, kw)

    def callFromThread(
        self, func: Callable[..., object], *args: object, **kw: object
    ) -> None:
        """Call a function in the next turn of the simulated reactor."""
        self.callLater(0, func, *args, **kw)

    def _call(
        self, func: Callable[..., object], args: Any, kw: dict[str, object]
    ) -> None:
        if self.is_alive:
            func(*args, **kw)

    def connectTCP(
        self,
        host: str,
        port: int,
        factory: ClientFactory,
        timeout: float = 30,
        bindAddress: object = None,
    ) -> SimulatedConnector:
        """Begin a simulated connection.

        :param host: the name of the process to connect to, if ``port`` is
            :data:`PEER_PORT`; otherwise, the connection leads to the broker.
        """
        server = host if port == PEER_PORT else None
        connector = SimulatedConnector(self._network, self, factory, server)
        connector.connect()
        return connector


class SimulatedConnector:
    """The connector that a client factory uses to reconnect."""

    def __init__(
        self,
        network: SimulatedNetwork,
        reactor: ProcessReactor,
        factory: Any,
        server: str | None,
    ) -> None:
        self._network = network
        self._reactor = reactor
        self._server = server
        self.factory = factory
        self._role: str = factory.name if server is None else "tcp"
        self._attempt = 0

    def connect(self) -> None:
        """Begin an attempt to connect."""
        self._attempt += 1
        self.factory.doStart()
        self.factory.startedConnecting(self)
        delay = self._network.latency(self._reactor.name)
        self._reactor.callLater(delay, self._decide, self._attempt)

    def stopConnecting(self) -> None:
        """Stop the attempt in progress."""
        self._attempt += 1

    def disconnect(self) -> None:
        """Stop the attempt in progress; an established connection stays open."""
        self._attempt += 1

    def getDestination(self) -> None:
        """Return ``None``: simulated servers have no addresses."""

    def _decide(self, attempt: int) -> None:
        if attempt != self._attempt:
            return
        network, factory = self._network, self.factory
        if network.refuses(self._reactor.name, self._role, self._server):
            refused = Failure(ConnectionRefusedError())
            factory.clientConnectionFailed(self, refused)
            factory.doStop()
            return
        protocol = factory.buildProtocol(SERVER_ADDRESS)
        network.open(self._reactor, protocol, self._role, self.lost, self._server)

    def lost(self, failure: Failure) -> None:
        """Report to the factory that the connection is lost."""
        self.factory.clientConnectionLost(self, failure)
        self.factory.doStop()
