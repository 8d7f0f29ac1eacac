"""Tests for the broker double: channels, order, disconnections."""

from __future__ import annotations

from random import Random

from twisted.internet.protocol import ClientFactory, Protocol
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.redis.resp import encode
from tests.simulation.broker import SimulatedBroker
from tests.simulation.clock import SimulatedClock
from tests.simulation.network import SimulatedNetwork
from tests.simulation.reactor import ProcessReactor


class _Client(Protocol):
    def __init__(self) -> None:
        self.data = b""
        self.is_lost = False

    def dataReceived(self, data: bytes) -> None:
        self.data += data

    def connectionLost(self, reason: object = None) -> None:
        self.is_lost = True


class _Factory(ClientFactory):
    noisy = False
    name = "redis"

    def __init__(self) -> None:
        self.client = _Client()
        self.failures = 0

    def buildProtocol(self, addr: object) -> _Client:
        return self.client

    def clientConnectionFailed(self, connector: object, reason: object) -> None:
        self.failures += 1


class SimulatedBrokerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = SimulatedClock()
        self.network = SimulatedNetwork(self.clock, Random(1))
        self.published: list[tuple[str, bytes]] = []
        self.broker = SimulatedBroker(
            self.network,
            Random(1),
            lambda name, line: self.published.append((name, line)),
        )

    def connect(self, name: str) -> _Factory:
        factory = _Factory()
        reactor = ProcessReactor(self.clock, self.network, name)
        reactor.connectTCP("x", 1, factory)
        self.settle()
        return factory

    def settle(self) -> None:
        self.clock.run_until(self.clock.seconds() + 1)

    def send(self, factory: _Factory, *words: bytes) -> bytes:
        factory.client.data = b""
        assert factory.client.transport is not None
        factory.client.transport.write(encode(*words))
        self.settle()
        return factory.client.data

    def test_publish(self) -> None:
        """
        Subscribers receive published messages, and the publisher the number of
        subscribers.
        """
        reader, writer = self.connect("r"), self.connect("w")
        self.assertIn(b"subscribe", self.send(reader, b"SUBSCRIBE", b"hs"))
        self.assertEqual(self.send(writer, b"PUBLISH", b"hs", b"PING 1"), b":1\r\n")
        self.assertEqual(self.send(writer, b"PUBLISH", b"other", b"x"), b":0\r\n")
        self.assertTrue(
            reader.client.data.endswith(encode(b"message", b"hs", b"PING 1"))
        )
        self.assertEqual(self.published[0], ("w", b"PING 1"))

    def test_auth(self) -> None:
        """AUTH succeeds, fails, or gets no reply."""
        client = self.connect("r")
        self.assertEqual(self.send(client, b"AUTH", b"x"), b"+OK\r\n")
        self.broker.auth_fails = True
        self.assertIn(b"-WRONGPASS", self.send(client, b"AUTH", b"x"))
        self.broker.auth_stalls = True
        self.assertEqual(self.send(client, b"AUTH", b"x"), b"")
        self.assertEqual(self.send(client, b"PING"), b"+PONG\r\n")

    def test_slow_subscriber(self) -> None:
        """A subscriber that does not read is disconnected."""
        reader, writer = self.connect("r"), self.connect("w")
        self.send(reader, b"SUBSCRIBE", b"hs")
        self.network.slowness["r"] = 10_000.0
        self.broker.buffer_limit = 100
        self.send(writer, b"PUBLISH", b"hs", b"x" * 200)
        self.assertTrue(reader.client.is_lost)
        self.assertEqual(self.broker.kills, 1)
        self.assertEqual(self.send(writer, b"PUBLISH", b"hs", b"y"), b":0\r\n")

    def test_restart(self) -> None:
        """
        A broker that stops disconnects everyone, and refuses connections until it
        restarts.
        """
        reader = self.connect("r")
        self.broker.stop()
        self.settle()
        self.assertTrue(reader.client.is_lost)
        self.assertEqual(self.connect("r").failures, 1)
        self.broker.start()
        self.assertEqual(self.connect("r").failures, 0)
