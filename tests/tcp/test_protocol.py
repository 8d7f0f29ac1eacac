"""Tests of the line protocol on a transport."""

from __future__ import annotations

from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.error import ConnectionLost
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from synapse_replication.errors import (
    UnknownCommandError,
    UnparsableLineError,
)
from synapse_replication.transport.buffers import DEFAULT_READ_SIZE
from synapse_replication.wire.commands import (
    ClearUserSyncsCommand,
    PositionCommand,
    RemoteServerUpCommand,
    ReplicateCommand,
    UserSyncCommand,
)
from synapse_replication.wire.rdata import rdata_lines
from tests.tcp.doubles import (
    Link,
    PausingTransport,
    RecordingHandler,
)
from tests.tcp.protocol_case import ProtocolTestCase


class GreetingTests(ProtocolTestCase):
    """The beginning and end of a connection."""

    def test_server(self) -> None:
        """The server sends SERVER and PING; the link is up when NAME arrives."""
        protocol = self.make_server()
        protocol.makeConnection(self.transport)
        self.assertEqual(
            self.transport.buffer, b"SERVER repl.test\nPING 1700000000000\n"
        )
        self.assertEqual(self.handler.calls, [])
        protocol.dataReceived(b"PING 1\nNAME worker1\nREMOTE_SERVER_UP a\n")
        self.assertEqual(self.handler.calls, ["new", RemoteServerUpCommand("a")])
        self.assertEqual(self.observer.links, [("made", "worker1")])

    def test_nothing_before_name(self) -> None:
        """The server answers any command before NAME with an ERROR and closes."""
        for line in (b"REPLICATE", b"REMOTE_SERVER_UP a", b"RDATA s w 1 []", b"X y"):
            transport = PausingTransport()
            protocol = self.make_server()
            protocol.makeConnection(transport)
            transport.take(1000)
            protocol.dataReceived(line + b"\nNAME w\nREPLICATE\n")
            self.assertEqual(
                transport.buffer,
                b"ERROR send NAME first: it identifies the connection\n",
            )
            self.assertTrue(transport.disconnecting)
        self.assertEqual((self.handler.calls, self.observer.links), ([], []))

    def test_http(self) -> None:
        """A server closes the connection on an HTTP request, before and after NAME."""
        post = b"POST / HTTP/1.1\nHost: 127.0.0.1:9092\n\nx\nNAME w\nREPLICATE\n"
        for request in (
            post,
            b"NAME x HTTP/1.1\nREPLICATE\n",
            b"GET /\nNAME w\nREPLICATE\n",
            b"host: a\nNAME w\nREPLICATE\n",
        ):
            transport = PausingTransport()
            protocol = self.make_server()
            protocol.makeConnection(transport)
            protocol.dataReceived(request)
            self.assertTrue(transport.disconnecting)
            self.assertIn(b"which does not speak HTTP", transport.buffer)
        self.assertEqual((self.handler.calls, self.observer.links), ([], []))
        protocol = self.connected_server()
        protocol.dataReceived(post)
        self.assertTrue(self.transport.disconnecting)
        self.assertEqual(self.handler.calls, ["new"])

    def test_client(self) -> None:
        """The client sends NAME and PING; the link is up when SERVER arrives.

        REPLICATE is left to the handler, which may be passive.
        """
        protocol = self.make_client()
        protocol.makeConnection(self.transport)
        self.assertEqual(self.transport.buffer, b"NAME worker1\nPING 1700000000000\n")
        self.assertEqual(self.handler.calls, [])
        protocol.dataReceived(b"SERVER repl.test\nREMOTE_SERVER_UP a\n")
        self.assertEqual(self.handler.calls, ["new", RemoteServerUpCommand("a")])
        self.assertEqual(self.observer.links, [("made", "worker1")])

    def test_reads_more_at_once(self) -> None:
        """If a peer sends continuously, larger chunks are read."""
        protocol = self.make_client()
        protocol.makeConnection(self.transport)
        protocol.dataReceived(b"SERVER repl.test\n")
        protocol.dataReceived(b"REMOTE_SERVER_UP a\n" * 4000)
        self.assertEqual(vars(self.transport)["bufferSize"], 2 * DEFAULT_READ_SIZE)

    def test_relays(self) -> None:
        """Only commands received on a server's connections are relayed."""
        self.assertTrue(self.make_server().relays)
        self.assertFalse(self.make_client().relays)

    def test_name(self) -> None:
        """The name of a server's connection is that of its peer."""
        protocol = self.connected_server()
        protocol.dataReceived(b"NAME w1\nREPLICATE\n")
        self.assertEqual(protocol.name, "w1")
        self.assertEqual(
            self.observer.received_commands, {("w1", "NAME"): 1, ("w1", "REPLICATE"): 1}
        )

    def test_lost(self) -> None:
        """The handler is notified of the loss once, and no timer remains."""
        protocol = self.connected_server()
        protocol.connectionLost(Failure(ConnectionLost("broken pipe")))
        self.assertEqual(self.handler.calls, ["new", "lost"])
        [_, (kind, _, reason, why)] = self.observer.links
        self.assertEqual((kind, reason), ("lost", "lost"))
        self.assertIn("broken pipe", why)
        self.assertEqual(self.closed, [protocol])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_lost_before_server(self) -> None:
        """A client's link that was never up is not reported as lost."""
        protocol = self.make_client()
        protocol.makeConnection(self.transport)
        self.lose(protocol)
        self.assertEqual(self.handler.calls, [])
        self.assertEqual(self.observer.links, [])
        self.assertEqual(self.closed, [protocol])

    def test_wrong_server(self) -> None:
        """A client refuses a server of another homeserver and does not use the link."""
        protocol = self.make_client()
        protocol.makeConnection(self.transport)
        self.transport.take(1000)
        protocol.dataReceived(b"SERVER other.test\nREMOTE_SERVER_UP a\n")
        self.assertTrue(self.transport.buffer.startswith(b"ERROR wrong server"))
        self.assertTrue(self.transport.disconnecting)
        self.assertEqual(self.handler.calls, [])
        self.assertIn("other.test", protocol.close_text)

    def test_no_delay(self) -> None:
        """
        ``TCP_NODELAY`` is set on TCP transports only: Twisted 22.8 raises an exception
        for a Unix socket.
        """

        class TcpTransport(StringTransport):
            no_delay: bool | None = None

            def setTcpNoDelay(self, enabled: bool) -> None:
                self.no_delay = enabled

        for host, no_delay in (
            (IPv4Address("TCP", "127.0.0.1", 1), True),
            (IPv6Address("TCP", "::1", 1), True),
            (UNIXAddress("/s"), None),
        ):
            transport = TcpTransport(hostAddress=host)
            self.make_server().makeConnection(transport)
            self.assertIs(transport.no_delay, no_delay)


