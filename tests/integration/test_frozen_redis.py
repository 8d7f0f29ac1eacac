"""Tests for long pages that wait for a real Redis while connections are lost."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet import reactor  # noqa: TID251 -- a real Redis
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from scripts.tools.flood import SERVER_NAME, WRITER, FloodHost
from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.sending.streamer import (
    ReplicationStreamer,
    StreamerOptions,
)
from synapse_replication.redis.factory import SynapseRedisFactory
from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import RedisOptions
from synapse_replication.testing.servers import PrivateRedis

#: Rows per round; a link reaches its limit many times in it.
ROWS = 5_000


def _factories(peer: Peer) -> tuple[SynapseRedisFactory, ...]:
    return peer.link._outbound, peer.link._inbound


class Peer:
    """One process: a host and its replication."""

    def __init__(self, name: str, port: int) -> None:
        self.host = FloodHost(reactor, name)
        self.host.rows.is_slow = False
        observer = self.host.observer
        self.handler = ReplicationCommandHandler(self.host, observer)
        self.link = RedisReplicationLink(
            reactor,
            RedisOptions(port=port),
            SERVER_NAME,
            self.handler,
            observer,
            lambda lost: self.handler.sender.announce_positions(),
        )
        self.link.start()
        # A paused stream must be resumed by an event, not by the check of idle streams.
        self.streamer = ReplicationStreamer(
            self.host,
            self.handler.sender,
            observer,
            options=StreamerOptions(announce_interval=3600),
        )
        self.streamer.start()

    async def stop(self) -> None:
        """Send everything and close the connections."""
        await self.streamer.stop()
        await self.link.stop()


class FrozenRedisTests(TestCase):
    """Tests for a writer of many rows and a reader."""

    timeout = 60

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await deferLater(reactor, 0.001)

    async def test_connections_are_cut(self) -> None:
        """
        A writer waits while Redis is frozen, and continues when a connection is lost or
        Redis resumes; in the end the reader has every row.
        """
        redis = PrivateRedis().start()
        self.addCleanup(redis.stop)
        reader, writer = Peer("reader", redis.port), Peer(WRITER, redis.port)
        self.addCleanup(lambda: Deferred.fromCoroutine(reader.stop()))
        self.addCleanup(lambda: Deferred.fromCoroutine(writer.stop()))
        stream = writer.host.flooded
        for factory in (None, *_factories(writer)) * 2:
            await self.until_connected(writer)
            redis.freeze()
            try:
                stream.local_token += ROWS
                writer.host.notifier.notify()
                await self.until(lambda: writer.link.sender.is_behind)
                await deferLater(reactor, 0.05)
                self.assertLess(self.sent(writer), stream.local_token - ROWS / 2)
                if factory is not None:
                    for connection in list(factory.connections):
                        connection.transport.abortConnection()
                    await self.until(lambda: self.sent(writer) == stream.local_token)
            finally:
                redis.thaw()
            await self.until(lambda: self.sent(writer) == stream.local_token)
        # The last rows may have been sent without a reader: one more row announces
        # them.
        await self.until_connected(writer)
        stream.local_token += 1
        writer.host.notifier.notify()
        await self.until(lambda: reader.host.flooded.position == stream.local_token)
        self.assertEqual(reader.host.rows.out_of_order, 0)
        self.assertEqual(reader.host.rows.handled, stream.local_token)

    async def until_connected(self, peer: Peer) -> None:
        await self.until(
            lambda: (
                peer.handler.sender.connected()
                and peer.link.sender._protocol is not None
            )
        )

    @staticmethod
    def sent(writer: Peer) -> int:
        """Return the token up to which rows were sent."""
        return writer.handler.sender.last_sent_token(writer.host.flooded)
