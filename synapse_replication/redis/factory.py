"""Connections to Redis that reconnect until they are stopped.

Theory of operation: txredisapi's factory stops reconnecting at the first failed AUTH or
SELECT, may report a connection as up before Redis has sent anything, waits for replies
without a time limit by default, and never resets its delay.
:class:`SynapseRedisFactory` and :class:`RedisConnectionMixin`, the mixin of the
protocols that use txredisapi, correct that:

- From ``connectionMade`` until :meth:`RedisConnectionMixin.connection_established` a
  timer runs. A failure or a timeout ends the connection, and the factory reconnects
  with a growing delay. Each protocol decides which reply means "established".
- Only :meth:`RedisConnectionMixin.connection_proved` resets the delay.
- Every authenticated connection is pinged at intervals, and aborted if no reply arrives
  in time.
- A lost connection is removed from txredisapi's queue, which would keep it for ever.

See docs/failure-modes.rst: failure-half-open, failure-failed-auth,
failure-accept-and-close.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import txredisapi
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IAddress, IConnector, IReactorTime
from twisted.internet.task import LoopingCall
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.handlers.events import ConnectFailed, LinkDown, LinkUp
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.waiters import Waiters
from synapse_replication.redis.resp import MAX_REPLY_LENGTH, Parser, ReplyParser
from synapse_replication.transport.buffers import ReadSize
from synapse_replication.transport.error_text import (
    destination,
    error_text,
    explain,
    with_location,
)
from synapse_replication.transport.reconnecting import BackoffClientFactory
from synapse_replication.transport.timeouts import Timeout, stop
from synapse_replication.wire.close_reason import CloseReason

#: The time limit from ``connectionMade`` until the link is established, in s.
HANDSHAKE_TIMEOUT = 10.0
#: The default time limit of a reply, in s.
REPLY_TIMEOUT = 30.0


class RedisConnectionMixin:
    """Mixin for txredisapi's protocols: timeouts, keep-alive and reporting."""

    factory: SynapseRedisFactory
    transport: Any
    # Provided by txredisapi's protocols.
    ping: Callable[[], Any]
    tryConvertData: Callable[[Any], Any]  # noqa: N815
    replyReceived: Callable[[Any], None]  # noqa: N815
    whenConnected: Callable[[], Any]  # noqa: N815

    def connectionMade(self) -> Deferred[None]:
        """Start the handshake timer. Called by Twisted."""
        self.established = False
        self._has_received = False
        self._lost = False
        self.factory.connections.add(self)
        self._reader = self.factory.parser_factory()
        self._read_size = ReadSize()
        #: The bytes received since the chunk in which the last reply ended, inclusive.
        self._unfinished = 0
        self._why = ""
        self._close_reason = CloseReason.LOST
        clock = self.factory.reactor_clock
        # txredisapi calls this for its reply timeouts; by default, it would use the
        # global reactor.
        self.callLater = partial(Timeout, clock)
        self._handshake_timer = Timeout(
            clock, self.factory.handshake_timeout, self._handshake_timed_out
        )
        # This Deferred fires after a successful AUTH and SELECT; if one of them fails,
        # it never fires.
        self.whenConnected().addCallback(lambda _: self.authenticated())
        done: Deferred[None] = super().connectionMade()  # type: ignore[misc]
        return done

    def connectionLost(self, why: Failure) -> None:
        """Record the loss and fail all pending commands. Called by Twisted."""
        self._lost = True
        self.factory.connections.discard(self)
        stop(self._handshake_timer)
        established, self.established = self.established, False
        text = self._why or self._explain(why, established)
        self.factory.connection_lost(established, self._close_reason, text)
        super().connectionLost(why)  # type: ignore[misc]
        # An unfinished reply may occupy 16 MiB.
        self._reader = self.factory.parser_factory()

    def _explain(self, why: Failure, established: bool) -> str:
        text = explain(why.value)
        if established or self._has_received or text.startswith("TLS: "):
            return text
        if isinstance(why.value, ConnectionDone):
            text = "the server closed the connection without sending anything"
        return f"{text}; is TLS enabled at both ends or at neither?"

    def dataReceived(self, data: bytes, unpause: bool = False) -> None:
        """Parse replies and messages. Called by Twisted."""
        self._has_received = True
        self._read_size.received(self.transport, len(data))
        try:
            self._reader.feed(data)
            self._unfinished += len(data)
            if self.read_replies():
                self._unfinished = len(data)
        except txredisapi.InvalidData as error:
            self.abort(f"the server does not speak the Redis protocol: {error}")
            return
        if self._unfinished > MAX_REPLY_LENGTH:
            self.abort(f"a reply is longer than {MAX_REPLY_LENGTH} bytes")

    # -- called or overridden by the protocols ------------------------------------

    def read_replies(self) -> bool:
        """Handle all complete replies; return whether there were any."""
        gets = self._reader.gets
        reply = gets()
        if reply is False:
            return False
        while reply is not False:
            self.replyReceived(self.tryConvertData(reply))
            reply = gets()
        return True

    def authenticated(self) -> None:
        """Continue after AUTH and SELECT have succeeded, if they are configured."""
        raise NotImplementedError

    def keep_alive(self) -> None:
        """Send PING, and abort the connection if no reply arrives in time."""
        raise NotImplementedError

    def connection_established(self) -> None:
        """Stop the handshake timer and report that the connection can be used."""
        stop(self._handshake_timer)
        self.established = True
        self.factory.observer.observe(LinkUp(self.factory.name))

    def connection_proved(self) -> None:
        """Reset the reconnection delay: the connection was used successfully."""
        self.factory.resetDelay()  # type: ignore[no-untyped-call]

    def abort(self, why: str, reason: CloseReason = CloseReason.LOST) -> None:
        """Abort the connection for a reason, which the factory reports.

        The factory reconnects, unless it was stopped.
        """
        if not self._lost and not self._why:
            self._why = why
            self._close_reason = reason
            self.transport.abortConnection()

    def close(self) -> None:
        """Close the connection after writing pending data."""
        self.transport.loseConnection()

    def _handshake_timed_out(self) -> None:
        self.abort(
            f"no answer within {self.factory.handshake_timeout:g} s; is the server "
            "Redis, and is TLS enabled at both ends or at neither?",
            CloseReason.TIMED_OUT,
        )


