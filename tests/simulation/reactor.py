"""The reactor of one simulated process, and its connector."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
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


@attrs.frozen(eq=False)
class _Held:
    """What a process does when it resumes.

    :ivar call: the call that it is; ``None`` if something arrived.
    """

    run: Callable[[], object]
    call: DelayedCall | None = None


class ProcessReactor:
    """The clock and the network of one epoch of a process.

    :ivar is_alive: whether the process exists; after its end, no call is made.
    """

    def __init__(
        self, clock: SimulatedClock, network: SimulatedNetwork, name: str
    ) -> None:
        self.name = name
        self.is_alive = True
        self._clock = clock
        self._network = network
        #: What waits until the process resumes, in order; ``None`` while it runs.
        self._held: deque[_Held] | None = None

    def kill(self) -> None:
        """End the process, as ``kill -9`` does."""
        self.is_alive = False
        self._network.process_died(self)

    def suspend(self) -> None:
        """Suspend the process, as SIGSTOP does: its connections stay open."""
        self._held = deque()

    @property
    def is_suspended(self) -> bool:
        """Whether the process is suspended."""
        return self._held is not None

    def resume(self) -> None:
        """Resume the process, and make the calls that were due meanwhile, in order."""
        held, self._held = self._held or deque(), None
        while held and self.is_alive:
            waiting = held.popleft()
            if waiting.call is not None:
                waiting.call.called = 1
            waiting.run()

    def when_running(self, func: Callable[..., object], *args: object) -> None:
        """Call a function now, or when the process resumes."""
        if self._held is not None:
            self._held.append(_Held(lambda: func(*args)))
        elif self.is_alive:
            func(*args)

    def seconds(self) -> float:
        """Return the simulated time in s."""
        return self._clock.rightNow

    def callLater(
        self, delay: float, func: Callable[..., object], *args: object, **kw: object
    ) -> DelayedCall:
        """Call a function after ``delay`` s, if the process is then alive."""
        call = self._clock.callLater(
            delay, lambda: self._make(call, lambda: func(*args, **kw))
        )
        return call

    def callFromThread(
        self, func: Callable[..., object], *args: object, **kw: object
    ) -> None:
        """Call a function in the next turn of the simulated reactor."""
        self.callLater(0, func, *args, **kw)

    def _make(self, call: DelayedCall, run: Callable[[], object]) -> None:
        held = self._held
        if held is None:
            if self.is_alive:
                run()
            return
        waiting = _Held(run, call)
        held.append(waiting)
        # It can still be cancelled.
        call.called = 0
        call.canceller = lambda _: held.remove(waiting)

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
