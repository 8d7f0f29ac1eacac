"""Connections to Redis that are kept up for ever.

Theory of operation: txredisapi's factory gives up for good at the first failed
AUTH, counts a connection as up before it is, waits for ever for what does not
come, and never resets its delay. :class:`SynapseRedisFactory` and
:class:`RedisLink`, which every protocol of ours mixes in, correct that:

- from ``connectionMade`` until :meth:`RedisLink.link_established` a timer runs;
  whatever fails or stalls until then cuts the connection, and it is tried again
  with a growing delay. Which reply means "established" is the protocol's choice;
- the delay is reset only when :meth:`RedisLink.link_proved` was called;
- every connection is pinged, and cut if no reply comes.
"""

from __future__ import annotations

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

from synapse_replication.backoff import Backoff
from synapse_replication.handlers.observer import CloseReason, ReplicationObserver
from synapse_replication.redis.resp import (
    MAX_REPLY_LENGTH,
    ReaderFactory,
    new_reader,
)
from synapse_replication.transport.buffers import ReadSize
from synapse_replication.transport.failures import at, destination, one_line
from synapse_replication.transport.timeouts import Timeout
from synapse_replication.transport.tls import explain

__all__ = ["HANDSHAKE_TIMEOUT", "RedisLink", "RedisProtocol", "SynapseRedisFactory"]

#: How long a connection may take from being made to being established, in s.
HANDSHAKE_TIMEOUT = 10.0
#: The delay before the first new attempt, and the longest one, in s.
INITIAL_DELAY = 0.1
MAX_DELAY = 5.0
#: By how much the delay grows from one attempt to the next.
GROWTH = 2.7


class RedisLink:
    """What all our connections to Redis share; mixed into a txredisapi protocol."""

    factory: SynapseRedisFactory
    transport: Any
    # Of txredisapi's protocols.
    ping: Callable[[], Any]
    tryConvertData: Callable[[Any], Any]  # noqa: N815
    replyReceived: Callable[[Any], None]  # noqa: N815
    whenConnected: Callable[[], Any]  # noqa: N815

    def connectionMade(self) -> Deferred[None]:
        """Begin to ping. Called by Twisted."""
        self.established = False
        self._lost = False
        self.factory.links.add(self)
        self._reader = self.factory.reader_factory()
        self._read_size = ReadSize()
        self._unfinished = 0
        self._why = ""
        self._close_reason = CloseReason.LOST
        clock = self.factory.reactor_clock
        # txredisapi's is the global reactor's; it is for the time-outs of replies.
        self.callLater = partial(Timeout, clock)
        self._handshake_timer: Timeout | None = Timeout(
            clock, self.factory.handshake_timeout, self._handshake_timed_out
        )
        # Called when AUTH and SELECT are over, and not at all if they fail.
        self.whenConnected().addCallback(lambda _: self.authenticated())
        done: Deferred[None] = super().connectionMade()  # type: ignore[misc]
        return done

    def connectionLost(self, why: Failure) -> None:
        """Report the loss, and fail what waits for a reply. Called by Twisted."""
        self._lost = True
        self.factory.links.discard(self)
        self._stop_handshake_timer()
        established, self.established = self.established, False
        text = self._why or self._explain(why, established)
        self.factory.link_lost(established, self._close_reason, text)
        super().connectionLost(why)  # type: ignore[misc]

    def _explain(self, why: Failure, established: bool) -> str:
        assert why.value is not None
        text = explain(why.value)
        if established or self._heard_anything or text.startswith("TLS: "):
            return text
        if isinstance(why.value, ConnectionDone):
            text = "it closed the connection before it said anything"
        return f"{text}; does the port speak TLS if we do, and only then?"

    _heard_anything = False

    def dataReceived(self, data: bytes, unpause: bool = False) -> None:
        """Process what the server sent. Called by Twisted."""
        self._heard_anything = True
        self._read_size.received(self.transport, len(data))
        try:
            self._reader.feed(data)
            if self.read_replies():
                self._unfinished = 0
        except txredisapi.InvalidData as error:
            self.cut(f"it does not speak Redis' protocol: {error}")
            return
        self._unfinished += len(data)
        if self._unfinished > MAX_REPLY_LENGTH:
            self.cut(f"a reply is longer than {MAX_REPLY_LENGTH} bytes")

    # -- for the protocols --------------------------------------------------------

    def read_replies(self) -> bool:
        """Take all complete replies from the reader; tell whether there were any."""
        gets = self._reader.gets
        reply = gets()
        if reply is False:
            return False
        while reply is not False:
            self.replyReceived(self.tryConvertData(reply))
            reply = gets()
        return True

    def authenticated(self) -> None:
        """Go on: AUTH and SELECT, where asked for, are over."""
        raise NotImplementedError

    def keep_alive(self) -> None:
        """Ping, and cut the connection if no reply comes in time."""
        raise NotImplementedError

    def link_established(self) -> None:
        """Record that the connection can be used."""
        self._stop_handshake_timer()
        self.established = True
        self.factory.link_established()

    def link_proved(self) -> None:
        """Record that the connection was used: if it is lost, it is retried at once."""
        self.factory.resetDelay()

    def cut(self, why: str, reason: CloseReason = CloseReason.LOST) -> None:
        """End the connection at once and say why. It is tried again."""
        if not self._lost and not self._why:
            self._why = why
            self._close_reason = reason
            self.transport.abortConnection()

    def close(self) -> None:
        """Write what is left and end the connection."""
        self.transport.loseConnection()

    def _stop_handshake_timer(self) -> None:
        timer, self._handshake_timer = self._handshake_timer, None
        if timer is not None and timer.active():
            timer.cancel()

    def _handshake_timed_out(self) -> None:
        self._handshake_timer = None
        self.cut(
            f"no answer within {self.factory.handshake_timeout:g} s; is it Redis, "
            "and does the port speak TLS only if we do?",
            CloseReason.TIMED_OUT,
        )