class ReceiveTests(ProtocolTestCase):
    """Received data."""

    def test_rows_are_counted_once_a_chunk(self) -> None:
        """The rows of a chunk are passed to the handler together, and counted."""
        protocol = self.connected_server()
        lines = rdata_lines("events", "w", [(n, [b"[]"]) for n in range(500)])
        protocol.dataReceived(b"\n".join(lines) + b"\n")
        self.assertEqual(len(self.handler.calls), 2)
        self.assertEqual(self.handler.rows, [b"[]"] * 500)
        self.assertEqual(self.observer.received_commands, {("unnamed", "RDATA"): 500})

    def test_unknown_command(self) -> None:
        """An unknown command is reported to the observer; the link stays up."""
        protocol = self.connected_server()
        protocol.dataReceived(b"FROB x\nPOSITION unknown_stream w 1 2\n")
        [(_, error)] = self.observer.refused
        self.assertIsInstance(error, UnknownCommandError)
        self.assertEqual(
            self.handler.calls, ["new", PositionCommand("unknown_stream", "w", 1, 2)]
        )
        self.assertFalse(self.transport.disconnecting)

    def test_invalid_user_sync(self) -> None:
        """Invalid USER_SYNCs cause one ERROR and one close."""
        protocol = self.connected_server()
        protocol.dataReceived(
            b"USER_SYNC i @u:x a b start 5\nUSER_SYNC bad\nUSER_SYNC bad\n"
        )
        protocol.dataReceived(b"USER_SYNC bad\n")
        self.assertEqual(
            self.handler.calls, ["new", UserSyncCommand("i", "@u:x", "a b", True, 5)]
        )
        [(_, error)] = self.observer.refused
        self.assertIsInstance(error, UnparsableLineError)
        self.assertEqual(self.transport.buffer.count(b"ERROR"), 1)
        self.assertTrue(self.transport.disconnecting)

    def test_refusal_of_the_handler(self) -> None:
        """
        The handler may close the link while receiving, and is notified of the loss.
        """
        protocol = self.connected_server()
        self.handler.on_received = lambda link: link.close_with_error("not you")
        protocol.dataReceived(b"REPLICATE\n")
        protocol.dataReceived(b"REPLICATE\n")
        self.assertEqual(self.transport.buffer, b"ERROR not you\n")
        self.assertEqual(self.handler.calls, ["new", ReplicateCommand()])
        self.lose(protocol)
        self.assertEqual(self.handler.calls[-1], "lost")
        self.assertEqual(
            self.observer.links[-1], ("lost", "unnamed", "protocol_error", "not you")
        )

    def test_closing_peers_in_a_loop(self) -> None:
        """Connections may be closed while iterating over them."""
        protocols = [self.make_server() for _ in range(5)]
        for protocol in protocols:
            protocol.makeConnection(PausingTransport())
            protocol.dataReceived(b"NAME w\n")
        for connection in self.handler.connections:
            connection.close_with_error("all of you")
        self.assertEqual(len(self.handler.connections), 5)


