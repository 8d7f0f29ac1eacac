"""Twisted factories of the line protocol: a server and a reconnecting client."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Final

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IConnector, IStreamClientEndpoint
from twisted.internet.protocol import ClientFactory, ServerFactory
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.errors import RemoteProtocolError
from synapse_replication.handlers import events
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.interfaces import Clock, ConnectionHandler
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.timer import Backoff, Timer
from synapse_replication.tcp.protocol import (
    BaseReplicationStreamProtocol,
    ClientReplicationStreamProtocol,
    ServerReplicationStreamProtocol,
)
from synapse_replication.text import outgoing_label
from synapse_replication.transport.error_text import destination, explain
from synapse_replication.wire.close_reason import CloseReason
from synapse_replication.wire.pending_lines import PendingLimit

#: The delay before the first reconnection attempt, and the longest delay, in s. Jitter
#: shortens each of them.
INITIAL_DELAY: Final = 0.5
MAX_RECONNECT_DELAY: Final = 5.0
#: Default limit of the simultaneous connections of a factory, from all its listeners.
MAX_CONNECTIONS: Final = 500
#: The factor between the delays of successive attempts.
GROWTH: Final = 1.7
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
        self._waiting: list[Deferred[None]] = []

    @override
    def buildProtocol(
        self, addr: IAddress | None
    ) -> BaseReplicationStreamProtocol | None:
        if len(self.connections) >= self._max_connections and not self._make_room():
            host = getattr(addr, "host", "a Unix socket")
            self._observer.observe(
                events.LineRefused(
                    f"the client {host}",
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
        done: Deferred[None] = Deferred()
        self._waiting.append(done)
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
            waiting, self._waiting = self._waiting, []
            for done in waiting:
                done.callback(None)


@attrs.define(eq=False, repr=False, slots=False)
class DirectTcpReplicationClientFactory(ClientFactory):
    """Client factory that reconnects until :meth:`stop`.

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

    noisy = False
    protocol = ClientReplicationStreamProtocol

    client_name: str
    server_name: str
    _clock: Clock
    _handler: ConnectionHandler
    _observer: ReplicationObserver
    _jitter: Callable[[], float] = random.random
    _limit: PendingLimit | None = attrs.field(default=None, kw_only=True)
    _extension: ReplicationExtension | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.connection: BaseReplicationStreamProtocol | None = None
        self._backoff = Backoff(
            INITIAL_DELAY, MAX_RECONNECT_DELAY, GROWTH, self._jitter
        )
        self._failures = 0
        self._where = ""
        self._start_attempt: Callable[[], object] = _do_nothing
        self._cancel_attempt: Callable[[], object] = _do_nothing
        self._retry = Timer(self._clock)
        self._stopped: Deferred[None] | None = None

    def connect(self, endpoint: IStreamClientEndpoint, where: str = "") -> None:
        """Start connecting to an endpoint.

        :param where: the endpoint's address for log lines, for instance ``HOST:PORT``.
        """
        self._where = where

        def connect() -> None:
            attempt = endpoint.connect(self)
            self._cancel_attempt = attempt.cancel
            attempt.addErrback(self._failed)

        self._start_attempt = connect
        connect()

    def stop(self) -> Deferred[None]:
        """Close the connection gracefully and do not reconnect.

        :return: a Deferred that fires when the connection is closed, after 25 s at the
            latest.
        """
        if self._stopped is None:
            self._stopped = Deferred()
            if self.connection is not None:
                self.connection.close()
            else:
                if self._retry.is_running:
                    self._retry.stop()
                else:
                    self._cancel_attempt()
                self._stopped.callback(None)
        return self._stopped

    def buffers(self) -> list[events.ConnectionBuffers]:
        """Return the fill levels of the connection's buffers."""
        return [] if self.connection is None else [self.connection.buffers()]

    # -- from Twisted ---------------------------------------------------------------

    @override
    def startedConnecting(self, connector: IConnector) -> None:
        self._where = destination(connector)
        self._start_attempt = connector.connect
        self._cancel_attempt = connector.stopConnecting

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
        self._failed(reason)

    # -- inside ---------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return outgoing_label(self._where) if self._where else ""

    def _failed(self, reason: Failure) -> None:
        if self._stopped is None:
            self._schedule_retry(explain(reason.value))

    def _closed(self, protocol: BaseReplicationStreamProtocol) -> None:
        self.connection = None
        if self._stopped is not None:
            self._stopped.callback(None)
        elif protocol.is_established:
            if protocol.close_reason not in _PROTOCOL_FAILURES:
                self._failures = 0
            self._schedule_retry(None)
        else:
            self._schedule_retry(f"the link was not established: {protocol.close_text}")

    def _schedule_retry(self, reason: str | None) -> None:
        self._failures += 1
        delay = self._backoff.delay(self._failures)
        if reason is not None:
            self._observer.observe(
                events.ConnectFailed(self._label or self.client_name, reason, delay)
            )
        self._retry.start(delay, self._start_attempt)


def _do_nothing() -> None:
    """Do nothing, until the first attempt replaces this callback."""
