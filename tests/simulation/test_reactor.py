"""Tests that a simulated process receives nothing once it is dead."""

from __future__ import annotations

from random import Random

from twisted.trial.unittest import SynchronousTestCase

from tests.simulation.clock import SimulatedClock
from tests.simulation.network import SimulatedNetwork
from tests.simulation.reactor import ProcessReactor


class ProcessReactorTests(SynchronousTestCase):
    def test_dead(self) -> None:
        """Calls that a process scheduled are not made after its death."""
        clock = SimulatedClock()
        network = SimulatedNetwork(clock, Random(1))
        reactor = ProcessReactor(clock, network, "p")
        made: list[str] = []
        reactor.callLater(1.0, made.append, "alive")
        reactor.callLater(2.0, made.append, "dead")
        reactor.callFromThread(made.append, "thread")
        clock.run_until(1.5)
        reactor.kill()
        clock.run_until(9.0)
        self.assertEqual(made, ["thread", "alive"])
