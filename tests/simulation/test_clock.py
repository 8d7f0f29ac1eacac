"""Tests for simulated time, which advances from one call to the next."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tests.simulation.clock import (
    SimulatedClock,
    TooManyCallsError,
)


class SimulatedClockTests(SynchronousTestCase):
    def test_each_at_its_time(self) -> None:
        """Calls are made in order, each at its scheduled time."""
        clock = SimulatedClock()
        made: list[tuple[str, float]] = []
        for name, at in (("b", 2.0), ("a", 1.0), ("c", 2.0), ("d", 9.0)):
            clock.callLater(at, lambda name=name: made.append((name, clock.seconds())))
        clock.callLater(1.5, made.append, ("x", 0.0)).cancel()
        clock.run_until(5.0)
        self.assertEqual(made, [("a", 1.0), ("b", 2.0), ("c", 2.0)])
        self.assertEqual(clock.seconds(), 5.0)

    def test_later(self) -> None:
        """A call that is delayed is made at its new time."""
        clock = SimulatedClock()
        made: list[str] = []
        first = clock.callLater(1.0, made.append, "first")
        clock.callLater(2.0, made.append, "second")
        first.delay(3.0)
        clock.run_until(5.0)
        self.assertEqual(made, ["second", "first"])

    def test_no_end(self) -> None:
        """Calls that reschedule themselves without limit raise an error."""
        clock = SimulatedClock()

        def again() -> None:
            clock.callLater(0, again)

        again()
        self.assertRaises(TooManyCallsError, clock.run_until, 1.0)
