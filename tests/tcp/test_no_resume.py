"""Tests that nothing is resumed after a protocol error."""

from __future__ import annotations

from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.events import DiscardReason
from synapse_replication.tcp.protocol import ClientReplicationStreamProtocol
from synapse_replication.testing.doubles import SourceStream
from tests.handlers.fixtures import Row
from tests.support.recording_observer import RecordingHost
from tests.tcp.doubles import PausingTransport


class NoResumeTests(SynchronousTestCase):
    """A reader over direct TCP, with the real command handler."""

    def setUp(self) -> None:
        self.stream = SourceStream("events", Row)
        self.host = RecordingHost(self.stream)
        self.handler = ReplicationCommandHandler(self.host, self.host.observer)

    def connect(self) -> ClientReplicationStreamProtocol:
        protocol = ClientReplicationStreamProtocol(
            "reader", "repl.test", self.host.clock, self.handler, self.host.observer
        )
        self.transport = PausingTransport()
        protocol.makeConnection(self.transport)
        protocol.dataReceived(b"SERVER repl.test\n")
        return protocol

    def texts(self) -> list[str]:
        return [row.text for *_, rows in self.host.rows.rows for row in rows]

    def test_no_resume_after_a_protocol_error(self) -> None:
        """
        Lines after a bad one are ignored, a partial batch is dropped, and after
        reconnecting a POSITION is needed before the missing rows are fetched.
        """
        first = self.connect()
        first.dataReceived(b"POSITION events w 0 0\n" + b'RDATA events w 1 ["a"]\n')
        self.assertEqual(self.texts(), ["a"])
        self.stream.persist("w", 2, ["b"], ["c"])
        first.dataReceived(
            b'RDATA events w batch ["b"]\nRDATA events w no-token ["?"]\n'
            b'RDATA events w 2 ["c"]\n'
        )
        first.dataReceived(b'RDATA events w 2 ["c"]\n')
        self.assertIn(b"ERROR ", bytes(self.transport.buffer))
        self.assertTrue(self.transport.disconnecting)
        self.assertEqual(self.texts(), ["a"])
        first.connectionLost(Failure(ConnectionDone()))

        second = self.connect()
        sent = bytes(self.transport.buffer)
        for line in (b"NAME reader\n", b"REPLICATE"):
            self.assertIn(line, sent)
        # The end of the batch is not delivered without its beginning.
        second.dataReceived(b'RDATA events w 2 ["c"]\n')
        self.assertEqual(self.texts(), ["a"])
        discarded = self.host.observer.discards
        self.assertEqual(discarded["events", "w", DiscardReason.NOT_CONNECTED], 1)
        second.dataReceived(b"POSITION events w 2 2\n")
        self.assertEqual(self.texts(), ["a", "b", "c"])
        self.assertEqual(self.stream.requests, [("w", 1, 2)])
