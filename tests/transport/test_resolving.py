"""Tests for connections to hosts that Twisted alone does not reach."""

from __future__ import annotations

import socket
from typing import Any

from twisted.internet import reactor  # noqa: TID251
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone, DNSLookupError
from twisted.internet.protocol import ClientFactory, Factory, Protocol
from twisted.trial.unittest import SynchronousTestCase, TestCase

from synapse_replication.options import InvalidValueError
from synapse_replication.transport.host_names import (
    checked_host,
    checked_socket_path,
    host_port,
)
from synapse_replication.transport.resolving import (
    ResolvingConnector,
    connect_to_host,
    host_endpoint,
)


class CheckedHostTests(SynchronousTestCase):
    def test_valid(self) -> None:
        """Names of containers and services, and addresses, are valid."""
        for host in (
            "localhost",
            "synapse_main_1",
            "synapse-main",
            "synapse.matrix.svc.cluster.local",
            "example.com.",
            "10.0.0.1",
            "::1",
            "fe80::1%eth0",
            "bücher.example",
        ):
            self.assertEqual(checked_host(host), host)
        self.assertEqual(checked_host("[::1]"), "::1")

    def test_invalid(self) -> None:
        """URLs, ports, blanks and empty labels are refused, with a hint."""
        for host in (
            "",
            " ",
            "redis://cache",
            "redis://user:hush@cache:1/0",
            "http://main:9093",
            "main:9093",
            "[::1]:9093",
            "a b",
            " main",
            "main\n",
            "a/b",
            "a..b",
            ".a",
            "[main]",
            "user@main",
            "a" * 254,
        ):
            error = self.assertRaises(InvalidValueError, checked_host, host)
            self.assertNotIn("hush", str(error))
        error = self.assertRaises(InvalidValueError, checked_host, "main:9093")
        self.assertEqual(error.hint, "write host: main and port: 9093")

    def test_socket_path(self) -> None:
        """A path that is too long for a Unix socket is refused."""
        longest = "/run/" + "é" * 51
        self.assertEqual(checked_socket_path(longest), longest)
        error = self.assertRaises(InvalidValueError, checked_socket_path, longest + "é")
        self.assertIn("has 109 bytes, but the path of a Unix socket", error.problem)
        for path in ("", "/run/a\0b"):
            self.assertRaises(InvalidValueError, checked_socket_path, path)

    def test_host_port(self) -> None:
        """An IPv6 address is written in brackets."""
        self.assertEqual(host_port("::1", 5), "[::1]:5")
        self.assertEqual(host_port("a", 5), "a:5")


class _Resolver:
    """A resolver that knows some names; an error for all others."""

    def __init__(self, **addresses: list[str]) -> None:
        self._addresses = addresses

    def resolveHostName(
        self, receiver: Any, host: str, port: int, **kinds: Any
    ) -> None:
        receiver.resolutionBegan(self)
        for address in self._addresses.get(host, ()):
            kind: Any = IPv6Address if ":" in address else IPv4Address
            receiver.addressResolved(kind("TCP", address, port))
        receiver.resolutionComplete()


class _Reactor:
    """The real reactor, which resolves only the names that a test declares."""

    def __init__(self, **addresses: list[str]) -> None:
        self.nameResolver = _Resolver(**addresses)

    def __getattr__(self, name: str) -> Any:
        return getattr(reactor, name)


class _Client(ClientFactory):
    protocol = Protocol
    noisy = False

    def __init__(self) -> None:
        self.ended: Deferred[Any] = Deferred()
        self.connector: Any = None

    def startedConnecting(self, connector: Any) -> None:
        self.connector = connector

    def clientConnectionFailed(self, connector: Any, reason: Any) -> None:
        self.ended.callback(reason.value)

    def clientConnectionLost(self, connector: Any, reason: Any) -> None:
        self.ended.callback(reason.value)


class _Greeter(Protocol):
    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.loseConnection()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


class ConnectTests(TestCase):
    """Tests with a listener on the loopback address of IPv6, and of IPv4."""

    if not _has_ipv6():
        skip = "this machine has no IPv6"

    def setUp(self) -> None:
        factory = Factory.forProtocol(_Greeter)
        listening: Any = reactor
        self.ports = {
            address: listening.listenTCP(0, factory, interface=address)
            for address in ("::1", "127.0.0.1")
        }
        for port in self.ports.values():
            self.addCleanup(port.stopListening)

    def port(self, address: str) -> int:
        return int(self.ports[address].getHost().port)

    def connect(self, host: str, port: int, **addresses: list[str]) -> _Client:
        client = _Client()
        twisted: Any = _Reactor(**addresses)
        made = connect_to_host(
            twisted,
            host,
            port,
            client,
            lambda host, factory: twisted.connectTCP(host, port, factory, timeout=5),
        )
        self.assertIsInstance(made, ResolvingConnector)
        self.assertIs(client.connector, made)
        return client

    async def test_only_ipv6(self) -> None:
        """A factory connects to a name with IPv6 addresses only."""
        client = self.connect(
            "redis6.invalid", self.port("::1"), **{"redis6.invalid": ["::2", "::1"]}
        )
        error = await client.ended
        self.assertIsInstance(error, ConnectionDone)
        self.assertEqual(client.connector.getDestination().host, "::1")

    async def test_again(self) -> None:
        """A connector can connect again, as factories that reconnect do."""
        client = self.connect(
            "127.0.0.1.invalid", self.port("::1"), **{"127.0.0.1.invalid": ["::1"]}
        )
        await client.ended
        client.ended = Deferred()
        client.connector.connect()
        error = await client.ended
        self.assertIsInstance(error, ConnectionDone)

    async def test_unknown(self) -> None:
        """A name without addresses is an error."""
        client = self.connect("nobody.invalid", 1)
        error = await client.ended
        self.assertIsInstance(error, DNSLookupError)

    async def test_underscore(self) -> None:
        """An endpoint connects to a name with an underscore, by IPv4 or IPv6."""
        for address in self.ports:
            twisted: Any = _Reactor(synapse_main_1=["::2", address])
            endpoint = host_endpoint(
                twisted,
                "synapse_main_1",
                self.port(address),
                5.0,
            )
            ended: Deferred[None] = Deferred()

            class Ends(Protocol):
                def connectionLost(
                    self, reason: Any = None, ended: Deferred[None] = ended
                ) -> None:
                    ended.callback(None)

            await endpoint.connect(Factory.forProtocol(Ends))
            await ended
