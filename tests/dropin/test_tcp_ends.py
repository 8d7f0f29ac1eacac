"""Tests for both ends of a direct TCP connection, created as by the host."""

from __future__ import annotations

from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.tcp_ends import (
    DropInClientProtocol,
    DropInProtocolFactory,
    DropInServerProtocol,
)
from tests.dropin.host import (
    FakeHomeserver,
    HostWithHandler,
    SingleCommandHandler,
    fake_modules,
)


class ProtocolTests(SynchronousTestCase):
    """Tests for both ends, with a handler that supports only single commands."""

    def setUp(self) -> None:
        fake_modules(self)
        self.hs = FakeHomeserver()
        self.handler = SingleCommandHandler()

    def _client(self) -> DropInClientProtocol:
        return DropInClientProtocol(
            self.hs, "client", "test", self.hs.clock, self.handler
        )

    def test_server(self) -> None:
        """The server sends SERVER and PING, and receives the client's commands."""
        server = DropInServerProtocol(self.hs, "test", self.hs.clock, self.handler)
        transport = StringTransport()
        server.makeConnection(transport)
        self.assertTrue(transport.value().startswith(b"SERVER test\nPING "))
        server.dataReceived(b"NAME a\nREMOTE_SERVER_UP b\n")
        self.assertEqual((server.name, self.handler.calls), ("a", [("new",)]))

    def test_created_early(self) -> None:
        """
        The timeout of a client starts with its connection, not with its creation.
        """
        client = self._client()
        self.hs.reactor.advance(3600)
        transport = StringTransport()
        client.makeConnection(transport)
        self.assertIn(b"NAME client\n", transport.value())
        self.assertNotIn(b"ERROR", transport.value())

    def test_reconnected(self) -> None:
        """
        A client protocol can be connected again, even if the loss of its first
        connection was not reported.
        """
        client = self._client()
        for _ in range(2):
            client.makeConnection(StringTransport())
            client.dataReceived(b"SERVER test\n")
        self.assertEqual(
            [call for (call, *_) in self.handler.calls if call != "positions"],
            ["new", "lost", "new"],
        )


class FactoryTests(SynchronousTestCase):
    """Tests for DropInProtocolFactory."""

    def test_server_factory(self) -> None:
        """The factory creates the host's server protocol, with the host's handler."""
        fake_modules(
            self,
            modules={
                "synapse.replication.tcp.protocol": {
                    "ServerReplicationStreamProtocol": lambda *args: args
                }
            },
        )
        hs = HostWithHandler("w")
        factory = DropInProtocolFactory(hs)
        self.assertEqual(
            factory.buildProtocol(None),
            (hs, "test", hs.clock, hs.get_replication_command_handler()),
        )