class TimeTests(ProtocolTestCase):
    """Keep-alive, timeouts and closes that hang."""

    def test_keep_alive(self) -> None:
        """A PING is sent after 5 s without another line."""
        self.connected_server()
        self.clock.run(21)
        self.assertEqual(
            self.transport.buffer.splitlines(),
            [b"PING %d" % (1_700_000_000_000 + 1000 * s) for s in (5, 10, 15, 20)],
        )

    def test_half_open(self) -> None:
        """Both ends of a half-open connection close it within 60 s."""
        server, client = self.make_server(), self.make_client()
        link = Link(server, client)
        link.pump()
        for _ in range(120):
            self.clock.advance(0.5)
            link.pump()
        self.assertFalse(any(t.disconnecting for t in link.transports))
        link.is_cut = True
        self.clock.run(60)
        for transport in link.transports:
            self.assertTrue(transport.disconnecting)
            self.assertTrue(transport.aborted)
        for protocol in (server, client):
            assert protocol.close_reason is not None
            self.assertEqual(protocol.close_reason.value, "timed_out")

    def test_peer_without_ping(self) -> None:
        """A peer that never sends PING, such as netcat, is not timed out."""
        protocol = self.connected_server()
        protocol.dataReceived(b"REPLICATE\n")
        self.clock.run(600)
        self.assertFalse(self.transport.disconnecting)

    def test_silent_client(self) -> None:
        """A client that sends no NAME within a minute is disconnected."""
        protocol = self.make_server()
        protocol.makeConnection(self.transport)
        self.clock.run(59)
        self.assertFalse(self.transport.disconnecting)
        self.clock.run(2)
        self.assertTrue(self.transport.disconnecting)
        self.assertIn("no NAME within 60 s", protocol.close_text)
        self.assertEqual(self.handler.calls, [])

    def test_silent_port(self) -> None:
        """A client that receives no SERVER within 10 s disconnects."""
        protocol = self.make_client()
        protocol.makeConnection(self.transport)
        self.clock.run(9.5)
        self.assertFalse(self.transport.disconnecting)
        self.clock.run(1)
        self.assertTrue(self.transport.disconnecting)
        self.assertIn("no SERVER within 10 s", protocol.close_text)

    def test_close_flushes(self) -> None:
        """A clean close sends the waiting lines, even while paused."""
        protocol = self.connected_server()
        protocol.pauseProducing()
        protocol.send_command(ClearUserSyncsCommand("i"))
        protocol.close()
        self.assertEqual(self.transport.buffer, b"CLEAR_USER_SYNC i\n")
        # A transport with a producer would not close before the producer is removed.
        self.assertIsNone(self.transport.producer)
        self.assertTrue(self.transport.disconnecting)

    def test_close_that_hangs(self) -> None:
        """A close that does not finish within 25 s is aborted."""
        protocol = self.connected_server()
        self.clock.run(3)
        protocol.close()
        self.clock.run(24.5)
        self.assertFalse(self.transport.aborted)
        self.clock.run(1)
        self.assertTrue(self.transport.aborted)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class PairTests(ProtocolTestCase):
    """Two connected ends."""

    def test_rows_and_commands(self) -> None:
        """Rows and commands arrive in both directions, however the data is split."""
        for chunk in (1, 2, 3, 7, 10**6):
            here, there = RecordingHandler(), RecordingHandler()
            server, client = self.make_server(here), self.make_client(there)
            link = Link(server, client)
            link.pump(chunk)
            rows = [b'["%d"]' % number for number in range(100)]
            batches = [(5, rows[:40]), (6, rows[40:41]), (9, rows[41:])]
            server.send_lines("RDATA", rdata_lines("events", "w", batches))
            client.send_command(UserSyncCommand("i", "@u:x", "a b", False, 5))
            link.pump(chunk)
            self.assertEqual(there.rows, rows)
            self.assertEqual(
                here.calls,
                [
                    "new",
                    UserSyncCommand("i", "@u:x", "a b", False, 5),
                ],
            )
            self.assertEqual(server.name, "worker1")

    def test_close(self) -> None:
        """
        When one end closes, both handlers are notified, and the other end receives the
        reason.
        """
        here, there = RecordingHandler(), RecordingHandler()
        server, client = self.make_server(here), self.make_client(there)
        link = Link(server, client)
        link.pump()
        server.close_with_error("go away")
        link.pump()
        self.assertEqual((here.calls[-1], there.calls[-1]), ("lost", "lost"))
        assert client.close_reason is not None
        self.assertEqual(client.close_reason.value, "peer_error")
        self.assertEqual(client.close_text, "go away")
