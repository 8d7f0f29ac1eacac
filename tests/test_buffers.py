"""What lies in a transport's buffers."""

from __future__ import annotations

import socket
from pathlib import Path

from twisted.internet.protocol import Factory, Protocol
from twisted.internet.testing import StringTransport
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.buffers import TransportBuffers, read_buffers
from synapse_replication.certificates import server_context
from synapse_replication.testing.certificates import PrivateAuthority


class SocketTransport:
    """As much of Twisted's TCP transport as is looked at."""

    def __init__(self, end: socket.socket) -> None:
        self.dataBuffer = b"12345"
        self.offset = 2
        self._tempDataLen = 10
        self._end = end

    def getHandle(self) -> socket.socket:
        return self._end


class ReadBuffersTests(SynchronousTestCase):
    """``read_buffers``"""

    def test_no_socket(self) -> None:
        """A transport without a socket has nothing in the kernel."""
        self.assertEqual(read_buffers(StringTransport()), TransportBuffers(0, 0, 0))
        self.assertEqual(read_buffers(None), TransportBuffers(0, 0, 0))

    def test_socket(self) -> None:
        """What is in the process and what is in the kernel is told apart."""
        one, other = socket.socketpair()
        self.addCleanup(one.close)
        self.addCleanup(other.close)
        other.send(b"123")
        buffers = read_buffers(SocketTransport(one))
        self.assertEqual((buffers.send, buffers.kernel_read), (13, 3))
        self.assertEqual(buffers.kernel_send, 0)

    def test_tls(self) -> None:
        """Over TLS they are those of the socket below, before and in the handshake."""
        one, other = socket.socketpair()
        self.addCleanup(one.close)
        self.addCleanup(other.close)
        folder = Path(self.mktemp())
        folder.mkdir()
        issued = PrivateAuthority(folder).issue("server", "main.example")
        factory = TLSMemoryBIOFactory(
            server_context(issued.certificate, issued.private_key),
            False,
            Factory.forProtocol(Protocol),
        )
        protocol = factory.buildProtocol(None)
        transport = SocketTransport(one)
        protocol.makeConnection(transport)
        other.send(b"123")
        self.assertEqual(
            read_buffers(protocol.wrappedProtocol.transport),  # type: ignore[attr-defined]
            TransportBuffers(13, 0, 3),
        )

    def test_closed_socket(self) -> None:
        """A socket that was closed meanwhile does no harm."""
        one, other = socket.socketpair()
        one.close()
        other.close()
        self.assertEqual(read_buffers(SocketTransport(one)), TransportBuffers(13, 0, 0))
