"""Tests for the client's factory on a real reactor, with real sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import ReconnectingClientFactory
from twisted.trial.unittest import TestCase

from synapse_replication.handlers.events import ConnectFailed, LinkUp
from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.tcp.factory import (
    DirectTcpReplicationClientFactory,
    ReplicationStreamProtocolFactory,
)
from tests.tcp.doubles import RecordingHandler


class _Links(ReplicationObserver):
    """Fires a Deferred at each link that comes up, or attempt that fails."""

    def __init__(self) -> None:
        self.up: Deferred[None] = Deferred()
        self.failed: Deferred[str] = Deferred()

    @handles(LinkUp)
    def _link_up(self, event: LinkUp) -> None:
        up, self.up = self.up, Deferred()
        up.callback(None)

    @handles(ConnectFailed)
    def _connect_failed(self, event: ConnectFailed) -> None:
        failed, self.failed = self.failed, Deferred()
        failed.callback(event.why)


class ReconnectingTests(TestCase):
    """Tests for :class:`DirectTcpReplicationClientFactory`."""

    timeout = 30

    def setUp(self) -> None:
        from twisted.internet import reactor as untyped_reactor  # noqa: TID251

        self.reactor: Any = untyped_reactor
        self.clock = ReactorClock(self.reactor)
        self.links = _Links()
        self.server = ReplicationStreamProtocolFactory(
            "repl.test", self.clock, RecordingHandler(), ReplicationObserver()
        )
        self.patch(DirectTcpReplicationClientFactory, "initialDelay", 0.01)
        self.factory = DirectTcpReplicationClientFactory(
            "worker1", "repl.test", self.clock, RecordingHandler(), self.links
        )

    async def check(
        self, listen: Callable[[], Any], connect: Callable[[], Any]
    ) -> None:
        """Connect, lose the connection, lose the listener, connect again, and stop."""
        port = listen()
        up = self.links.up
        connect()
        await up
        up = self.links.up
        for connection in self.server.connections:
            connection.abort()
        await up
        self.assertEqual(self.factory.retries, 1)
        failed = self.links.failed
        await port.stopListening()
        await self.server.close_connections()
        self.assertRegex(await failed, "refused|No such file")
        up = self.links.up
        port = listen()
        await up
        await self.factory.stop()
        self.assertFalse(self.factory.continueTrying)
        await port.stopListening()
        await self.server.close_connections()

    async def test_port(self) -> None:
        """Twisted's factory reconnects over the reactor's ``connectTCP``."""
        self.assertIsInstance(self.factory, ReconnectingClientFactory)
        number = await self.free_port()
        await self.check(
            lambda: self.reactor.listenTCP(number, self.server, interface="127.0.0.1"),
            lambda: self.reactor.connectTCP("127.0.0.1", number, self.factory),
        )

    async def test_unix_socket(self) -> None:
        """The factory reconnects over the reactor's ``connectUNIX``."""
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        path = str(folder / "main.sock")
        await self.check(
            lambda: self.reactor.listenUNIX(path, self.server),
            lambda: self.reactor.connectUNIX(path, self.factory),
        )

    async def test_endpoint(self) -> None:
        """The factory reconnects to an endpoint."""
        number = await self.free_port()
        endpoint = TCP4ClientEndpoint(self.reactor, "127.0.0.1", number)
        await self.check(
            lambda: self.reactor.listenTCP(number, self.server, interface="127.0.0.1"),
            lambda: self.factory.connect(endpoint),
        )

    async def test_stop_trying(self) -> None:
        """After ``stopTrying``, a lost connection is not replaced."""
        port = self.reactor.listenTCP(0, self.server, interface="127.0.0.1")
        up = self.links.up
        self.reactor.connectTCP("127.0.0.1", port.getHost().port, self.factory)
        await up
        self.factory.stopTrying()
        await self.server.close_connections()
        await port.stopListening()
        self.assertEqual(self.factory.retries, 0)

    async def free_port(self) -> int:
        """Return the number of a port that was free a moment ago."""
        port = self.reactor.listenTCP(0, self.server, interface="127.0.0.1")
        number: int = port.getHost().port
        await port.stopListening()
        return number
