"""Tests for the simulated network, which delays, splits and drops bytes."""

from __future__ import annotations

from random import Random

from twisted.trial.unittest import SynchronousTestCase

from tests.simulation.clock import SimulatedClock
from tests.simulation.network import Pipe, Splitting


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