class RedisProtocol(RedisLink, txredisapi.RedisProtocol):  # type: ignore[misc]
    """A connection for txredisapi's commands (``set``, ``get``, ``ping``, ...)."""

    @override
    def authenticated(self) -> None:
        def answered(_: object) -> None:
            self.link_established()

        def failed(failure: Failure) -> None:
            self.cut(f"it does not answer PING: {one_line(failure.value)}")

        self.ping().addCallbacks(answered, failed)

    @override
    def keep_alive(self) -> None:
        # When no reply comes within replyTimeout, txredisapi cuts the connection.
        def failed(failure: Failure) -> None:
            self.cut(one_line(failure.value), CloseReason.TIMED_OUT)

        self.ping().addCallbacks(lambda _: self.link_proved(), failed)


class SynapseRedisFactory(txredisapi.RedisFactory):  # type: ignore[misc]
    """A txredisapi factory that goes on for ever, and notices half-open links.

    For ``reactor.connectTCP``, ``connectSSL`` and ``connectUNIX``. The arguments
    that Synapse gives come first and mean the same.

    :param replyTimeout: how long a reply may take, in s.
    :param clock: the reactor.
    :param observer: told when a connection comes up, goes down, or does not come
        up, and why.
    :param name: of the connections, for the observer.
    :param ping_interval: s between pings on each connection.
    :param handshake_timeout: s from a connection's being made to its use.
    :param reader_factory: what reads the replies.
    :param jitter: gives a number from 0 to 1, by which a delay is shortened, to half
        at most: processes that were cut off together do not come back together.
    """

    #: txredisapi looks for it here.
    maxDelay = MAX_DELAY  # noqa: N815
    protocol = RedisProtocol

    def __init__(
        self,
        uuid: str,
        dbid: int | None,
        poolsize: int,
        isLazy: bool = False,
        handler: Callable[..., Any] = txredisapi.ConnectionHandler,
        charset: str | None = "utf-8",
        password: str | None = None,
        replyTimeout: float = 30.0,
        convertNumbers: bool = True,
        username: str | None = None,
        *,
        clock: IReactorTime,
        observer: ReplicationObserver | None = None,
        name: str = "redis",
        ping_interval: float = 30.0,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
        reader_factory: ReaderFactory = new_reader,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._stopped = False
        self.disconnectCalled = False
        self.connector: IConnector | None = None
        self.links: set[RedisLink] = set()
        self._closed: Deferred[None] | None = None
        super().__init__(
            uuid=uuid,
            dbid=dbid,
            poolsize=poolsize,
            isLazy=isLazy,
            handler=handler,
            charset=charset,
            password=password,
            replyTimeout=replyTimeout,
            convertNumbers=convertNumbers,
            username=username,
        )
        # ReconnectingClientFactory takes its time from here.
        self.clock = clock
        self.reactor_clock = clock
        self.observer = observer or ReplicationObserver()
        self.name = name
        self.handshake_timeout = handshake_timeout
        self.reader_factory = reader_factory
        self._why = ""
        self._backoff = Backoff(INITIAL_DELAY, MAX_DELAY, GROWTH, jitter)
        self._ping_interval = ping_interval
        self._pings = LoopingCall(self._ping_pool)
        self._pings.clock = clock

    @property
    def continueTrying(self) -> bool:
        """Whether a lost connection is opened again: until it is stopped."""
        return not (self._stopped or self.disconnectCalled)

    @continueTrying.setter
    def continueTrying(self, value: object) -> None:
        """Pass over: txredisapi sets it after a failed AUTH, ends for good."""

    @override
    def stopTrying(self) -> None:
        self._stopped = True
        if self.connector is not None:
            super().stopTrying()

    def close(self, timeout: float) -> Deferred[None]:
        """End all connections for good; fires when they are closed.

        :param timeout: s after which they are cut, written or not.
        """
        self.stopTrying()
        closed: Deferred[None] = Deferred()
        if not self.links:
            closed.callback(None)
            return closed
        self._closed = closed
        timer = self.reactor_clock.callLater(timeout, self._cut_all)
        closed.addCallback(lambda _: timer.cancel() if timer.active() else None)
        for link in list(self.links):
            link.close()
        return closed

    def _cut_all(self) -> None:
        for link in list(self.links):
            link.cut("it did not close in time")

    @override
    def startedConnecting(self, connector: IConnector) -> None:
        self.connector = connector
        super().startedConnecting(connector)

    @override
    def buildProtocol(self, addr: IAddress | None) -> Any:
        self._why = ""
        return super().buildProtocol(addr)

    @override
    def addConnection(self, connection: Any) -> None:
        super().addConnection(connection)
        if self.pool and not self._pings.running:
            self._pings.start(self._ping_interval, now=False)

    @override
    def delConnection(self, connection: Any) -> None:
        super().delConnection(connection)
        if not self.pool and self._pings.running:
            self._pings.stop()

    def _ping_pool(self) -> None:
        for connection in list(self.pool):
            connection.keep_alive()

    # -- what the connections tell ------------------------------------------------

    def connectionError(self, why: str) -> None:
        """Note why AUTH or SELECT failed. The waiting Deferred goes on waiting."""
        self._note(why)

    def _note(self, why: str) -> None:
        # A server that does not know AUTH repeats what stood behind it.
        if self.password:
            why = why.replace(self.password, "***")
        self._why = self._why or why

    def link_established(self) -> None:
        """Record that a connection can do what it is for."""
        self.observer.connection_made(self.name)

    def link_lost(self, established: bool, reason: CloseReason, why: str) -> None:
        """Record that a connection ended."""
        self._note(why)
        if established:
            stopped = not self.continueTrying
            self.observer.connection_lost(
                self.name, CloseReason.SHUTDOWN if stopped else reason, self._why
            )

    # -- again ----------------------------------------------------------------------

    @override
    def clientConnectionFailed(self, connector: IConnector, reason: Failure) -> None:
        assert reason.value is not None
        self._why = explain(reason.value)
        self._again(connector)

    @override
    def clientConnectionLost(self, connector: IConnector, reason: Failure) -> None:
        self._again(connector)

    def _again(self, connector: IConnector) -> None:
        if not self.links and self._closed is not None:
            closed, self._closed = self._closed, None
            closed.callback(None)
        if self.continueTrying:
            self.retry(connector)

    def retry(self, connector: IConnector | None = None) -> None:
        """Connect again after a while. Twisted's own knows no bound.

        :param connector: the one that failed; the newest if ``None``.
        """
        connector = connector or self.connector
        assert connector is not None, "there is nothing to try again"
        self.retries += 1
        wait = self._backoff.delay(self.retries)

        def connect() -> None:
            self._callID = None
            connector.connect()

        # Where stopTrying() looks for it.
        self._callID = self.reactor_clock.callLater(  # type: ignore[assignment]
            wait, connect
        )
        why = at(destination(connector), self._why)
        self.observer.connection_failed(self.name, why, wait)
