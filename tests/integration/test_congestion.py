"""Tests for peers over direct TCP that do not read, on real sockets."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet import reactor  # noqa: TID251 -- real sockets
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.interfaces import IListeningPort
from twisted.internet.task import LoopingCall, deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from synapse_replication.handlers.host_parts import ReactorClock
from synapse_replication.handlers.interfaces import ReplicationConnection
from synapse_replication.tcp.factory import (
    DirectTcpReplicationClientFactory,
    ReplicationStreamProtocolFactory,
)
from synapse_replication.wire.close_reason import CloseReason
from synapse_replication.wire.pending_lines import PendingLimit
from synapse_replication.wire.rdata import RdataGroup, ReceivedItem, rdata_lines
from tests.support.recording_observer import RecordingObserver

#: Text of a row.
TEXT = b'["' + b"x" * 1000 + b'"]'
#: Rows in one chunk; each has a token of its own.
CHUNK = 100
CONGESTED = ("bad", CloseReason.CONGESTED, "Failed to keep up")


class Peer:
    """The server's handler: sends rows to every peer that connects.

    :ivar accepted: all connections, also those that are closed.
    """

    def __init__(self) -> None:
        self.connections: list[ReplicationConnection] = []
        self.accepted: list[Any] = []

    def new_connection(self, connection: ReplicationConnection) -> None:
        self.connections.append(connection)
        self.accepted.append(connection)

    def received(
        self, connection: ReplicationConnection, items: Sequence[ReceivedItem]
    ) -> None: ...

    def ready_again(self, connection: ReplicationConnection) -> None: ...

    def lost_connection(self, connection: ReplicationConnection) -> None:
        self.connections.remove(connection)

    def send(self, first: int) -> None:
        """Send a chunk of rows whose first token is ``first``."""
        batches = [(token, [TEXT]) for token in range(first, first + CHUNK)]
        lines = rdata_lines("events", "w", batches)
        for connection in list(self.connections):
            connection.send_lines("RDATA", lines)


class Reader:
    """The handler of a client that reads.

    :ivar tokens: of the rows received, in order.
    """

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self.tokens: list[int | None] = []
        self._arrived = arrived

    def new_connection(self, connection: ReplicationConnection) -> None: ...

    def received(
        self, connection: ReplicationConnection, items: Sequence[ReceivedItem]
    ) -> None:
        for item in items:
            if isinstance(item, RdataGroup):
                self.tokens += item.tokens
                self._arrived(len(self.tokens))

    def ready_again(self, connection: ReplicationConnection) -> None: ...

    def lost_connection(self, connection: ReplicationConnection) -> None: ...


class CongestionTests(TestCase):
    """One server, a peer that reads, and peers that do not.

    Latency is counted in turns of the reactor, since their number does not depend on
    how busy the machine is.
    """

    timeout = 60

    async def start(self, limit: PendingLimit) -> None:
        self.observer = RecordingObserver()
        self.server = Peer()
        clock = ReactorClock(reactor)
        self.factory = ReplicationStreamProtocolFactory(
            "repl.test", clock, self.server, self.observer, limit=limit
        )
        self.port: IListeningPort = await TCP4ServerEndpoint(
            reactor, 0, interface="127.0.0.1"
        ).listen(self.factory)
        self.addCleanup(self.port.stopListening)
        self.addCleanup(self.factory.close_connections)
        self.turn = self.sent = 0
        self.sent_in: dict[int, int] = {}
        self.latencies: list[int] = []
        self.reader = Reader(self._arrived)
        client = DirectTcpReplicationClientFactory(
            "good", "repl.test", clock, self.reader, RecordingObserver()
        )
        client.connect(TCP4ClientEndpoint(reactor, "127.0.0.1", self._port_number()))
        self.addCleanup(client.stop)
        turns = LoopingCall(self._count_turn)
        turns.start(0)
        self.addCleanup(turns.stop)
        await self.until(lambda: len(self.server.connections) == 1)

    def _port_number(self) -> int:
        number: int = self.port.getHost().port  # type: ignore[attr-defined]
        return number

    def _count_turn(self) -> None:
        self.turn += 1

    def _arrived(self, count: int) -> None:
        for first in [first for first in self.sent_in if first + CHUNK <= count]:
            self.latencies.append(self.turn - self.sent_in.pop(first))

    async def bad_peer(self) -> socket.socket:
        """Connect a peer that sends a stock client's greeting and reads nothing."""
        before = len(self.server.connections)
        peer = socket.socket()
        self.addCleanup(peer.close)
        # The receive buffer is small, so that the kernel buffers little data.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", self._port_number()))
        peer.setblocking(False)
        peer.sendall(b"NAME bad\nPING 1\nREPLICATE\n")
        await self.until(lambda: len(self.server.connections) == before + 1)
        return peer

    @staticmethod
    def unread_end(peer: socket.socket) -> bytes:
        """Return the end of the data that a peer left unread."""
        peer.setblocking(True)
        peer.settimeout(10)
        data = b""
        while chunk := peer.recv(65536):
            data = (data + chunk)[-1000:]
        return data

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await deferLater(reactor, 0)

    async def send(self) -> None:
        """Send a chunk and wait for a few turns."""
        self.sent_in[self.sent] = self.turn
        self.server.send(self.sent)
        self.sent += CHUNK
        now = self.turn
        await self.until(lambda: self.turn > now + 3)

    async def measure(self, chunks: int) -> float:
        """Return the mean latency of some chunks at the peer that reads, in turns."""
        self.latencies = []
        for _ in range(chunks):
            await self.send()
        await self.until(lambda: not self.sent_in)
        return statistics.mean(self.latencies)

    def most_buffered(self) -> int:
        """Return the bytes buffered for the worst peer, not counting the kernel's."""
        return max(
            connection._connection.pending.bytes + connection.buffers().send_buffer
            for connection in self.factory.connections
        )

    def closed(self) -> list[tuple[str, CloseReason, str]]:
        """Return name, reason and text of each connection that was closed."""
        return [
            (each.name, each.close_reason, each.close_text)
            for each in self.server.accepted
            if each.close_reason is not None
        ]

    async def flood(self, peers: int) -> int:
        """
        Send until ``peers`` peers are closed; return the greatest number of bytes
        buffered.
        """
        most = 0
        while len(self.closed()) < peers:
            await self.send()
            most = max(most, self.most_buffered())
        return most

    async def test_peers_that_read_nothing(self) -> None:
        """
        Peers that read nothing are closed with "Failed to keep up" once the bound is
        reached; a peer that reads gets every row as fast as before.
        """
        limit = PendingLimit(bytes=4 * 1024 * 1024)
        await self.start(limit)
        alone_latency = await self.measure(50)
        peers = [await self.bad_peer() for _ in range(2)]
        congested_latency = await self.measure(20)
        self.assertLessEqual(congested_latency, alone_latency + 1)
        most = await self.flood(2)
        self.assertGreater(most, limit.bytes / 2)
        # The buffers may exceed the bound by the chunk that was being written.
        self.assertLess(most, limit.bytes + 2 * CHUNK * (len(TEXT) + 30) + 65536)
        self.assertEqual(self.closed(), [CONGESTED] * 2)
        self.assertLess(self.most_buffered(), 2 * CHUNK * (len(TEXT) + 30) + 65536)
        self.assertLessEqual(await self.measure(20), alone_latency + 1)
        self.assertEqual(self.reader.tokens, list(range(self.sent)))
        # Data in the kernel and the transport can still be read, up to the ERROR.
        for peer in peers:
            data = await deferToThread(self.unread_end, peer)
            self.assertTrue(data.endswith(b"\nERROR Failed to keep up\n"), data[-100:])

    async def test_peer_that_reads_one_byte_a_second(self) -> None:
        """
        A peer that reads a byte a second and sends PINGs is closed once the bound on
        the number of lines is reached.
        """
        limit = PendingLimit(lines=2_000)
        await self.start(limit)
        alone_latency = await self.measure(50)
        peer = await self.bad_peer()
        read: list[bytes] = []

        def read_one() -> None:
            peer.sendall(b"PING 1\n")
            read.append(peer.recv(1))

        reading = LoopingCall(read_one)
        reading.start(1, now=False)
        self.addCleanup(lambda: reading.stop() if reading.running else None)
        most_lines = 0
        while not self.closed():
            await self.send()
            # It takes twenty chunks to reach the bound.
            await deferLater(reactor, 0.1)
            most_lines = max(
                most_lines,
                *(each.buffers().pending_commands for each in self.factory.connections),
            )
            self.latencies = []
        reading.stop()
        self.assertEqual(self.closed(), [CONGESTED])
        self.assertGreaterEqual(len(read), 2)
        self.assertGreater(most_lines, limit.lines / 2)
        self.assertLessEqual(most_lines, limit.lines)
        await deferToThread(self.unread_end, peer)
        self.assertLessEqual(await self.measure(20), alone_latency + 1)
        self.assertEqual(self.reader.tokens, list(range(self.sent)))
