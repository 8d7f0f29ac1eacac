"""Tests for the sizes of reads and of a transport's buffers."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.protocol import Factory, Protocol
from twisted.internet.tcp import Connection
from twisted.internet.testing import MemoryReactor, StringTransport
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.certificates import PrivateAuthority
from synapse_replication.transport.buffers import (
    DEFAULT_READ_SIZE,
    MAX_READ_SIZE,
    ReadSize,
    TransportBuffers,
    read_buffers,
)
from synapse_replication.transport.tls import TlsConfig


class SocketTransport:
    """A double with the attributes of Twisted's TCP transport that are read."""

    def __init__(self, end: socket.socket) -> None:
        self.dataBuffer = b"12345"
        self.offset = 2
        self._tempDataLen = 10
        self._end = end

    def getHandle(self) -> socket.socket:
        return self._end


class ReadSizeTests(SynchronousTestCase):
    """Tests for ``ReadSize``."""

    def setUp(self) -> None:
        self.transport = SimpleNamespace(bufferSize=DEFAULT_READ_SIZE)
        self.read_size = ReadSize()

    def receive(self, *lengths: int) -> int:
        """Report reads of these lengths, and return the size of the next read."""
        for length in lengths:
            self.read_size.received(self.transport, length)
        return int(self.transport.bufferSize)

    def test_grows(self) -> None:
        """A read that fills its buffer doubles the size of the next one."""
        self.assertEqual(self.receive(DEFAULT_READ_SIZE - 1), DEFAULT_READ_SIZE)
        self.assertEqual(self.receive(DEFAULT_READ_SIZE), 2 * DEFAULT_READ_SIZE)
        self.assertEqual(self.receive(2 * DEFAULT_READ_SIZE - 1), 2 * DEFAULT_READ_SIZE)
        self.assertEqual(self.receive(2 * DEFAULT_READ_SIZE), 4 * DEFAULT_READ_SIZE)

    def test_bounded(self) -> None:
        """The size does not grow beyond a bound."""
        self.assertEqual(self.receive(*[MAX_READ_SIZE] * 9), MAX_READ_SIZE)

    def test_shrinks(self) -> None:
        """When reads are small again, their size shrinks to the usual one."""
        self.receive(*[MAX_READ_SIZE] * 9)
        self.assertEqual(self.receive(MAX_READ_SIZE // 2), MAX_READ_SIZE // 2)
        self.assertEqual(self.receive(*[10] * 9), DEFAULT_READ_SIZE)

    def test_real_transport(self) -> None:
        """A real transport uses the size."""
        one, other = socket.socketpair()
        self.addCleanup(other.close)
        received: list[int] = []
        protocol: Any = SimpleNamespace(
            dataReceived=lambda data: received.append(len(data))
        )
        transport = Connection(one, protocol, MemoryReactor())
        self.addCleanup(transport.loseConnection)
        transport.protocol = protocol
        other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_READ_SIZE)
        other.sendall(bytes(3 * DEFAULT_READ_SIZE))
        transport.doRead()
        self.read_size.received(transport, received[-1])
        transport.doRead()
        self.assertEqual(received, [DEFAULT_READ_SIZE, 2 * DEFAULT_READ_SIZE])


class ReadBuffersTests(SynchronousTestCase):
    """Tests for ``read_buffers``."""

    def test_no_socket(self) -> None:
        """A transport without a socket has empty buffers."""
        self.assertEqual(read_buffers(StringTransport()), TransportBuffers(0, 0, 0))
        self.assertEqual(read_buffers(None), TransportBuffers(0, 0, 0))

    def test_socket(self) -> None:
        """Bytes in the process and bytes in the kernel are counted separately."""
        one, other = socket.socketpair()
        self.addCleanup(one.close)
        self.addCleanup(other.close)
        other.send(b"123")
        buffers = read_buffers(SocketTransport(one))
        self.assertEqual((buffers.send, buffers.kernel_read), (13, 3))
        self.assertEqual(buffers.kernel_send, 0)

    def test_tls(self) -> None:
        """
        Over TLS, the buffers are those of the socket below it, even before the
        handshake.
        """
        one, other = socket.socketpair()
        self.addCleanup(one.close)
        self.addCleanup(other.close)
        folder = Path(self.mktemp())
        folder.mkdir()
        issued = PrivateAuthority(folder).issue("server", "main.example")
        files = TlsConfig(
            listener_certificate_file=issued.certificate,
            listener_private_key_file=issued.private_key,
        )
        factory = TLSMemoryBIOFactory(
            files.for_listening(),
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
        """A socket that was closed meanwhile has empty kernel buffers."""
        one, other = socket.socketpair()
        one.close()
        other.close()
        self.assertEqual(read_buffers(SocketTransport(one)), TransportBuffers(13, 0, 0))
