"""The line protocol on a transport."""

from __future__ import annotations

from twisted.internet.error import ConnectionLost
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from synapse_replication.errors import (
    UnknownCommandError,
    UnparsableLineError,
)
from synapse_replication.transport.buffers import USUAL_READ
from synapse_replication.wire.commands.standard import (
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
    """How a connection begins and ends."""

    def test_server(self) -> None:
        """The server sends SERVER and PING; the link is up at NAME."""
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
        """Nothing is acted on before NAME, and the server says so and closes."""
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
        """A server closes on what a web browser sends, before and after NAME."""
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
        """The client says NAME and PING; the link is up at SERVER.

        REPLICATE is said by the handler, who may be there to listen only.
        """
        protocol = self.make_client()
        protocol.makeConnection(self.transport)
        self.assertEqual(self.transport.buffer, b"NAME worker1\nPING 1700000000000\n")
        self.assertEqual(self.handler.calls, [])
        protocol.dataReceived(b"SERVER repl.test\nREMOTE_SERVER_UP a\n")
        self.assertEqual(self.handler.calls, ["new", RemoteServerUpCommand("a")])
        self.assertEqual(self.observer.links, [("made", "worker1")])

    def test_reads_more_at_once(self) -> None:
        """A peer that sends without a break is read in larger pieces."""
        protocol = self.make_client()
        protocol.makeConnection(self.transport)
        protocol.dataReceived(b"SERVER repl.test\n")
        protocol.dataReceived(b"REMOTE_SERVER_UP a\n" * 4000)
        self.assertEqual(vars(self.transport)["bufferSize"], 2 * USUAL_READ)

    def test_relays(self) -> None:
        """Only what a server's connection brings is relayed."""
        self.assertTrue(self.make_server().relays)
        self.assertFalse(self.make_client().relays)

    def test_name(self) -> None:
        """A server's connection is called as its peer calls itself."""
        protocol = self.connected_server()
        protocol.dataReceived(b"NAME w1\nREPLICATE\n")
        self.assertEqual(protocol.name, "w1")
        self.assertEqual(
            self.observer.received, {("w1", "NAME"): 1, ("w1", "REPLICATE"): 1}
        )

    def test_lost(self) -> None:
        """The handler hears of the loss once, and no time passes for it after."""
        protocol = self.connected_server()
        protocol.connectionLost(Failure(ConnectionLost("broken pipe")))
        self.assertEqual(self.handler.calls, ["new", "lost"])
        [_, (kind, _, reason, why)] = self.observer.links
        self.assertEqual((kind, reason), ("lost", "lost"))
        self.assertIn("broken pipe", why)
        self.assertEqual(self.closed, [protocol])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_lost_before_server(self) -> None:
        """A client's link that never was up is not reported as lost."""
        protocol = self.make_client()
        protocol.makeConnection(self.transport)
        self.lose(protocol)
        self.assertEqual(self.handler.calls, [])
        self.assertEqual(self.observer.links, [])
        self.assertEqual(self.closed, [protocol])

    def test_wrong_server(self) -> None:
        """A client refuses another homeserver, and never uses the link."""
        protocol = self.make_client()
        protocol.makeConnection(self.transport)
        self.transport.take(1000)
        protocol.dataReceived(b"SERVER other.test\nREMOTE_SERVER_UP a\n")
        self.assertTrue(self.transport.buffer.startswith(b"ERROR wrong server"))
        self.assertTrue(self.transport.disconnecting)
        self.assertEqual(self.handler.calls, [])
        self.assertIn("other.test", protocol.close_text)

    def test_no_delay(self) -> None:
        """On TCP, small writes are not held back."""

        class TcpTransport(StringTransport):
            no_delay: bool | None = None

            def setTcpNoDelay(self, enabled: bool) -> None:
                self.no_delay = enabled

        transport = TcpTransport()
        self.make_server().makeConnection(transport)
        self.assertIs(transport.no_delay, True)


class ReceiveTests(ProtocolTestCase):
    """What arrives."""

    def test_rows_are_counted_once_a_chunk(self) -> None:
        """Rows reach the handler a chunk at a time, and are counted."""
        protocol = self.connected_server()
        lines = rdata_lines("events", "w", [(n, [b"[]"]) for n in range(500)])
        protocol.dataReceived(b"\n".join(lines) + b"\n")
        self.assertEqual(len(self.handler.calls), 2)
        self.assertEqual(self.handler.rows, [b"[]"] * 500)
        self.assertEqual(self.observer.received, {("unnamed", "RDATA"): 500})

    def test_unknown_command(self) -> None:
        """An unknown command is told to the observer; the link stays up."""
        protocol = self.connected_server()
        protocol.dataReceived(b"FROB x\nPOSITION unknown_stream w 1 2\n")
        [(_, error)] = self.observer.refused
        self.assertIsInstance(error, UnknownCommandError)
        self.assertEqual(
            self.handler.calls, ["new", PositionCommand("unknown_stream", "w", 1, 2)]
        )
        self.assertFalse(self.transport.disconnecting)

    def test_invalid_user_sync(self) -> None:
        """An invalid USER_SYNC gets one ERROR and one close."""
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
        """The handler may close while it receives; it hears of the loss later."""
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
        """Connections may be closed in a loop over them."""
        protocols = [self.make_server() for _ in range(5)]
        for protocol in protocols:
            protocol.makeConnection(PausingTransport())
            protocol.dataReceived(b"NAME w\n")
        for connection in self.handler.connections:
            connection.close_with_error("all of you")
        self.assertEqual(len(self.handler.connections), 5)


class TimeTests(ProtocolTestCase):
    """Keep-alive, time-outs, and closes that hang."""

    def test_keep_alive(self) -> None:
        """A PING goes out every 5 s if nothing else does."""
        self.connected_server()
        self.clock.run(21)
        self.assertEqual(
            self.transport.buffer.splitlines(),
            [b"PING %d" % (1_700_000_000_000 + 1000 * s) for s in (5, 10, 15, 20)],
        )

    def test_half_open(self) -> None:
        """Both ends notice within 60 s that the other is gone."""
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

    def test_person(self) -> None:
        """A person with netcat, who sends no PING, is not timed out."""
        protocol = self.connected_server()
        protocol.dataReceived(b"REPLICATE\n")
        self.clock.run(600)
        self.assertFalse(self.transport.disconnecting)

    def test_silent_client(self) -> None:
        """A client that says no NAME for a minute is disconnected."""
        protocol = self.make_server()
        protocol.makeConnection(self.transport)
        self.clock.run(59)
        self.assertFalse(self.transport.disconnecting)
        self.clock.run(2)
        self.assertTrue(self.transport.disconnecting)
        self.assertIn("no NAME within 60 s", protocol.close_text)
        self.assertEqual(self.handler.calls, [])

    def test_silent_port(self) -> None:
        """A client does not wait for SERVER for ever."""
        protocol = self.make_client()
        protocol.makeConnection(self.transport)
        self.clock.run(9.5)
        self.assertFalse(self.transport.disconnecting)
        self.clock.run(1)
        self.assertTrue(self.transport.disconnecting)
        self.assertIn("no SERVER within 10 s", protocol.close_text)

    def test_close_flushes(self) -> None:
        """A close in good order sends what waits, even to a full transport."""
        protocol = self.connected_server()
        protocol.pauseProducing()
        protocol.send_command(ClearUserSyncsCommand("i"))
        protocol.close()
        self.assertEqual(self.transport.buffer, b"CLEAR_USER_SYNC i\n")
        # A transport that has a producer waits for it before it closes.
        self.assertIsNone(self.transport.producer)
        self.assertTrue(self.transport.disconnecting)

    def test_close_that_hangs(self) -> None:
        """A close that the peer does not let end is aborted after 25 s."""
        protocol = self.connected_server()
        self.clock.run(3)
        protocol.close()
        self.clock.run(24.5)
        self.assertFalse(self.transport.aborted)
        self.clock.run(1)
        self.assertTrue(self.transport.aborted)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class PairTests(ProtocolTestCase):
    """Two ends back to back."""

    def test_rows_and_commands(self) -> None:
        """Rows and commands go both ways, wherever they are cut."""
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
        """When one end closes, both handlers hear of it; the other end sees why."""
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
