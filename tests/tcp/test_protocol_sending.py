"""Tests for sending over a TCP connection, and for slow peers."""

from __future__ import annotations

from twisted.internet.interfaces import IPushProducer
from zope.interface.verify import verifyObject

from synapse_replication.errors import LineTooLongError
from synapse_replication.handlers.events import ConnectionBuffers
from synapse_replication.wire.commands import RdataCommand, RemoteServerUpCommand
from tests.tcp.protocol_case import ProtocolTestCase


class SendTests(ProtocolTestCase):
    """Sent lines."""

    def test_commands_and_lines(self) -> None:
        """Commands and lines are written in order and counted by name."""
        protocol = self.connected_server()
        protocol.send_command(RemoteServerUpCommand("a"))
        protocol.send_lines("RDATA", [b"RDATA 1", b"RDATA 2"])
        self.assertEqual(
            self.transport.buffer, b"REMOTE_SERVER_UP a\nRDATA 1\nRDATA 2\n"
        )
        self.assertEqual(self.observer.sent_commands["unnamed", "RDATA"], 2)
        # A slow peer is disconnected, so the link is never behind.
        self.assertFalse(protocol.is_behind)

    def test_too_long(self) -> None:
        """A line that is too long for peers is refused before it is sent."""
        protocol = self.connected_server()
        self.assertRaises(
            LineTooLongError,
            protocol.send_command,
            RdataCommand("s", "w", 1, "x" * 16384),
        )
        self.assertEqual(self.transport.buffer, b"")
        self.assertFalse(self.transport.disconnecting)

    def test_sending_after_the_end(self) -> None:
        """Nothing is sent or counted after the connection was closed."""
        protocol = self.connected_server()
        protocol.close()
        protocol.send_command(RemoteServerUpCommand("a"))
        self.lose(protocol)
        protocol.send_command(RemoteServerUpCommand("a"))
        self.assertEqual(self.transport.buffer, b"")
        self.assertNotIn(("unnamed", "REMOTE_SERVER_UP"), self.observer.sent_commands)

    def test_producer(self) -> None:
        """The protocol is a streaming producer of its transport."""
        protocol = self.connected_server()
        verifyObject(IPushProducer, protocol)
        self.assertIs(self.transport.producer, protocol)
        self.assertTrue(self.transport.streaming)
        protocol.stopProducing()
        self.assertEqual(self.handler.calls, ["new"])

    def test_congestion(self) -> None:
        """
        A peer that does not read is disconnected with ``ERROR Failed to keep up``.
        """
        protocol = self.connected_server()
        line = b"RDATA events w 1 " + b"x" * 1000
        sent = 0
        while not self.transport.disconnecting and sent < 20_000:
            protocol.send_lines("RDATA", [line] * 10)
            sent += 10
        self.assertLess(sent, 10_200)
        self.assertTrue(self.transport.buffer.endswith(b"\nERROR Failed to keep up\n"))
        self.assertLess(self.transport.most_buffered, 200_000)
        self.lose(protocol)
        self.assertEqual(self.observer.links[-1][2], "congested")

    def test_slow_peer(self) -> None:
        """A peer that reads one byte a second is disconnected; memory stays limited."""
        protocol = self.connected_server()
        line = b"RDATA events w 1 " + b"x" * 1000
        most_pending = 0
        for _ in range(1000):
            self.clock.advance(1)
            protocol.dataReceived(b"PING 1\n")
            protocol.send_lines("RDATA", [line] * 50)
            self.transport.take(1)
            most_pending = max(most_pending, protocol.buffers().pending_commands)
            if self.transport.disconnected:
                break
        self.assertLessEqual(most_pending, 10_000)
        self.assertLess(self.transport.most_buffered, 200_000)
        self.assertTrue(self.transport.disconnecting)
        self.assertEqual(protocol.buffers().pending_commands, 0)

    def test_peer_that_recovers(self) -> None:
        """Lines that waited for a slow peer arrive in order, in pieces."""
        protocol = self.connected_server()
        lines = [b"RDATA events w %d []" % number for number in range(12_000)]
        for at in range(0, len(lines), 100):
            protocol.send_lines("RDATA", lines[at : at + 100])
        self.assertGreater(protocol.buffers().pending_commands, 1000)
        taken = b""
        while self.transport.buffer:
            taken += self.transport.take(10_000)
        self.assertEqual(taken.splitlines(), lines)
        self.assertLess(self.transport.most_buffered, 200_000)
        self.assertFalse(self.transport.disconnecting)

    def test_buffers(self) -> None:
        """``buffers`` reports the waiting commands."""
        protocol = self.connected_server()
        protocol.pauseProducing()
        protocol.send_command(RemoteServerUpCommand("a"))
        self.assertEqual(protocol.buffers(), ConnectionBuffers("unnamed", 1, 0, 0, 0))
