"""Tests for :mod:`tests.support.link_proxy`."""

from __future__ import annotations

import socket

from twisted.trial.unittest import SynchronousTestCase

from tests.support.link_proxy import Cut, LinkProxy

#: Seconds to wait for bytes that must arrive, and for bytes that must not.
ARRIVAL_TIMEOUT = 5.0
SILENCE = 0.1


class LinkProxyTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.target = socket.create_server(("127.0.0.1", 0))
        self.target.settimeout(ARRIVAL_TIMEOUT)
        self.addCleanup(self.target.close)
        self.proxy = LinkProxy(self.target.getsockname())
        self.addCleanup(self.proxy.close)

    def connect(self) -> tuple[socket.socket, socket.socket]:
        process = socket.create_connection(
            ("127.0.0.1", self.proxy.port), ARRIVAL_TIMEOUT
        )
        self.addCleanup(process.close)
        server, _ = self.target.accept()
        server.settimeout(ARRIVAL_TIMEOUT)
        self.addCleanup(server.close)
        return process, server

    def assert_passes(
        self, source: socket.socket, sink: socket.socket, data: bytes = b"hello"
    ) -> None:
        source.sendall(data)
        self.assertEqual(sink.recv(100), data)

    def assert_vanishes(self, source: socket.socket, sink: socket.socket) -> None:
        source.sendall(b"lost")
        sink.settimeout(SILENCE)
        self.assertRaises(socket.timeout, sink.recv, 100)
        sink.settimeout(ARRIVAL_TIMEOUT)

    def subscribe(self) -> tuple[socket.socket, socket.socket]:
        process, server = self.connect()
        self.assert_passes(process, server, b"*2\r\n$9\r\nSUBSCRIBE\r\n$1\r\nx\r\n")
        return process, server

    def test_all_passes(self) -> None:
        """Without a cut, bytes and the end of a connection pass in both directions."""
        process, server = self.connect()
        self.assert_passes(process, server)
        self.assert_passes(server, process)
        server.close()
        self.assertEqual(process.recv(100), b"")

    def test_publishes_vanish(self) -> None:
        """Publishes are dropped while replies and the subscription still pass."""
        process, server = self.connect()
        subscriber, channel = self.subscribe()
        self.proxy.cut(Cut.PUBLISHES)
        self.assert_vanishes(process, server)
        self.assert_passes(server, process)
        self.assert_passes(subscriber, channel)
        self.assert_passes(channel, subscriber)

    def test_replies_vanish(self) -> None:
        """Replies to publishes are dropped while the publishes arrive."""
        process, server = self.connect()
        subscriber, channel = self.subscribe()
        self.proxy.cut(Cut.REPLIES)
        self.assert_vanishes(server, process)
        self.assert_passes(process, server)
        self.assert_passes(subscriber, channel)
        self.assert_passes(channel, subscriber)

    def test_pings_vanish(self) -> None:
        """Data from a subscriber is dropped while messages still reach it."""
        publishing = self.connect()
        process, server = self.subscribe()
        self.proxy.cut(Cut.PINGS)
        self.assert_vanishes(process, server)
        self.assert_passes(server, process)
        self.assert_passes(*publishing)

    def test_subscription_vanishes(self) -> None:
        """Messages to a subscriber are dropped while publishes still arrive."""
        publishing = self.connect()
        process, server = self.subscribe()
        self.proxy.cut(Cut.SUBSCRIPTION)
        self.assert_vanishes(server, process)
        self.assert_passes(process, server)
        self.assert_passes(*publishing)

    def test_healing_closes_damaged_connections(self) -> None:
        """A connection that lost bytes is closed; the others stay open."""
        process, server = self.connect()
        subscription = self.subscribe()
        self.proxy.cut(Cut.PUBLISHES)
        self.assert_vanishes(process, server)
        self.proxy.heal()
        self.assertEqual(process.recv(100), b"")
        self.assertEqual(server.recv(100), b"")
        self.assert_passes(*subscription)
        self.assert_passes(*self.connect())

    def test_no_target(self) -> None:
        """A connection is closed if the target does not accept."""
        self.target.close()
        with socket.create_connection(
            ("127.0.0.1", self.proxy.port), ARRIVAL_TIMEOUT
        ) as process:
            self.assertEqual(process.recv(100), b"")
