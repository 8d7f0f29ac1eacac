"""Tests of the server's end of a TLS connection."""

from __future__ import annotations

from OpenSSL import SSL
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHandshakeListener, ISSLTransport
from twisted.python.failure import Failure
from zope.interface import directlyProvides

from synapse_replication.tcp.protocol import (
    TLS_HANDSHAKE_TIMEOUT,
    ServerReplicationStreamProtocol,
)
from synapse_replication.wire.commands import ClearUserSyncsCommand
from tests.tcp.protocol_case import ProtocolTestCase


class TlsServerTests(ProtocolTestCase):
    def setUp(self) -> None:
        super().setUp()
        directlyProvides(self.transport, ISSLTransport)
        self.server: ServerReplicationStreamProtocol = self.make_server()
        self.server.makeConnection(self.transport)

    def refused(self) -> list[tuple[str, str]]:
        return [(where, str(error)) for where, error in self.observer.refused]

    def test_link_up_after_name(self) -> None:
        """The link is up once an accepted client has sent NAME."""
        self.assertTrue(IHandshakeListener.providedBy(self.server))
        self.server.handshakeCompleted()
        self.assertEqual(self.observer.links, [])
        self.server.dataReceived(b"NAME w1\n")
        self.assertEqual([link[0] for link in self.observer.links], ["made"])
        self.server.dataReceived(b"CLEAR_USER_SYNC i\n")
        self.assertIn(ClearUserSyncsCommand("i"), self.handler.calls)
        self.clock.run(2 * TLS_HANDSHAKE_TIMEOUT)
        self.assertFalse(self.transport.aborted)
        self.lose(self.server)
        self.assertEqual([link[0] for link in self.observer.links], ["made", "lost"])
        self.assertEqual(self.refused(), [])

    def test_refused_client(self) -> None:
        """
        A refused client never becomes a link; its address and the reason are reported.
        """
        why = SSL.Error([("SSL routines", "", "peer did not return a certificate")])
        self.server.connectionLost(Failure(why))
        ((what, error),) = self.refused()
        self.assertEqual(what, "the TLS client 192.168.1.1")
        self.assertIn("TLS: peer did not return a certificate: ", error)
        self.assertEqual(self.observer.links, [])
        self.assertEqual(self.closed, [self.server])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_probe(self) -> None:
        """A connection that is closed without sending anything is not reported."""
        self.server.connectionLost(Failure(ConnectionDone()))
        self.assertEqual((self.refused(), self.observer.links), ([], []))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_silence(self) -> None:
        """A client that does not start TLS within 10 s is disconnected."""
        self.clock.run(TLS_HANDSHAKE_TIMEOUT - 0.5)
        self.assertFalse(self.transport.aborted)
        self.clock.run(1)
        self.assertTrue(self.transport.aborted)
        self.assertEqual(
            self.refused(),
            [("the TLS client 192.168.1.1", "no TLS handshake within 10 s")],
        )