class RedisProtocol(RedisConnectionMixin, txredisapi.RedisProtocol):  # type: ignore[misc]
    """Connection for txredisapi's commands (``set``, ``get``, ``ping``, ...)."""

    @override
    def authenticated(self) -> None:
        def failed(failure: Failure) -> None:
            self.abort(f"PING failed: {error_text(failure.value)}")

        self.ping().addCallbacks(lambda _: self.connection_established(), failed)

    @override
    def keep_alive(self) -> None:
        # If no reply arrives within replyTimeout, txredisapi closes the connection.
        def failed(failure: Failure) -> None:
            self.abort(error_text(failure.value), CloseReason.TIMED_OUT)

        self.ping().addCallbacks(lambda _: self.connection_proved(), failed)


class SynapseRedisFactory(BackoffClientFactory, txredisapi.RedisFactory):  # type: ignore[misc]
    """A txredisapi factory that detects half-open connections.

    It reconnects until it is stopped.

    Use it with ``reactor.connectTCP``, ``connectSSL`` or ``connectUNIX``. Further
    arguments are those of txredisapi's factory. Without a ``replyTimeout``,
    :data:`REPLY_TIMEOUT` applies: a dead connection must be noticed.

    :param clock: the reactor.
    :param observer: notified when a connection comes up, goes down or fails.
    :param name: the name under which the connections are reported to the observer.
    :param ping_interval: the interval between pings on each connection, in s.
    :param handshake_timeout: the time limit from ``connectionMade`` until the link is
        established, in s.
    :param parser_factory: returns the parser of a new connection.
    :param jitter: returns a number from 0 to 1, which shortens a delay by up to half,
        so that processes that were disconnected together do not reconnect together.
    """

    initialDelay = 0.1  # noqa: N815
    maxDelay = 5.0  # noqa: N815
    factor = 2.7
    protocol = RedisProtocol
    replyTimeout: float  # noqa: N815 -- set by the base class

    def __init__(
        self,
        *args: Any,
        clock: IReactorTime,
        observer: ReplicationObserver | None = None,
        name: str = "redis",
        ping_interval: float = 30.0,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
        parser_factory: Callable[[], Parser] = ReplyParser,
        jitter: Callable[[], float] = random.random,
        **kwargs: Any,
    ) -> None:
        self._stopped = False
        self.disconnectCalled = False
        self.connector: IConnector | None = None
        self.connections: set[RedisConnectionMixin] = set()
        self._closing = Waiters()
        super().__init__(*args, **kwargs)
        self.replyTimeout = self.replyTimeout or REPLY_TIMEOUT
        # The base class declares ``clock``; this package reads ``reactor_clock``.
        self.clock = clock  # type: ignore[assignment]
        self.reactor_clock = clock
        self.observer = observer or ReplicationObserver()
        self.name = name
        self.handshake_timeout = handshake_timeout
        self.parser_factory = parser_factory
        self._why = ""
        #: Whether the last attempt to connect failed.
        self._failed = False
        self.backoff_jitter = jitter
        self._ping_interval = ping_interval
        self._pings = LoopingCall(self._ping_pool)
        self._pings.clock = clock

    @property
    def continueTrying(self) -> bool:
        """Whether to reconnect: true until the factory is stopped."""
        return not (self._stopped or self.disconnectCalled)

    @continueTrying.setter
    def continueTrying(self, value: object) -> None:
        """Ignore the value: txredisapi would stop reconnecting after a failed AUTH."""

    @override
    def stopTrying(self) -> None:
        self._stopped = True
        if self.connector is not None:
            super().stopTrying()  # type: ignore[no-untyped-call]

    def close(self, timeout: float) -> Deferred[None]:
        """Close all connections and do not reconnect.

        :param timeout: the time after which connections are aborted, in s.
        :return: a Deferred that fires when all connections are closed.
        """
        self.stopTrying()
        closed = self._closing.add()
        if not self.connections:
            self._closing.fire()
            return closed
        timer = self.reactor_clock.callLater(timeout, self._abort_all)
        closed.addCallback(lambda _: timer.cancel() if timer.active() else None)
        for connection in list(self.connections):
            connection.close()
        return closed

    def _abort_all(self) -> None:
        for connection in list(self.connections):
            connection.abort("the connection did not close in time")

    @override
    def startedConnecting(self, connector: IConnector) -> None:
        self.connector = connector
        super().startedConnecting(connector)

    @override
    def buildProtocol(self, addr: IAddress | None) -> Any:
        self._why = ""
        return super().buildProtocol(addr)

    @override
    def addConnection(self, conn: Any) -> None:
        super().addConnection(conn)
        if self.pool and not self._pings.running:
            self._pings.start(self._ping_interval, now=False)

    @override
    def delConnection(self, conn: Any) -> None:
        super().delConnection(conn)
        # txredisapi leaves a lost connection in its queue, and so in memory.
        with contextlib.suppress(ValueError):
            self.connectionQueue.remove(conn)
        if not self.pool and self._pings.running:
            self._pings.stop()

    def _ping_pool(self) -> None:
        for connection in list(self.pool):
            connection.keep_alive()

    # -- reports of the connections -----------------------------------------------

    def connectionError(self, why: str) -> None:
        """Record why a connection failed. Called by txredisapi after AUTH or SELECT."""
        # The error of a server that does not know AUTH quotes the arguments of AUTH.
        if self.password:
            why = why.replace(self.password, "***")
        self._why = self._why or why

    def connection_lost(self, established: bool, reason: CloseReason, why: str) -> None:
        """Record why a connection was lost; report the loss if it was established."""
        self.connectionError(why)
        self._failed = not established
        if established:
            stopped = not self.continueTrying
            self.observer.observe(
                LinkDown(
                    self.name, CloseReason.SHUTDOWN if stopped else reason, self._why
                )
            )

    # -- reconnecting ---------------------------------------------------------------

    @override
    def clientConnectionFailed(self, connector: IConnector, reason: Failure) -> None:
        self._why = explain(reason.value)
        self._failed = True
        self._reconnect(connector)

    @override
    def clientConnectionLost(self, connector: IConnector, reason: Failure) -> None:
        self._reconnect(connector)

    def _reconnect(self, connector: IConnector) -> None:
        if not self.connections:
            self._closing.fire()
        if self.continueTrying:
            self.retry(connector)

    @override
    def call_later(
        self, delay: float, func: Callable[..., object], *args: object
    ) -> Any:
        return self.reactor_clock.callLater(delay, func, *args)

    @override
    def retry_scheduled(self, connector: IConnector, delay: float) -> None:
        why = with_location(destination(connector), self._why) if self._failed else ""
        self.observer.observe(ConnectFailed(self.name, why, delay))
