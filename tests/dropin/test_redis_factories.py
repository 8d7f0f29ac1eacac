"""Tests for the connections to Redis, created as the host does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import txredisapi
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.redis_factories import (
    DropInRedisFactory,
    RedisDirectTcpReplicationClientFactory,
    lazyConnection,
    lazyUnixConnection,
)
from tests.dropin.host import FakeHomeserver, SingleCommandHandler, fake_modules


class RedisTests(SynchronousTestCase):
    """Tests for the factories, on a reactor in memory."""

    def setUp(self) -> None:
        fake_modules(
            self,
            modules={
                "synapse.replication.tcp.redis": {
                    "SynapseRedisFactory": DropInRedisFactory
                },
                "synapse.replication.tcp.context": {
                    "ClientContextFactory": lambda config: "context"
                },
            },
        )
        self.hs: Any = FakeHomeserver()
        self.hs.reactor = MemoryReactorClock()
        self.hs.reactor.nameResolver = None  # type: ignore[assignment]
        self.hs.config.redis = SimpleNamespace(
            redis_enabled=True, redis_use_tls=False, redis_password="secret"
        )
        self.handler = SingleCommandHandler()
        self.hs.get_replication_command_handler = lambda: self.handler  # type: ignore[method-assign]

    def test_tcp(self) -> None:
        """
        A TCP connection is made by the host's reactor; its handler is returned
        immediately.
        """
        connection = lazyConnection(self.hs, host="r", port=7, password="secret")
        self.assertIsInstance(connection, txredisapi.ConnectionHandler)
        ((host, port, factory, timeout, _),) = self.hs.reactor.tcpClients
        self.assertEqual((host, port, timeout), ("r", 7, 30))
        self.assertEqual((factory.password, factory.maxDelay), ("secret", 5))
        self.assertTrue(factory.continueTrying)

    def test_tls(self) -> None:
        """With TLS, the host's own context is used."""
        self.hs.config.redis.redis_use_tls = True
        lazyConnection(self.hs, host="r", port=7)
        ((host, _, _, context, _, _),) = self.hs.reactor.sslClients
        self.assertEqual((host, context), ("r", "context"))

    def test_unix(self) -> None:
        """A Unix socket is supported, and reconnecting can be disabled."""
        lazyUnixConnection(self.hs, path="/r.sock", reconnect=False)
        ((path, factory, *_),) = self.hs.reactor.unixClients
        self.assertEqual(path, "/r.sock")
        self.assertFalse(factory.continueTrying)

    def test_host_shuts_down(self) -> None:
        """
        A connection is closed when the host shuts down, even if replication was not
        started.
        """
        lazyConnection(self.hs)
        ((*_, factory, _, _),) = self.hs.reactor.tcpClients
        ended: list[str] = []
        factory.connector = SimpleNamespace(
            stopConnecting=lambda: ended.append("no more"),
            disconnect=lambda: ended.append("closed"),
        )
        (at_shutdown,) = self.hs.at_shutdown
        at_shutdown["shutdown_func"]()
        self.assertEqual(ended, ["no more", "closed"])
        self.assertFalse(factory.continueTrying)

    def test_subscription_and_sender(self) -> None:
        """The subscription sends through the sender of the outbound connection."""
        outbound = lazyConnection(self.hs)
        factory = RedisDirectTcpReplicationClientFactory(
            self.hs, outbound, channel_names=["USER_IP"]
        )
        self.assertEqual(factory.channels, ["test", "test/USER_IP"])
        self.assertEqual(factory.password, "secret")
        self.assertIs(factory.sender, outbound._factory.sender)

    def test_foreign_sender(self) -> None:
        """On a foreign outbound connection, lines are published one at a time."""
        published: list[tuple[str, str]] = []
        outbound = SimpleNamespace(publish=lambda *args: published.append(args))
        factory = RedisDirectTcpReplicationClientFactory(
            self.hs, outbound, channel_names=[]
        )
        factory.sender.publish("PING", "test", [b"PING 1", b"PING 2"])
        self.assertEqual(published, [("test", "PING 1"), ("test", "PING 2")])

    def test_announces_after_a_loss(self) -> None:
        """If published rows may have been lost, the handler announces its positions."""
        factory = lazyConnection(self.hs)._factory
        factory.sender.publish("RDATA", "test", [b"RDATA s w 1 []"])
        self.assertEqual(factory.sender._ledger.lost, 1)
        factory.sender._on_lost(1)
        self.assertEqual(self.handler.calls, [("positions",)])
