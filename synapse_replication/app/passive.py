"""Passive links: they subscribe and never publish, not even REPLICATE.

Over Redis, a passive link is a subscription; over direct TCP, a connection that sends
only NAME, PING and, before it closes because of an error, ERROR. Both pass each line to
a callback before it is parsed, in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import attrs
from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from typing_extensions import override

from synapse_replication.app.links import connect_direct_tcp, connect_redis
from synapse_replication.app.stop_steps import StopSteps
from synapse_replication.config.process import ProcessConfig
from synapse_replication.errors import LocalProtocolError, ReplicationError
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.interfaces import Clock, ReplicationConnection
from synapse_replication.handlers.observer import CompositeObserver, ReplicationObserver
from synapse_replication.instrumentation.logs import LoggingObserver
from synapse_replication.redis.link import STOP_TIMEOUT
from synapse_replication.redis.options import RedisOptions
from synapse_replication.redis.resp import ReplyParser
from synapse_replication.redis.sender import RedisSender
from synapse_replication.redis.sentinel import RedisMaster
from synapse_replication.redis.subscriber import SubscriberFactory
from synapse_replication.tcp.factory import DirectTcpReplicationClientFactory
from synapse_replication.tcp.protocol import ClientReplicationStreamProtocol
from synapse_replication.transport.reactor import IReactor
from synapse_replication.wire.rdata import ReceivedItem

#: A callback that is called with ``(channel, line)`` for each line.
Tap = Callable[[str, bytes], None]

_LONGEST_LINE = 64 * 1024


class _NullHandler:
    """A connection handler that ignores all commands and rows."""

    def new_connection(self, connection: ReplicationConnection) -> None:
        """Send nothing."""

    def received(
        self, connection: ReplicationConnection, items: Sequence[ReceivedItem]
    ) -> None:
        """Ignore the items: their lines have already been passed to the tap."""

    def ready_again(self, connection: ReplicationConnection) -> None:
        """Do nothing: there is nothing to send."""

    def lost_connection(self, connection: ReplicationConnection) -> None:
        """Do nothing: the factory reconnects."""


class _TappedParser:
    """A parser of Redis replies that passes each message to a tap."""

    def __init__(self, parser: ReplyParser, tap: Tap) -> None:
        self.feed = parser.feed
        self._parser = parser
        self._tap = tap

    def gets(self) -> Any:
        # Look up the method for each call: the parser replaces it when it feeds a chunk
        # to hiredis in parts.
        reply = self._parser.gets()
        if type(reply) is list and len(reply) == 3 and reply[0] == b"message":
            self._tap(reply[1].decode("utf-8", "replace"), reply[2])
        return reply


class PassiveRedisLink:
    """A subscription to a deployment's main channel and its USER_IP channel."""

    def __init__(
        self,
        reactor: IReactor,
        options: RedisOptions,
        server_name: str,
        tap: Tap,
        observer: ReplicationObserver,
    ) -> None:
        self._master = RedisMaster(reactor, options, observer)
        self._factory = SubscriberFactory(
            **options.for_factory(),
            clock=reactor,
            observer=observer,
            server_name=server_name,
            channels=["USER_IP"],
            command_handler=_NullHandler(),
            # The sender has no connection and is never used.
            sender=RedisSender(reactor, observer, _publish_nothing),
            parser_factory=lambda: _TappedParser(ReplyParser(), tap),
        )

    def start(self) -> None:
        """Connect and subscribe; whenever the connection is lost, reconnect.

        :raises OSError: if a file of the TLS options cannot be read.
        :raises ValueError: if a file of the TLS options does not contain the expected
            PEM data.
        """
        self._master.connect(self._factory)

    async def stop(self) -> None:
        """Close the connection; return when it is closed, or after a few seconds."""
        closed = self._factory.close(STOP_TIMEOUT)
        self._master.stop()
        await closed


def _publish_nothing(lost: int) -> NoReturn:
    raise LocalProtocolError("a passive link publishes nothing")


class _PassiveProtocol(ClientReplicationStreamProtocol):
    """A client connection that passes each line to the factory's tap."""

    factory: PassiveTcpLink

    _unfinished = b""

    def dataReceived(self, data: bytes) -> None:
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        # The base class closes the connection on a longer line.
        self._unfinished = self._unfinished[:_LONGEST_LINE]
        for line in lines:
            if line := line.rstrip(b"\r"):
                self.factory.tap(self.server_name, line)
        super().dataReceived(data)


class PassiveTcpLink(DirectTcpReplicationClientFactory):
    """A connection to the direct TCP listener of one instance; it reconnects.

    :param name: the name that it sends to the listener.
    :param tap: called with each line.
    """

    protocol = _PassiveProtocol

    def __init__(
        self,
        name: str,
        server_name: str,
        clock: Clock,
        observer: ReplicationObserver,
        tap: Tap,
    ) -> None:
        super().__init__(name, server_name, clock, _NullHandler(), observer)
        self.tap = tap


@attrs.define(eq=False, repr=False)
class Follower(Service):
    """A service that runs the passive links of a process until it is stopped.

    :param name: the name that the client sends to a direct TCP server.
    :param tap: called with each line.
    :param finish: the last step of the stop, if the service was started; its result
        may be awaitable.
    :param begin: called before the links are started.
    :param observers: observers of the links, in addition to the log.
    :ivar started: fails when :meth:`fail` is called. Otherwise it never fires.
    :ivar unfinished: what a stop did not finish, for the exit status; empty if nothing.
    """

    _config: ProcessConfig
    _reactor: IReactor
    _name: str
    _tap: Tap
    _finish: Callable[[], object]
    _begin: Callable[[], object] = lambda: None
    _observers: Sequence[ReplicationObserver] = attrs.field(default=(), kw_only=True)
    started: Deferred[None] = attrs.field(factory=Deferred, init=False)
    unfinished: str = attrs.field(default="", init=False)
    _stops: StopSteps = attrs.field(
        default=attrs.Factory(lambda self: StopSteps(self._reactor), takes_self=True),
        init=False,
    )

    def fail(self, error: ReplicationError) -> None:
        """Fail :attr:`started`, because the output has failed. Call it at most once."""
        self.started.errback(error)

    @override
    def startService(self) -> None:
        """Start the links.

        :raises ConfigError: if a file of the Redis TLS options, or an endpoint for
            direct TCP, cannot be used.
        """
        super().startService()  # type: ignore[no-untyped-call]
        config, reactor, tap = self._config, self._reactor, self._tap
        name = config.server_name
        observer = CompositeObserver([LoggingObserver(Logger()), *self._observers])
        self._stops.add("finishing the output", self._finish)
        self._begin()
        if config.redis is not None:
            link = PassiveRedisLink(reactor, config.redis, name, tap, observer)
            connect_redis(link, config, self._stops)
        clock = ReactorClock(reactor)
        connect_direct_tcp(
            lambda: PassiveTcpLink(self._name, name, clock, observer, tap),
            reactor,
            config,
            self._stops,
        )

    @override
    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.unfinished = ", ".join(await self._stops.run())
