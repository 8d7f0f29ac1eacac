"""Tests for :mod:`synapse_replication.app.http_limits`."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import twisted
from twisted.internet.address import IPv4Address, UNIXAddress
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IAddress
from twisted.internet.task import Clock, deferLater
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET
from twisted.web.static import Data

from synapse_replication.app import http_limits
from synapse_replication.app.http_limits import (
    REQUEST_TIMEOUT,
    BoundedSite,
    served_hosts,
)

ADDRESS = IPv4Address("TCP", "127.0.0.1", 9093)


class _Transport(StringTransport):
    is_aborted = False

    def abortConnection(self) -> None:
        self.is_aborted = True


class _SlowResource(Resource):
    isLeaf = True  # noqa: N815

    def render_GET(self, request: Any) -> int:
        return NOT_DONE_YET


class SiteTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        root: Any = Resource()
        for name in (b"status", b"health"):
            root.putChild(name, Data(b"fine", "text/plain"))
        rows: Any = Resource()
        root.putChild(b"rows", rows)
        rows.putChild(b"a", Data(b"row", "text/plain"))
        root.putChild(b"slow", _SlowResource())
        self.refused: list[int] = []
        self.clock = Clock()
        self.site = BoundedSite(
            root,
            served_hosts(["10.0.0.1"], ["writer1.local"]),
            max_connections=3,
            guarded=b"/rows/",
            refused=lambda status, why: self.refused.append(status),
        )
        self.site.reactor = self.clock

    def connect(self, address: IAddress = ADDRESS) -> tuple[Any, _Transport]:
        channel = self.site.buildProtocol(None)
        transport = _Transport(hostAddress=address)
        channel.makeConnection(transport)
        return channel, transport

    def send_request(
        self, head: str, body: bytes = b"", address: IAddress = ADDRESS
    ) -> tuple[int, _Transport]:
        channel, transport = self.connect(address)
        channel.dataReceived(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        self.clock.advance(0)
        answer = transport.value()
        channel.connectionLost(Failure(ConnectionDone()))
        return int(answer.split(b" ")[1]), transport


class SlowRequestTests(SiteTestCase):
    """Tests for requests that are sent slowly, or not at all."""

    def test_incomplete_request(self) -> None:
        """A connection whose request is not complete in time is closed."""
        silent, slow = self.connect(), self.connect()
        for byte in b"GET /health":
            self.clock.advance(0.9)
            slow[0].dataReceived(bytes([byte]))
        self.assertFalse(slow[1].is_aborted)
        self.clock.advance(0.2)
        self.assertTrue(slow[1].is_aborted)
        self.assertTrue(silent[1].is_aborted)
        self.assertEqual(self.refused, [408, 408])

    def test_idle_connection(self) -> None:
        """After a complete request, a connection may be idle for longer."""
        channel, transport = self.connect()
        request = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
        channel.dataReceived(request)
        self.clock.advance(REQUEST_TIMEOUT * 3)
        channel.dataReceived(request)
        self.clock.advance(REQUEST_TIMEOUT * 3)
        self.assertFalse(transport.is_aborted)
        channel.dataReceived(b"GET")
        self.clock.advance(REQUEST_TIMEOUT)
        self.assertTrue(transport.is_aborted)


class _Turns(Clock):
    """A clock that stores what the next turns do."""

    def __init__(self, turns: list[Callable[[], object]]) -> None:
        super().__init__()
        self._turns = turns

    def callLater(
        self, delay: float, callable: Callable[..., object], *args: object, **kw: object
    ) -> Any:
        if delay == 0:
            return self._turns.append(lambda: callable(*args, **kw))
        return super().callLater(delay, callable, *args, **kw)


class ManyRequestsTests(SiteTestCase):
    """Tests for many requests at once."""

    REQUEST = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"

    def test_turns(self) -> None:
        """Requests are answered in turns, in their order, on each connection."""
        self.patch(http_limits, "_SLICE", 0)
        turns: list[Callable[[], object]] = []
        self.site.reactor = _Turns(turns)
        many, few = self.connect(), self.connect()
        many[0].dataReceived(self.REQUEST * 3)
        few[0].dataReceived(self.REQUEST)

        def answered() -> list[int]:
            return [each[1].value().count(b"HTTP/1.1 200") for each in (many, few)]

        found = [answered()]
        while turns:
            turns.pop(0)()
            found.append(answered())
        fair = [[0, 0], [1, 0], [1, 1], [2, 1], [3, 1]]
        # Old versions of Twisted pass on all requests of one read at once.
        as_read = [[0, 0], [1, 0], [2, 0], [3, 0], [3, 1]]
        is_old = int(twisted.__version__.split(".")[0]) < 23
        self.assertIn(found, [fair, as_read] if is_old else [fair])

    def test_client_that_does_not_read(self) -> None:
        """
        While a client does not read, its next requests are not answered, and its
        connection may be closed for others.
        """
        channel, transport = self.connect()
        channel.dataReceived(self.REQUEST)
        channel.pauseProducing()
        self.clock.advance(0)
        self.assertEqual(transport.value(), b"")
        channel.resumeProducing()
        self.clock.advance(0)
        self.assertIn(b"200 OK", transport.value())
        channel.dataReceived(self.REQUEST)
        channel.pauseProducing()
        self.clock.advance(0)
        for _ in range(3):
            self.connect()
        self.assertTrue(transport.is_aborted)

    def test_client_that_left(self) -> None:
        """A request whose client has gone is not answered."""
        gone, there = self.connect(), self.connect()
        for channel, _ in (gone, there):
            channel.dataReceived(self.REQUEST)
        gone[0].connectionLost(Failure(ConnectionDone()))
        self.clock.advance(0)
        self.assertEqual(gone[1].value(), b"")
        self.assertIn(b"200 OK", there[1].value())


class BodyTests(SiteTestCase):
    """Tests for requests with a body."""

    def test_refused_before_reading(self) -> None:
        """A request that announces a body is refused immediately, on every path."""
        for path in ("/status", "/health", "/rows/a", "/nothing", "/"):
            for announced in (
                "Content-Length: 1",
                f"Content-Length: {20 << 20}",
                "Transfer-Encoding: chunked",
                "Content-Type: application/x-www-form-urlencoded\nContent-Length: 9",
            ):
                head = f"POST {path} HTTP/1.1\nHost: localhost\n{announced}"
                status, transport = self.send_request(head)
                self.assertEqual(status, 413, head)
                self.assertEqual(transport.producerState, "paused")
        self.assertEqual(set(self.refused), {413})

    def test_body_is_discarded(self) -> None:
        """
        A body that arrives nevertheless is discarded, and the connection is aborted.
        """
        channel, transport = self.connect()
        channel.dataReceived(
            b"POST /status HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\n\r\n"
            + b"x"
        )
        for _ in range(100):
            channel.dataReceived(b"x" * 65536)
        self.assertEqual(transport.value().count(b"HTTP/1.1"), 1)
        self.assertFalse(transport.is_aborted)
        self.clock.advance(1.5)
        self.assertTrue(transport.is_aborted)

    def test_request_without_body(self) -> None:
        """A Content-Length of 0 is not a body."""
        status, _ = self.send_request(
            "GET /status HTTP/1.1\nHost: localhost\nContent-Length: 0"
        )
        self.assertEqual(status, 200)


class HostTests(SiteTestCase):
    """Tests for the Host header of requests."""

    def status(self, path: str, host: str, address: IAddress = ADDRESS) -> int:
        return self.send_request(f"GET {path} HTTP/1.1\nHost: {host}", address=address)[
            0
        ]

    def test_served(self) -> None:
        """Addresses, the names of this machine and configured names are served."""
        for host in (
            "localhost",
            "LOCALHOST.:9093",
            "127.0.0.1:9093",
            "[::1]:9093",
            "10.2.3.4",
            "writer1.local:80",
            "synapse-reader1:9101",
            "synapse_reader_1",
            "reader1.matrix.svc:9101",
            "reader1.matrix.svc.cluster.local",
        ):
            self.assertEqual(self.status("/status", host), 200, host)

    def test_search_domains(self) -> None:
        """Names in the search domains of this machine are served."""
        path = Path(self.mktemp())
        path.write_text(
            "nameserver 10.0.0.10\noptions ndots:5\n"
            "search matrix.svc.cluster.local svc.cluster.local corp.example com\n"
        )
        self.assertEqual(
            http_limits.search_domains(path),
            (
                "matrix.svc.cluster.local",
                "svc.cluster.local",
                "corp.example",
                "matrix",
            ),
        )
        self.assertEqual(http_limits.search_domains(path / "missing"), ())

    def test_not_served(self) -> None:
        """Any other host name, such as that of a web page, is refused."""
        for host in (
            "evil.example",
            "evil.example:9093",
            "127.0.0.1.evil.example",
            "x y",
        ):
            self.assertEqual(self.status("/status", host), 421, host)
            self.assertEqual(self.status("/rows/", host), 404, host)
        self.assertEqual(self.refused, [421] * 4)

    def test_not_checked(self) -> None:
        """
        The header is not checked for health, guarded paths, Unix sockets and HTTP/1.0.
        """
        self.assertEqual(self.status("/health", "evil.example"), 200)
        self.assertEqual(self.status("/rows/a", "evil.example"), 200)
        unix = UNIXAddress("/run/main.sock")
        self.assertEqual(self.status("/status", "evil.example", unix), 200)
        self.assertEqual(self.send_request("GET /status HTTP/1.0")[0], 200)


class ConnectionTests(SiteTestCase):
    """Tests for the maximum number of connections."""

    def test_longest_idle_is_aborted(self) -> None:
        """At the limit, the connection that has been idle the longest is aborted."""
        used, used_transport = self.connect()
        _, idle = self.connect()
        half, half_transport = self.connect()
        half.dataReceived(b"GET /status HTTP/1.1\r\n")
        used.dataReceived(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.clock.advance(0)
        self.connect()
        self.assertTrue(idle.is_aborted)
        self.connect()
        self.assertTrue(half_transport.is_aborted)
        self.assertFalse(used_transport.is_aborted)

    def test_displaced(self) -> None:
        """A connection that was aborted for another one is not refused later."""
        half = [self.connect() for _ in range(5)]
        for channel, _ in half:
            channel.dataReceived(b"GET /status HTTP/1.1\r\n")
        displaced = [channel for channel, transport in half if transport.is_aborted]
        self.assertEqual(displaced, [channel for channel, _ in half[:2]])
        for channel in displaced:
            channel.connectionLost(Failure(ConnectionDone()))
        self.clock.advance(REQUEST_TIMEOUT)
        self.assertEqual(self.refused, [408] * 3)

    def test_all_busy(self) -> None:
        """If all connections are answering requests, a new one is refused with 503."""
        for _ in range(3):
            channel, _ = self.connect()
            channel.dataReceived(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.assertIsNone(self.site.buildProtocol(None))
        self.assertEqual(self.refused, [503])
        channel.connectionLost(Failure(ConnectionDone()))
        self.assertIsNotNone(self.site.buildProtocol(None))


class RealSocketTests(TestCase):
    """Requests that are never completed, on real sockets."""

    async def test_incomplete_requests(self) -> None:
        """
        Clients that occupy all connections are displaced by new ones, and disconnected
        when their requests are not complete in time.
        """
        self.patch(http_limits, "REQUEST_TIMEOUT", 1.0)
        from twisted.internet import reactor as untyped_reactor  # noqa: TID251

        reactor: Any = untyped_reactor
        root: Any = Resource()
        root.putChild(b"health", Data(b"fine", "text/plain"))
        refused: list[int] = []
        site = BoundedSite(
            root,
            served_hosts(["127.0.0.1"], []),
            guarded=None,
            max_connections=100,
            refused=lambda status, why: refused.append(status),
        )
        port = reactor.listenTCP(0, site, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        with contextlib.ExitStack() as stack:

            async def connect(data: bytes) -> socket.socket:
                peer = socket.create_connection(("127.0.0.1", port.getHost().port))
                stack.enter_context(peer)
                peer.sendall(data)
                peer.setblocking(False)
                await deferLater(reactor, 0)
                return peer

            async def answer(peer: socket.socket) -> bytes:
                while True:
                    try:
                        return peer.recv(1000)
                    except BlockingIOError:
                        await deferLater(reactor, 0.01)
                    except ConnectionResetError:
                        return b""

            half = [await connect(b"GET /health HTTP/1.1\r\n") for _ in range(150)]
            whole = await connect(b"GET /health HTTP/1.0\r\n\r\n")
            self.assertIn(b"200 OK", await answer(whole))
            for peer in half:
                self.assertEqual(await answer(peer), b"")
        self.assertEqual(set(refused), {408})
