"""Tests for :mod:`scripts.tools.faults.synapse.course`."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.synapse.course import DeploymentResult, StreamResult
from scripts.tools.faults.synapse.verdict import StreamTally

GOOD = StreamTally(
    "events", True, committed=9, due=36, delivered=36, lost=0, duplicated=0
)


def is_good(tally: StreamTally, never_shown: int | None = 0) -> bool:
    stream = StreamResult(tally, never_shown, seconds=1.0)
    return DeploymentResult("ours", (), (StreamResult(GOOD, 0, 0.0), stream)).is_good


class IsGoodTests(SynchronousTestCase):
    def test_each_fault_of_ours(self) -> None:
        """One row that ours lost, duplicated or never showed to a user is too many."""
        self.assertTrue(is_good(GOOD))
        self.assertFalse(is_good(attrs.evolve(GOOD, lost=1)))
        self.assertFalse(is_good(attrs.evolve(GOOD, duplicated=1)))
        self.assertFalse(is_good(GOOD, never_shown=1))

    def test_a_failed_read_of_the_homeserver(self) -> None:
        """
        Rows missing from a response after a failed read do not make the result bad.
        """
        stream = StreamResult(GOOD, 0, 0.0, failed_reads=1)
        self.assertTrue(DeploymentResult("ours", (), (stream,)).is_good)

    def test_a_run_that_did_not_end(self) -> None:
        """A deployment that failed to start or to restart is not good."""
        self.assertFalse(DeploymentResult("ours", (), (), error="it ended").is_good)

    def test_false_alarm(self) -> None:
        """A report that no fault explains makes the result bad."""
        result = DeploymentResult("ours", (), (), alarms=2)
        self.assertTrue(result.is_good)
        self.assertFalse(attrs.evolve(result, false_alarms=("sync1: ...",)).is_good)

    def test_stock(self) -> None:
        """Rows that stock processes lose are shown, but do not make the result bad."""
        stock = attrs.evolve(GOOD, is_ours=False, lost=3, duplicated=2)
        self.assertTrue(is_good(stock, never_shown=1))

    def test_rows_that_may_be_repeated(self) -> None:
        """A cache invalidation may be repeated but not lost."""
        caches = attrs.evolve(GOOD, stream="caches", duplicated=2)
        self.assertTrue(is_good(caches))
        self.assertFalse(is_good(attrs.evolve(caches, lost=1)))

    def test_meter(self) -> None:
        """
        A meter must find every row that no process received, and no others; it may miss
        a row that was removed.
        """
        result = DeploymentResult(
            "stock",
            (),
            (),
            unannounced=("events 7 of w",),
            consumed=("to_device 3 of w",),
        )
        for metered, expected in (
            (("events 7 of w",), True),
            (("events 7 of w", "to_device 3 of w"), True),
            (("to_device 3 of w",), False),
            (("events 7 of w", "events 8 of w"), False),
        ):
            found = attrs.evolve(result, metered=metered)
            self.assertEqual(found.is_good, expected, metered)
