"""Tests for the simulated network, which delays, splits and drops bytes."""

from __future__ import annotations

from random import Random
from typing import Any

from twisted.internet.interfaces import ISystemHandle
from twisted.internet.protocol import ClientFactory, Protocol
from twisted.trial.unittest import SynchronousTestCase

from tests.simulation.clock import SimulatedClock
from tests.simulation.network import Pipe, SimulatedNetwork, Splitting
from tests.simulation.reactor import PEER_PORT, ProcessReactor


class PipeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = SimulatedClock()
        self.arrived: list[bytes] = []
        self.ends: list[float] = []
        self.splitting = Splitting(0.0, 0.0)
        self.latency = 1.0
        self.pipe = Pipe(
            self.clock,
            Random(1),
            lambda: self.latency,
            self.splitting,
            self.arrived.append,
            lambda: self.ends.append(self.clock.seconds()),
        )

    def test_in_order(self) -> None:
        """A faster write does not overtake a slower one, and the end comes last."""
        self.pipe.write(b"a")
        self.latency = 0.1
        self.pipe.write(b"b")
        self.assertEqual(self.pipe.in_flight, 2)
        self.pipe.end()
        self.pipe.write(b"c")
        self.clock.run_until(0.9)
        self.assertEqual(self.arrived, [])
        self.clock.run_until(1.0)
        self.assertEqual((self.arrived, self.ends), ([b"ab"], [1.0]))
        self.assertEqual(self.pipe.in_flight, 0)

    def test_in_pieces(self) -> None:
        """Bytes written together may be split anywhere, and none is lost."""
        self.splitting.chance, self.splitting.seconds = 0.9, 0.1
        self.pipe.write(b"0123456789")
        self.pipe.write(b"abcdefghij")
        self.clock.run_until(9.0)
        self.assertGreater(len(self.arrived), 1)
        self.assertEqual(b"".join(self.arrived), b"0123456789abcdefghij")

    def test_cut(self) -> None:
        """A pipe that is cut delivers nothing, not even its end."""
        self.pipe.write(b"a")
        self.pipe.is_cut = True
        self.pipe.write(b"b")
        self.pipe.end()
        self.clock.run_until(9.0)
        self.assertEqual((self.arrived, self.ends), ([], []))

    def test_closed(self) -> None:
        """A closed pipe drops the bytes in flight."""
        self.pipe.write(b"a")
        self.pipe.close()
        self.clock.run_until(9.0)
        self.assertEqual((self.arrived, self.ends), ([], []))

    def test_end_within(self) -> None:
        """Bytes that would arrive too late are dropped before the end."""
        self.latency = 0.1
        self.pipe.write(b"a")
        self.latency = 5.0
        self.pipe.write(b"b")
        self.pipe.end_within(0.5)
        self.clock.run_until(9.0)
        self.assertEqual(self.arrived, [b"a"])
        self.assertEqual(len(self.ends), 1)


class _Peer(Protocol):
    """Records what happens at one end of a connection."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def connectionMade(self) -> None:
        self.events.append("made")

    def dataReceived(self, data: bytes) -> None:
        self.events.append(data)

    def connectionLost(self, reason: object = None) -> None:
        self.events.append("lost")


class PeerTests(SynchronousTestCase):
    """Connections between two processes."""

    def setUp(self) -> None:
        self.clock = SimulatedClock()
        self.network = SimulatedNetwork(self.clock, Random(1))
        self.client = ProcessReactor(self.clock, self.network, "client")
        self.server = ProcessReactor(self.clock, self.network, "server")
        self.ends: list[_Peer] = []
        factory: Any = ClientFactory.forProtocol(self._build)
        self.network.listen(self.server, factory)
        self.client.connectTCP("server", PEER_PORT, factory)
        self.clock.run_until(1.0)

    def _build(self) -> _Peer:
        self.ends.append(_Peer())
        return self.ends[-1]

    def test_both_directions(self) -> None:
        """Bytes arrive at the other end, and each end may close the connection."""
        ends = self.ends
        for end, text in zip(ends, (b"a", b"b"), strict=True):
            assert end.transport is not None
            end.transport.write(text)
        self.clock.run_until(2.0)
        assert ends[0].transport is not None
        ends[0].transport.loseConnection()
        self.clock.run_until(3.0)
        events = sorted(str(end.events) for end in ends)
        self.assertEqual(events, ["['made', b'a', 'lost']", "['made', b'b', 'lost']"])

    def test_socket(self) -> None:
        """Each end claims to have a socket, so that a sender fences it when lost."""
        for end in self.ends:
            self.assertTrue(ISystemHandle.providedBy(end.transport))

    def test_death(self) -> None:
        """The other end notices that a process died; that process does not."""
        self.assertEqual(len(self.network.of_process("server", "tcp")), 1)
        self.server.kill()
        self.clock.run_until(2.0)
        events = sorted(str(end.events) for end in self.ends)
        self.assertEqual(events, ["['made', 'lost']", "['made']"])
        self.assertTrue(self.network.refuses("client", "tcp", "server"))
