"""Tests of listening, and of reconnecting."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone, ConnectionRefusedError
from twisted.internet.interfaces import (
    IProtocol,
    IProtocolFactory,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import Protocol
from twisted.internet.testing import MemoryReactorClock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from synapse_replication.tcp.factory import (
    DirectTcpReplicationClientFactory,
    ReplicationStreamProtocolFactory,
)
from synapse_replication.tcp.protocol import BaseReplicationStreamProtocol
from tests.support.recording_observer import RecordingObserver
from tests.tcp.doubles import (
    FakeClock,
    PausingTransport,
    RecordingHandler,
)


@implementer(IStreamClientEndpoint)
class StepEndpoint:
    """An endpoint whose attempts a test ends with ``fail`` or ``accept``.

    :ivar attempts: the pending attempts.
    """

    def __init__(self) -> None:
        self.count = 0
        self.attempts: list[tuple[IProtocolFactory, Deferred[IProtocol]]] = []

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        self.count += 1
        attempt: Deferred[IProtocol] = Deferred()
        self.attempts.append((protocolFactory, attempt))
        return attempt

    def fail(self) -> None:
        _, attempt = self.attempts.pop()
        attempt.errback(Failure(ConnectionRefusedError("nobody there")))

    def accept(self) -> BaseReplicationStreamProtocol:
        factory, attempt = self.attempts.pop()
        assert isinstance(factory, DirectTcpReplicationClientFactory)
        protocol = factory.buildProtocol(None)
        protocol.makeConnection(PausingTransport())
        attempt.callback(protocol)
        return protocol


def drop(protocol: Protocol) -> None:
    protocol.connectionLost(Failure(ConnectionDone()))


class ServerFactoryTests(SynchronousTestCase):
    """``ReplicationStreamProtocolFactory``."""

    def setUp(self) -> None:
        self.handler = RecordingHandler()
        self.observer = RecordingObserver()
        self.factory = ReplicationStreamProtocolFactory(
            "repl.test", FakeClock(), self.handler, self.observer, max_connections=3
        )

    def connect(
        self, greeting: bytes = b"NAME w\n"
    ) -> tuple[Protocol, PausingTransport]:
        protocol = self.factory.buildProtocol(None)
        assert protocol is not None
        transport = PausingTransport()
        protocol.makeConnection(transport)
        protocol.dataReceived(greeting)
        return protocol, transport

    def test_too_many_silent_clients(self) -> None:
        """At the limit, a new connection replaces the oldest one that sent no NAME."""
        _, peer = self.connect()
        _, first_silent = self.connect(b"")
        _, second_silent = self.connect(b"")
        self.connect()
        self.assertTrue(first_silent.aborted)
        self.assertFalse(peer.aborted or second_silent.aborted)
        self.connect()
        # The first one's transport has not reported the disconnection yet.
        self.assertTrue(second_silent.aborted)
        self.assertEqual(self.observer.failures, [])

    def test_too_many_peers(self) -> None:
        """If all connections have sent NAME, a new one is refused and reported."""
        ends = [self.connect() for _ in range(3)]
        self.assertIsNone(self.factory.buildProtocol(None))
        (error,) = self.observer.refused
        self.assertIn("max_connections", str(error))
        drop(ends[0][0])
        self.connect()

    def test_connections(self) -> None:
        """``connections`` lists the open connections."""
        (one, _), (other, _) = self.connect(), self.connect()
        self.assertEqual(self.factory.connections, [one, other])
        self.assertEqual(len(self.factory.buffers()), 2)
        drop(one)
        self.assertEqual(self.factory.connections, [other])

    def test_close(self) -> None:
        """``close_connections`` waits until every connection is closed."""
        ends = [self.connect(), self.connect()]
        done = self.factory.close_connections()
        again = self.factory.close_connections()
        for protocol, transport in ends:
            self.assertTrue(transport.disconnecting)
            self.assertNoResult(done)
            drop(protocol)
        self.successResultOf(done)
        self.successResultOf(again)
        self.assertEqual(self.handler.calls, ["new", "new", "lost", "lost"])

    def test_close_without_connections(self) -> None:
        """``close_connections`` fires immediately if there are no connections."""
        self.successResultOf(self.factory.close_connections())


class ClientTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = FakeClock()
        self.handler = RecordingHandler()
        self.observer = RecordingObserver()
        self.factory = DirectTcpReplicationClientFactory(
            "worker1",
            "repl.test",
            self.clock,
            self.handler,
            self.observer,
            jitter=lambda: 0.0,
        )


class BackOffTests(ClientTestCase):
    """The delays between attempts."""

    def setUp(self) -> None:
        super().setUp()
        self.endpoint = StepEndpoint()
        self.factory.connect(self.endpoint)

    def establish(self) -> BaseReplicationStreamProtocol:
        protocol = self.endpoint.accept()
        protocol.dataReceived(b"SERVER repl.test\n")
        return protocol

    def test_refused(self) -> None:
        """The delay grows to 5 s; each failure is reported with its reason."""
        for _ in range(8):
            self.endpoint.fail()
            self.clock.run(5.5)
        self.assertEqual(self.endpoint.count, 9)
        retries = self.observer.retries
        self.assertEqual(retries, sorted(retries))
        self.assertEqual((retries[0], retries[1], retries[-1]), (0.5, 0.85, 5.0))
        kind, name, why = self.observer.links[0]
        self.assertEqual((kind, name), ("failed", "worker1"))
        self.assertIn("nobody there", why)

    def test_accepts_then_closes(self) -> None:
        """If the server accepts and then closes, the delay grows as well."""
        for _ in range(200):
            if self.endpoint.attempts:
                drop(self.endpoint.accept())
            self.clock.run(0.5)
        self.assertLess(self.endpoint.count, 30)
        self.assertEqual(self.observer.retries[-1], 5.0)
        self.assertIn("closed cleanly", self.observer.links[-1][2])

    def test_reset_at_server(self) -> None:
        """After SERVER was received, the next delay is the shortest again."""
        for _ in range(8):
            self.endpoint.fail()
            self.clock.run(5.5)
        drop(self.establish())
        self.assertEqual(self.observer.links[-1][0], "lost")
        self.clock.advance(0.49)
        self.assertEqual(self.endpoint.attempts, [])
        self.clock.advance(0.02)
        self.assertEqual(len(self.endpoint.attempts), 1)

    def test_error_of_the_peer(self) -> None:
        """If the peer always answers with an ERROR, the delay grows as well."""
        for _ in range(200):
            if self.endpoint.attempts:
                protocol = self.establish()
                protocol.dataReceived(b"ERROR cannot parse USER_SYNC line\n")
                drop(protocol)
            self.clock.run(0.5)
        self.assertLess(self.endpoint.count, 30)

    def test_wrong_server(self) -> None:
        """
        The delay grows for a server of another homeserver, which is reported by name.
        """
        for _ in range(200):
            if self.endpoint.attempts:
                protocol = self.endpoint.accept()
                protocol.dataReceived(b"SERVER other.test\n")
                drop(protocol)
            self.clock.run(0.5)
        self.assertLess(self.endpoint.count, 30)
        self.assertIn("other.test", self.observer.links[-1][2])

    def test_jitter(self) -> None:
        """Jitter shortens a delay by at most half."""
        for number, delay in ((0.0, 0.5), (0.5, 0.375), (1.0, 0.25)):
            factory = DirectTcpReplicationClientFactory(
                "worker1",
                "repl.test",
                self.clock,
                self.handler,
                self.observer,
                jitter=lambda number=number: number,  # type: ignore[misc]
            )
            endpoint = StepEndpoint()
            factory.connect(endpoint)
            endpoint.fail()
            self.assertEqual(self.observer.retries[-1], delay)

    def test_stop_while_up(self) -> None:
        """``stop`` closes the link, waits for its end, and does not reconnect."""
        protocol = self.establish()
        self.assertEqual(len(self.factory.buffers()), 1)
        stopped = self.factory.stop()
        self.assertNoResult(stopped)
        drop(protocol)
        self.successResultOf(stopped)
        self.successResultOf(self.factory.stop())
        self.assertEqual(self.handler.calls, ["new", "lost"])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_stop_while_waiting(self) -> None:
        """``stop`` between two attempts cancels the next one."""
        self.endpoint.fail()
        self.successResultOf(self.factory.stop())
        self.clock.run(20)
        self.assertEqual(self.endpoint.count, 1)
        self.assertEqual(self.factory.buffers(), [])

    def test_stop_while_connecting(self) -> None:
        """``stop`` during an attempt cancels it."""
        self.successResultOf(self.factory.stop())
        self.clock.run(20)
        self.assertEqual(self.endpoint.count, 1)
        self.assertEqual(self.observer.links, [])


class ReactorTests(ClientTestCase):
    """The reactor's own connect methods, as a homeserver calls them."""

    def test_connect(self) -> None:
        """The factory works over TCP, TLS and Unix sockets, and reconnects."""
        for connect in ("TCP", "SSL", "UNIX"):
            self.setUp()
            reactor = MemoryReactorClock()
            if connect == "TCP":
                connector = reactor.connectTCP("127.0.0.1", 9092, self.factory)
            elif connect == "SSL":
                connector = reactor.connectSSL("::1", 9092, self.factory, None)
            else:
                connector = reactor.connectUNIX("/run/main.sock", self.factory)
            attempts = 0

            def count() -> None:
                nonlocal attempts
                attempts += 1

            connector.connect = count
            self.factory.startedConnecting(connector)
            protocol = self.factory.buildProtocol(None)
            protocol.makeConnection(PausingTransport())
            protocol.dataReceived(b"SERVER repl.test\n")
            self.assertEqual(self.handler.calls, ["new"])
            drop(protocol)
            self.factory.clientConnectionLost(connector, Failure(ConnectionDone()))
            self.clock.advance(0.6)
            self.assertEqual(attempts, 1)
            self.factory.clientConnectionFailed(
                connector, Failure(ConnectionRefusedError())
            )
            self.clock.advance(1)
            self.assertEqual(attempts, 2)

    def test_stop_while_connecting(self) -> None:
        """``stop`` during an attempt cancels it."""
        connector = MemoryReactorClock().connectTCP("127.0.0.1", 9092, self.factory)
        given_up: list[bool] = []
        connector.stopConnecting = lambda: given_up.append(True)
        self.factory.startedConnecting(connector)
        self.successResultOf(self.factory.stop())
        self.assertEqual(given_up, [True])
