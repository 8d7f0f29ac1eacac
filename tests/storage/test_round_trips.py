"""Tests for round trips that many callers share."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.storage.round_trips import RoundTripGate, SharedRoundTrip


class SharedRoundTripTests(SynchronousTestCase):
    """Tests for which waiters each round trip serves."""

    def setUp(self) -> None:
        self.begun: list[list[str]] = []
        self.gate = RoundTripGate()
        self.trip = SharedRoundTrip(self.begun.append, self.gate)

    def end(self) -> None:
        """End the round trip, with no waiter to wake."""
        self.trip.end()
        self.trip.begin_if_wanted()

    def test_one_at_a_time(self) -> None:
        """Waiters that join during a round trip are all served by the next one."""
        for waiter in "abc":
            self.trip.join(waiter)
        self.assertEqual(self.begun, [["a"]])
        self.end()
        self.assertEqual(self.begun, [["a"], ["b", "c"]])
        self.end()
        self.assertEqual(len(self.begun), 2)
        self.trip.join("d")
        self.assertEqual(self.begun[2:], [["d"]])

    def test_gathered(self) -> None:
        """Waiters that join during a batch are served by one round trip."""
        self.trip.join("a")
        self.trip.end()
        with self.gate.closed():
            self.trip.join("b")
            with self.gate.closed():
                self.trip.join("c")
            self.assertEqual(self.begun, [["a"]])
        self.assertEqual(self.begun, [["a"], ["b", "c"]])

    def test_still_running(self) -> None:
        """The end of a batch begins no round trip while another is under way."""
        self.trip.join("a")
        with self.gate.closed():
            self.trip.join("b")
        self.assertEqual(self.begun, [["a"]])

    def test_two_kinds(self) -> None:
        """
        Round trips of one batch begin in the order of joining, independently of each
        other.
        """
        other: SharedRoundTrip[str] = SharedRoundTrip(
            lambda waiting: self.begun.append(["other", *waiting]), self.gate
        )
        with self.gate.closed():
            other.join("x")
            self.trip.join("a")
        self.assertEqual(self.begun, [["a"], ["other", "x"]])

    def test_repeated(self) -> None:
        """
        A repeated round trip serves its waiters before those that joined meanwhile.
        """
        self.trip.join("a")
        self.trip.join("b")
        self.trip.repeat(["a"])
        self.assertEqual(self.begun, [["a"], ["a", "b"]])
        self.trip.join("c")
        self.assertEqual(len(self.begun), 2, "a round trip is under way")

    def test_nothing_to_do(self) -> None:
        """A round trip that ends synchronously does not block the next one."""
        trip: SharedRoundTrip[str] = SharedRoundTrip(
            lambda _: trip.end(), RoundTripGate()
        )
        served: list[list[str]] = []
        trip.join("a")
        trip._begin = served.append
        trip.join("b")
        self.assertEqual(served, [["b"]])

    def test_failure_while_waking(self) -> None:
        """An exception while waiters are woken still ends the batch."""

        def join_and_fail() -> None:
            with self.gate.closed():
                self.trip.join("a")
                raise ZeroDivisionError

        self.assertRaises(ZeroDivisionError, join_and_fail)
        self.assertFalse(self.gate.is_closed)
        self.assertEqual(self.begun, [["a"]])
