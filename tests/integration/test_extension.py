"""Tests for the extension on a real Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet import defer
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase
from twisted.web.server import Site

from synapse_replication.handlers.command_handler import (
    HandlerOptions,
    ReplicationCommandHandler,
)
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.events import Resync
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.interfaces import Identity
from synapse_replication.handlers.receiving.partial_resync import PartialResync
from synapse_replication.handlers.sending.streamer import ReplicationStreamer
from synapse_replication.http.agent import make_agent
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.http.location import InstanceLocation
from synapse_replication.http.resource import ReplicationResource
from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import RedisOptions
from synapse_replication.streams.backlog import Backlog, BacklogOptions
from synapse_replication.testing.doubles import SourceStream
from synapse_replication.testing.servers import PrivateRedis, shared_redis
from tests.handlers.fixtures import Row
from tests.support.http_root import under_root
from tests.support.recording_observer import RecordingHost


class Process:
    """A process wired as in ``app/service.py``, with doubles of a host.

    :param locations: the addresses of the processes that serve HTTP, by name; a writer
        adds its own.
    """

    def __init__(
        self,
        reactor: Any,
        options: RedisOptions,
        server_name: str,
        name: str,
        locations: dict[str, InstanceLocation],
        *,
        epoch: str = "",
        writes: bool = False,
    ) -> None:
        self.stream = SourceStream("events", Row, instance_name=name)
        host = self.host = RecordingHost(
            self.stream, written=["events"] if writes else [], instance_name=name
        )
        host.identity = Identity(server_name, name, epoch or f"{name}-epoch")
        host.clock = ReactorClock(reactor)
        self.observer = host.observer
        epochs, backlog = PeerEpochs(), Backlog(BacklogOptions())
        agent, self._pool = make_agent(reactor, locations)
        client = HttpCatchUpClient(
            agent, locations, "hush", reactor, epoch_of=epochs.epoch_of
        )
        partial = PartialResync(epochs, client.get_backlog, host.clock, host.observer)
        self.handler = ReplicationCommandHandler(
            host, host.observer, options=HandlerOptions(partial=partial)
        )
        self.extension = ReplicationExtension(
            self.handler, epochs, backlog, where=f"{name}:1"
        )
        self.streamer = ReplicationStreamer(host, self.handler.sender, host.observer)
        self._port = None
        if writes:
            resource = ReplicationResource(
                host.streams,
                name,
                "hush",
                host.observer,
                epoch=self.extension.epoch,
                backlog=backlog,
            )
            self._port = reactor.listenTCP(
                0, Site(under_root(resource)), interface="127.0.0.1"
            )
            locations[name] = InstanceLocation("127.0.0.1", self._port.getHost().port)
        self.link = RedisReplicationLink(
            reactor,
            options,
            server_name,
            self.handler,
            host.observer,
            lambda lost: self.handler.sender.announce_positions(),
            extension=self.extension,
        )
        self.link.start()
        self.extension.start()
        self.streamer.start()

    def write(self, readers: list[Process], *tokens: int) -> None:
        """Persist rows in this process and at the readers, and send them."""
        name = self.host.identity.instance_name
        for token in tokens:
            for process in (self, *readers):
                process.stream.persist(name, token, [f"row {token}"])
        self.host.notifier.notify()

    def tokens(self) -> list[int]:
        """Return the tokens of the delivered rows of ``w``."""
        return self.host.rows.tokens("w")

    def is_live(self) -> bool:
        """Return whether the stream of ``w`` is live."""
        return any(writer == "w" for _, _, writer in self.observer.connected)

    async def stop(self) -> None:
        await self.streamer.stop()
        self.extension.stop()
        await self.link.stop()
        await self._pool.closeCachedConnections()
        if self._port is not None:
            await defer.maybeDeferred(self._port.stopListening)


class ExtensionTests(TestCase):
    timeout = 60

    def setUp(self) -> None:
        from twisted.internet import reactor  # noqa: TID251

        self.reactor: Any = reactor
        self.locations: dict[str, InstanceLocation] = {}

    def start(
        self,
        redis: PrivateRedis,
        name: str,
        *,
        username: str | None = None,
        **more: Any,
    ) -> Process:
        options = RedisOptions(
            host=redis.host,
            port=redis.port,
            username=username,
            password="secret" if username else None,
        )
        process = Process(
            self.reactor, options, self.id(), name, self.locations, **more
        )
        self.addCleanup(lambda: Deferred.fromCoroutine(process.stop()))
        return process

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await deferLater(self.reactor, 0.02)

    async def test_partial_resync(self) -> None:
        """
        A reader that was disconnected from Redis gets the missed rows from the backlog.
        """
        redis = PrivateRedis().start()
        self.addCleanup(redis.stop)
        reader = self.start(redis, "r")
        writer = self.start(redis, "w", writes=True)
        await self.until(reader.is_live)
        writer.write([reader], 1, 2)
        await self.until(lambda: reader.tokens() == [1, 2])
        # Only the reader is disconnected, and rows are sent meanwhile.
        await reader.link.stop()
        writer.write([reader], 3, 4, 5)
        await self.until(
            lambda: (
                writer.observer.sent["events"] == 5
                and writer.link.sender.unacknowledged == 0
            )
        )
        again = RedisReplicationLink(
            self.reactor,
            RedisOptions(host=redis.host, port=redis.port),
            self.id(),
            reader.handler,
            reader.observer,
            lambda lost: None,
            extension=reader.extension,
        )
        again.start()
        reader.link = again
        await self.until(lambda: len(reader.tokens()) >= 5 and reader.observer.resyncs)
        self.assertEqual(reader.tokens(), [1, 2, 3, 4, 5])
        self.assertEqual(reader.stream.requests, [])
        self.assertEqual(reader.observer.resyncs, {("events", "w", Resync.PARTIAL): 1})

    async def test_redis_restart(self) -> None:
        """
        If Redis is restarted under a writer, rows arrive complete, once and in order.
        """
        redis = PrivateRedis().start()
        self.addCleanup(redis.stop)
        reader = self.start(redis, "r")
        writer = self.start(redis, "w", writes=True)
        await self.until(reader.is_live)
        for token in range(1, 101):
            writer.write([reader], token)
            if token == 50:
                redis.restart()
            await deferLater(self.reactor, 0.005)
        await self.until(lambda: len(reader.tokens()) >= 100)
        self.assertEqual(reader.tokens(), list(range(1, 101)))

    async def test_channel_that_an_acl_forbids(self) -> None:
        """A Redis user without access to the extension's channel still replicates."""
        old, new = self.id(), f"{self.id()}/replication_ext"
        redis = PrivateRedis(
            acl=[
                f"user old on >secret +@all ~* resetchannels &{old}",
                f"user new on >secret +@all ~* resetchannels &{old} &{new}",
            ]
        ).start()
        self.addCleanup(redis.stop)
        reader = self.start(redis, "r", username="old")
        writer = self.start(redis, "w", username="new", writes=True)
        await self.until(reader.is_live)
        writer.write([reader], 1, 2)
        await self.until(lambda: reader.tokens() == [1, 2])
        ((feature, why),) = reader.observer.unavailable
        self.assertIn(new, feature + why)
        self.assertIn("NOPERM", why)
        self.assertEqual(reader.observer.failures, [])
        self.assertEqual(writer.observer.unavailable, [])

    async def test_second_process_of_a_name(self) -> None:
        """
        The first process of the name and other processes report it within seconds.
        """
        redis = shared_redis()
        reader = self.start(redis, "r")
        first = self.start(redis, "w", writes=True)
        await self.until(reader.is_live)
        started = self.reactor.seconds()
        self.start(redis, "w", epoch="another", writes=True)
        await self.until(lambda: first.observer.duplicates)
        self.assertEqual(first.observer.duplicates[0], ("w", "w:1 and w:1"))
        await self.until(lambda: reader.observer.duplicates)
        self.assertEqual(reader.observer.duplicates[0][0], "w")
        self.assertLess(self.reactor.seconds() - started, 30)
