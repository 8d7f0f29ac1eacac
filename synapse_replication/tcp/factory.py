"""Factories of the line protocol: one that listens, one that keeps a link up."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Final

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import (
    IAddress,
    IConnector,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import ClientFactory, ServerFactory
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.backoff import Backoff
from synapse_replication.handlers.extension.extension import ExtensionHandler
from synapse_replication.handlers.interfaces import (
    Clock,
    ConnectionHandler,
    DelayedCall,
)
from synapse_replication.handlers.observer import (
    ConnectionBuffers,
    ReplicationObserver,
)
from synapse_replication.tcp.protocol import (
    BaseReplicationStreamProtocol,
    ClientReplicationStreamProtocol,
    ServerReplicationStreamProtocol,
)
from synapse_replication.transport.failures import at, destination
from synapse_replication.transport.tls import explain
from synapse_replication.wire.connection import CloseReason, PendingLimit

__all__ = [
    "MAX_CONNECTIONS",
    "DirectTcpReplicationClientFactory",
    "ReplicationStreamProtocolFactory",
]

#: The delay before the first new attempt, and the longest one, in s.
INITIAL_DELAY: Final = 0.5
MAX_DELAY: Final = 5.0
#: Connections of a listener that are open at a time, unless it is configured.
MAX_CONNECTIONS: Final = 500
#: By how much the delay grows from one attempt to the next.
GROWTH: Final = 1.7
#: After these the link was of no use: the peer, or we, took offence.
_USELESS: Final = (CloseReason.PEER_ERROR, CloseReason.PROTOCOL_ERROR)


class ReplicationStreamProtocolFactory(ServerFactory):
    """Makes the server's end of each connection.

    Listen with it on any stream endpoint (``tcp:``, ``ssl:``, ``unix:``). To stop,
    stop the port first, then wait for :meth:`close_connections`.

    :param limit: how much may wait for each peer that does not read.
    :param extension: speaks the extension with peers that do.
    :param max_connections: that are open at a time. To make room for one more, the one
        that has waited longest without a NAME is closed; if none does, the new one is.
    :ivar connections: those that are open.
    """

    noisy = False

    def __init__(
        self,
        server_name: str,
        clock: Clock,
        handler: ConnectionHandler,
        observer: ReplicationObserver,
        *,
        limit: PendingLimit | None = None,
        extension: ExtensionHandler | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.server_name = server_name
        self._max_connections = max_connections
        self.connections: list[BaseReplicationStreamProtocol] = []
        self._clock = clock
        self._handler = handler
        self._observer = observer
        self._limit = limit
        self._extension = extension
        self._waiting: list[Deferred[None]] = []

    @override
    def buildProtocol(
        self, addr: IAddress | None
    ) -> BaseReplicationStreamProtocol | None:
        if len(self.connections) >= self._max_connections and not self._make_room():
            self._observer.failure(
                "accepting a direct TCP connection",
                ConnectionError(
                    f"{self._max_connections} peers are connected, as many as "
                    "direct_tcp.max_connections allows"
                ),
            )
            return None
        protocol = ServerReplicationStreamProtocol(
            self.server_name,
            self._clock,
            self._handler,
            self._observer,
            self._closed,
            limit=self._limit,
            extension=self._extension,
        )
        protocol.factory = self
        self.connections.append(protocol)
        return protocol

    def close_connections(self) -> Deferred[None]:
        """Close every connection in good order.

        :return: fires when the last one is gone, 25 s later at most.
        """
        done: Deferred[None] = Deferred()
        self._waiting.append(done)
        for connection in tuple(self.connections):
            connection.close()
        self._tell_if_done()
        return done

    def buffers(self) -> list[ConnectionBuffers]:
        """Look how much waits in the buffers of each connection."""
        return [connection.buffers() for connection in self.connections]

    def _make_room(self) -> bool:
        silent = next((c for c in self.connections if not c.is_established), None)
        if silent is None:
            return False
        silent.abort()
        # Its transport may tell of its end later.
        self._forget(silent)
        return True

    def _forget(self, protocol: BaseReplicationStreamProtocol) -> None:
        with contextlib.suppress(ValueError):
            self.connections.remove(protocol)

    def _closed(self, protocol: BaseReplicationStreamProtocol) -> None:
        self._forget(protocol)
        self._tell_if_done()

    def _tell_if_done(self) -> None:
        if not self.connections:
            waiting, self._waiting = self._waiting, []
            for done in waiting:
                done.callback(None)


class DirectTcpReplicationClientFactory(ClientFactory):
    """Keeps a connection to a server up, for ever, until :meth:`stop`.

    Give it to the reactor's ``connectTCP``, ``connectSSL`` or ``connectUNIX``, or
    call :meth:`connect` with any stream endpoint; one of these, once.

    The delay between attempts grows to 5 s. It starts anew only after a link that
    was up (SERVER was seen) and did not end by an ERROR of either end: a server
    that accepts and then closes is not hammered.

    :param client_name: what this process calls itself.
    :param jitter: gives a number from 0 to 1, by which a delay is shortened, to
        half at most: many clients of one server do not all come back at once.
    :param limit: how much may wait for a server that does not read.
    :param extension: speaks the extension, if the server does.
    """

    noisy = False
    protocol: type[ClientReplicationStreamProtocol] = ClientReplicationStreamProtocol

    def __init__(
        self,
        client_name: str,
        server_name: str,
        clock: Clock,
        handler: ConnectionHandler,
        observer: ReplicationObserver,
        jitter: Callable[[], float] = random.random,
        *,
        limit: PendingLimit | None = None,
        extension: ExtensionHandler | None = None,
    ) -> None:
        self.client_name = client_name
        self.server_name = server_name
        self.connection: BaseReplicationStreamProtocol | None = None
        self._clock = clock
        self._handler = handler
        self._observer = observer
        self._backoff = Backoff(INITIAL_DELAY, MAX_DELAY, GROWTH, jitter)
        self._limit = limit
        self._extension = extension
        self._failures = 0
        self._where = ""
        self._try: Callable[[], object] = _nothing
        self._give_up: Callable[[], object] = _nothing
        self._retry: DelayedCall | None = None
        self._stopped: Deferred[None] | None = None

    def connect(self, endpoint: IStreamClientEndpoint, where: str = "") -> None:
        """Begin to connect by an endpoint.

        :param where: it connects to, for log lines: a ``HOST:PORT`` or the like.
        """
        self._where = where

        def connect() -> None:
            attempt = endpoint.connect(self)
            self._give_up = attempt.cancel
            attempt.addErrback(self._failed)

        self._try = connect
        connect()

    def stop(self) -> Deferred[None]:
        """Close the connection in good order and make no other.

        :return: fires when it is gone, 25 s later at most.
        """
        if self._stopped is None:
            self._stopped = Deferred()
            if self.connection is not None:
                self.connection.close()
            else:
                if self._retry is not None and self._retry.active():
                    self._retry.cancel()
                else:
                    self._give_up()
                self._stopped.callback(None)
        return self._stopped

    def buffers(self) -> list[ConnectionBuffers]:
        """Look how much waits in the connection's buffers."""
        return [] if self.connection is None else [self.connection.buffers()]

    # -- from Twisted ---------------------------------------------------------------

    @override
    def startedConnecting(self, connector: IConnector) -> None:
        self._where = destination(connector)
        self._try = connector.connect
        self._give_up = connector.stopConnecting

    @override
    def buildProtocol(self, addr: IAddress | None) -> BaseReplicationStreamProtocol:
        protocol = self.protocol(
            self.client_name,
            self.server_name,
            self._clock,
            self._handler,
            self._observer,
            self._closed,
            limit=self._limit,
            extension=self._extension,
        )
        protocol.factory = self
        self.connection = protocol
        return protocol

    @override
    def clientConnectionFailed(self, connector: IConnector, reason: Failure) -> None:
        self._failed(reason)

    # -- inside ---------------------------------------------------------------------

    def _failed(self, reason: Failure) -> None:
        if self._stopped is None:
            assert reason.value is not None
            self._try_again(explain(reason.value))

    def _closed(self, protocol: BaseReplicationStreamProtocol) -> None:
        self.connection = None
        if self._stopped is not None:
            self._stopped.callback(None)
        elif protocol.is_established:
            if protocol.close_reason not in _USELESS:
                self._failures = 0
            self._try_again(None)
        else:
            self._try_again(f"no link was made: {protocol.close_text}")

    def _try_again(self, why: str | None) -> None:
        self._failures += 1
        delay = self._backoff.delay(self._failures)
        if why is not None:
            self._observer.connection_failed(
                self.client_name, at(self._where, why), delay
            )
        self._retry = self._clock.call_later(delay, self._try)


def _nothing() -> None:
    """Stand for what there is not yet."""
