"""Twisted factories of the line protocol: a server and a reconnecting client."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, Final

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone, NotConnectingError
from twisted.internet.interfaces import IAddress, IConnector, IStreamClientEndpoint
from twisted.internet.protocol import ServerFactory
from twisted.python.failure import Failure
from typing_extensions import override
from zope.interface import implementer

from synapse_replication.errors import RemoteProtocolError
from synapse_replication.handlers import events
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.interfaces import (
    Clock,
    ConnectionHandler,
    DelayedCall,
)
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.waiters import Waiters
from synapse_replication.tcp.protocol import (
    BaseReplicationStreamProtocol,
    ClientReplicationStreamProtocol,
    ServerReplicationStreamProtocol,
    host_of,
)
from synapse_replication.text import outgoing_label
from synapse_replication.transport.error_text import destination, explain
from synapse_replication.transport.reconnecting import BackoffClientFactory
from synapse_replication.wire.close_reason import CloseReason
from synapse_replication.wire.pending_lines import PendingLimit

#: Default limit of the simultaneous connections of a factory, from all its listeners.
MAX_CONNECTIONS: Final = 500
#: Close reasons after which the delay is not reset, because the next link will probably
#: be closed for the same reason.
_PROTOCOL_FAILURES: Final = (CloseReason.PEER_ERROR, CloseReason.PROTOCOL_ERROR)


@attrs.define(eq=False, repr=False, slots=False)
class ReplicationStreamProtocolFactory(ServerFactory):
    """Factory for the server's end of connections.

    It works with any stream endpoint (``tcp:``, ``ssl:``, ``unix:``). To shut down,
    stop the port first, then wait for :meth:`close_connections`.

    :param limit: the limit of lines buffered for a peer that reads too slowly.
    :param extension: handles the extension; ``None`` to disable it.
    :param max_connections: the limit of simultaneous connections. At the limit, the
        oldest connection on which no NAME has arrived is closed to make room for a new
        one; if there is none, the new connection is refused.
    :ivar connections: the open connections.
    """

    noisy = False

    server_name: str
    _clock: Clock
    _handler: ConnectionHandler
    _observer: ReplicationObserver
    _limit: PendingLimit | None = attrs.field(default=None, kw_only=True)
    _extension: ReplicationExtension | None = attrs.field(default=None, kw_only=True)
    _max_connections: int = attrs.field(default=MAX_CONNECTIONS, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.connections: list[BaseReplicationStreamProtocol] = []
        self._waiters = Waiters()

    @override
    def buildProtocol(
        self, addr: IAddress | None
    ) -> BaseReplicationStreamProtocol | None:
        if len(self.connections) >= self._max_connections and not self._make_room():
            self._observer.observe(
                events.LineRefused(
                    f"the client {host_of(addr)}",
                    RemoteProtocolError(
                        f"{self._max_connections} peers are already connected, the "
                        "maximum of synapse_replication.direct_tcp.max_connections"
                    ),
                )
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
        """Close every connection gracefully.

        :return: a Deferred that fires when the last connection is closed, after 25 s
            at the latest.
        """
        done = self._waiters.add()
        for connection in tuple(self.connections):
            connection.close()
        self._notify_if_done()
        return done

    def buffers(self) -> list[events.ConnectionBuffers]:
        """Return the fill levels of each connection's buffers."""
        return [connection.buffers() for connection in self.connections]

    def _make_room(self) -> bool:
        silent = next((c for c in self.connections if not c.is_established), None)
        if silent is None:
            return False
        silent.abort()
        # The transport may report the disconnection only later; make room now.
        self._forget(silent)
        return True

    def _forget(self, protocol: BaseReplicationStreamProtocol) -> None:
        with contextlib.suppress(ValueError):
            self.connections.remove(protocol)

    def _closed(self, protocol: BaseReplicationStreamProtocol) -> None:
        self._forget(protocol)
        self._notify_if_done()

    def _notify_if_done(self) -> None:
        if not self.connections:
            self._waiters.fire()


