"""Links to a real Redis, and the base class of tests with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock, deferLater
from twisted.trial.unittest import TestCase

from synapse_replication.redis.fencing import PublisherName
from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import RedisOptions
from synapse_replication.testing.servers import PrivateRedis
from synapse_replication.wire.commands import Command, PositionCommand
from tests.redis.doubles import Events, OrderedObserver, RecordingHandler, rdata


class Peer:
    """The link of one instance, with its handler and events.

    The instance announces its position when it connects, on REPLICATE, and after
    losses.

    :param instance_name: only rows of the instance ``writer`` are counted.
    :param confirm: checks that the instance has its name; ``None`` if it has acquired
        none.
    """

    def __init__(
        self,
        reactor: Any,
        options: RedisOptions,
        server_name: str,
        channels: Sequence[str] = (),
        *,
        instance_name: str = "writer",
        interval: float = 30.0,
        handshake_timeout: float = 10.0,
        confirm: Callable[[], Deferred[None]] | None = None,
    ) -> None:
        self._reactor = reactor
        self.events = Events()
        self.observer = OrderedObserver(self.events)
        self.handler = RecordingHandler(self.events)
        self.instance_name = instance_name
        self.token = 0
        self.losses = 0
        self.link = RedisReplicationLink(
            reactor,
            options,
            server_name,
            self.handler,
            self.observer,
            self.announce,
            channels,
            publisher=PublisherName(
                self.observer, server_name, instance_name, lambda: confirm
            ),
            ping_interval=interval,
            reply_timeout=interval,
            handshake_timeout=handshake_timeout,
        )
        self.link.start()

    @property
    def sender(self) -> Any:
        """The link's sender."""
        return self.link.sender

    def announce(self, count: int) -> None:
        self.losses += count
        self.send(PositionCommand("events", self.instance_name, self.token, self.token))

    def send(self, command: Command) -> None:
        if self.handler.connection is not None:
            self.handler.connection.send_command(command)

    def write(self, count: int) -> None:
        """Publish the next rows."""
        first, self.token = self.token + 1, self.token + count
        if self.handler.connection is not None:
            lines = [rdata(token) for token in range(first, self.token + 1)]
            self.handler.connection.send_lines("RDATA", lines)

    def wait_until_up(self, times: int = 1) -> Deferred[None]:
        """Fire when both connections were established ``times`` times.

        The Deferred fires a turn later, because the observer is notified before the
        sender.
        """
        both = self.events.until(
            lambda: (
                self.events.all.count("new_connection") >= times
                and self.events.all.count(("made", "redis_out")) >= times
            )
        )
        return both.addCallback(lambda _: deferLater(self._reactor, 0, lambda: None))

    def wait_for_event(self, *words: str) -> Deferred[None]:
        """Fire when one event contains all of the words."""
        return self.events.until(
            lambda: any(
                all(word in str(event) for word in words) for event in self.events.all
            )
        )


class SteppedReactor:
    """A reactor with real connections and a test clock."""

    def __init__(self, reactor: Any, clock: Clock) -> None:
        self.connectTCP = reactor.connectTCP
        self.callLater = clock.callLater
        self.seconds = clock.seconds


class ClosingServer(Factory):
    """Closes each connection after its first data, with or without an answer.

    :ivar accepted: the number of accepted connections.
    """

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.accepted = 0

    def buildProtocol(self, addr: object) -> Protocol:
        self.accepted += 1
        return Closing(self.answer)


class Closing(Protocol):
    """A connection of a :class:`ClosingServer`."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(self._answer)
        self.transport.loseConnection()


class RealRedisTestCase(TestCase):
    """Starts peers, and stops them after the test."""

    timeout = 60

    def setUp(self) -> None:
        from twisted.internet import reactor  # noqa: TID251

        self.reactor: Any = reactor
        # Each test has its own server name on the shared Redis.
        self.server_name = self.id()

    def start_redis(self, **options: Any) -> PrivateRedis:
        """Start a Redis that the test may kill or reconfigure."""
        redis = PrivateRedis(**options)
        self.addCleanup(redis.stop)
        return redis.start()

    def start_peer(self, options: RedisOptions, **more: Any) -> Peer:
        """Start the link of one instance."""
        peer = Peer(self.reactor, options, self.server_name, **more)
        self.addCleanup(lambda: Deferred.fromCoroutine(peer.link.stop()))
        return peer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Poll the condition every 10 ms, until the test times out."""
        while not condition():
            await deferLater(self.reactor, 0.01, lambda: None)


def by_port(redis: PrivateRedis, **more: Any) -> RedisOptions:
    """Return options for the TCP port of a private Redis."""
    return RedisOptions(host=redis.host, port=redis.port, **more)
