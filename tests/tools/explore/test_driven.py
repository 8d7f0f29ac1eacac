"""Tests of the comparison of the real driver with the worlds."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.explore.comparison import compare, compare_delayed
from scripts.tools.explore.driven import Driven
from scripts.tools.explore.driver_bugs import BUGS, find
from scripts.tools.explore.worlds import DELAYED, DRIVEN
from synapse_replication.streams.reader_decisions import Action


class DriverTests(SynchronousTestCase):
    """The driver does what the worlds explore."""

    def test_agrees(self) -> None:
        """The driver and each world agree, in sequences from the first states."""
        for name, (kind, bounds) in DRIVEN.items():
            found = compare(kind, bounds, 40)
            self.assertIsNone(found.reason, (name, found))
            self.assertGreater(found.sequences, 40, name)

    def test_agrees_with_delays(self) -> None:
        """So they do if items wait in the queue of the driver, or are parked there."""
        for name, (kind, bounds) in DELAYED.items():
            found = compare_delayed(kind, bounds, 20)
            self.assertIsNone(found.reason, (name, found))
            self.assertGreater(found.sequences, 40, name)

    def test_two_pauses(self) -> None:
        """A pause may end while the end of an earlier one is in the queue."""
        events: list[tuple[Any, ...]] = [
            ("allocate",), ("commit", 1), ("send",), ("up", 0), ("report", 0),
            ("behind",), ("done",), ("position", 0), ("time",), ("behind",),
            ("done",), ("time",),
        ]  # fmt: skip
        Driven(*DRIVEN["standby, one id"]).run(events)

    def test_bugs(self) -> None:
        """Each deliberate bug of the driver is found, whatever its action."""
        for name, bug in BUGS.items():
            with self.subTest(bug=name):
                self.assertIsNotNone(find(bug).reason, name)

    def test_actions_have_bugs(self) -> None:
        """There is a bug of each action."""
        kinds = {kind.__name__ for kind in Action.__args__}
        self.assertEqual(kinds - {name.partition(":")[0] for name in BUGS}, set())