@implementer(IConnector)
class _EndpointConnector:
    """A connector for an endpoint. Unlike the reactor's, it reports only failures."""

    def __init__(
        self,
        factory: DirectTcpReplicationClientFactory,
        endpoint: IStreamClientEndpoint,
    ) -> None:
        self._factory = factory
        self._endpoint = endpoint
        self._attempt: Deferred[Any] | None = None

    def connect(self) -> None:
        self._attempt = attempt = self._endpoint.connect(self._factory)
        attempt.addCallbacks(self._connected, self._failed)

    def stopConnecting(self) -> None:
        if self._attempt is None:
            raise NotConnectingError
        self._attempt.cancel()

    def disconnect(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()
        elif self._factory.connection is not None:
            self._factory.connection.close()

    def getDestination(self) -> Any:
        """Return ``None``: the address of an endpoint is not known."""
        return None

    def _connected(self, _: object) -> None:
        self._attempt = None

    def _failed(self, reason: Failure) -> None:
        self._attempt = None
        self._factory.clientConnectionFailed(self, reason)


@attrs.define(eq=False, repr=False, slots=False)
class DirectTcpReplicationClientFactory(BackoffClientFactory):
    """A ``ReconnectingClientFactory``, which reconnects until :meth:`stop`.

    Pass it to the reactor's ``connectTCP``, ``connectSSL`` or ``connectUNIX``, or
    call :meth:`connect` with any stream endpoint. A factory connects to one server, and
    cannot be used again after :meth:`stop`.

    The delay between attempts grows to 5 s. It is reset when an established link is
    lost (SERVER had been received with the expected name), unless the server sent ERROR
    or violated the protocol. A server that closes every connection with ERROR, or
    before it has sent SERVER, is therefore not flooded with attempts.

    The links are reported as ``to ADDRESS``.

    :param client_name: the name of this instance.
    :param jitter: returns a number from 0 to 1, which shortens each delay by up to
        half, so that many clients of one server do not reconnect at the same moment.
    :param limit: the limit of lines buffered for a server that reads too slowly.
    :param extension: handles the extension; ``None`` to disable it.
    """

    # Jitter shortens each of these delays.
    initialDelay = 0.5  # noqa: N815
    maxDelay = 5.0  # noqa: N815
    factor = 1.7
    protocol = ClientReplicationStreamProtocol

    client_name: str
    server_name: str
    _clock: Clock
    _handler: ConnectionHandler
    _observer: ReplicationObserver
    backoff_jitter: Callable[[], float] = attrs.field(
        default=random.random, alias="jitter"
    )
    _limit: PendingLimit | None = attrs.field(default=None, kw_only=True)
    _extension: ReplicationExtension | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.connection: BaseReplicationStreamProtocol | None = None
        self._where = ""
        #: Why the last attempt failed; empty if its link was established.
        self._why = ""
        self._stopped: Deferred[None] | None = None

    def connect(self, endpoint: IStreamClientEndpoint, where: str = "") -> None:
        """Start connecting to an endpoint.

        :param where: the endpoint's address for log lines, for instance ``HOST:PORT``.
        """
        self._where = where
        self.connector = _EndpointConnector(self, endpoint)
        self.connector.connect()

    def stop(self) -> Deferred[None]:
        """Close the connection gracefully and do not reconnect.

        :return: a Deferred that fires when the connection is closed, after 25 s at the
            latest.
        """
        if self._stopped is None:
            self._stopped = Deferred()
            self.stopTrying()  # type: ignore[no-untyped-call]
            if self.connection is not None:
                self.connection.close()
            else:
                self._stopped.callback(None)
        return self._stopped

    def buffers(self) -> list[events.ConnectionBuffers]:
        """Return the fill levels of the connection's buffers."""
        return [] if self.connection is None else [self.connection.buffers()]

    # -- from Twisted ---------------------------------------------------------------

    @override
    def startedConnecting(self, connector: IConnector) -> None:
        self.connector = connector
        self._where = destination(connector)

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
            label=self._label,
        )
        protocol.factory = self
        self.connection = protocol
        return protocol

    @override
    def clientConnectionFailed(self, connector: IConnector, reason: Failure) -> None:
        self._why = explain(reason.value)
        super().clientConnectionFailed(connector, reason)  # type: ignore[no-untyped-call]

    @override
    def call_later(
        self, delay: float, func: Callable[..., object], *args: object
    ) -> DelayedCall:
        return self._clock.call_later(delay, func, *args)

    @override
    def retry_scheduled(self, connector: IConnector, delay: float) -> None:
        if self._why:
            self._observer.observe(
                events.ConnectFailed(self._label or self.client_name, self._why, delay)
            )

    # -- inside ---------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return outgoing_label(self._where) if self._where else ""

    def _closed(self, protocol: BaseReplicationStreamProtocol) -> None:
        self.connection = None
        if not protocol.is_established:
            self._why = f"the link was not established: {protocol.close_text}"
        else:
            self._why = ""
            if protocol.close_reason not in _PROTOCOL_FAILURES:
                self.retries = 0
        if self._stopped is not None:
            self._stopped.callback(None)
        elif isinstance(self.connector, _EndpointConnector):
            # An endpoint, unlike the reactor's connectors, does not report the loss.
            self.clientConnectionLost(self.connector, Failure(ConnectionDone()))  # type: ignore[no-untyped-call]
