"""Tests for :mod:`scripts.tools.faults.run`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.run import (
    Result,
    Settings,
    have_caught_up,
    make_result,
    run_scenario,
    without_rows,
)
from scripts.tools.faults.scenarios import SCENARIOS
from synapse_replication.demo.check import JournalEntry, WriterTally

GOOD = [
    WriterTally("events", "event_writer1", reader, 12, 12, 0, 0, 0, 99, 98)
    for reader in ("reader1", "reader2")
]


def result(*tallies: WriterTally, seconds: float | None = 1.0) -> Result:
    return make_result("x", list(tallies), catch_ups=3, seconds=seconds)


class MakeResultTests(SynchronousTestCase):
    def test_good(self) -> None:
        """Written rows are counted once, received rows at each reader."""
        found = result(*GOOD)
        self.assertEqual((found.written, found.received), (12, 24))
        self.assertTrue(found.is_good)

    def test_each_fault_is_reported(self) -> None:
        """One lost, duplicated or reordered row at one reader makes the result bad."""
        for other in (
            attrs.evolve(GOOD[1], missing=1),
            attrs.evolve(GOOD[1], duplicated=1),
            attrs.evolve(GOOD[1], out_of_order=1),
        ):
            found = result(GOOD[0], other)
            self.assertFalse(found.is_good)
            self.assertEqual(found.lost + found.duplicated + found.reordered, 1)

    def test_positions_that_differ(self) -> None:
        """Readers at different positions, or too late, make the result bad."""
        different = result(GOOD[0], attrs.evolve(GOOD[1], final_position=98))
        self.assertFalse(different.is_good)
        self.assertFalse(result(*GOOD, seconds=None).is_good)

    def test_an_error_or_no_rows(self) -> None:
        """An error, or a run without rows, makes the result bad."""
        self.assertFalse(attrs.evolve(result(*GOOD), error="it ended").is_good)
        self.assertFalse(result(*(attrs.evolve(t, written=0) for t in GOOD)).is_good)


class WithoutRowsTests(SynchronousTestCase):
    def test_failover(self) -> None:
        """Only the rows that the failover lost are removed, as often as lost."""
        journal = [
            JournalEntry("events", "w1", 3, ["a", "b"]),
            JournalEntry("events", "w2", 4, ["a"]),
            JournalEntry("events", "w1", 4, ["a", "a"]),
        ]
        lost = Counter({(3, '"b"'): 1, (4, '"a"'): 1})
        self.assertEqual(
            [entry.rows for entry in without_rows(journal, "events", "w1", lost)],
            [["a"], ["a"], ["a"]],
        )


class HaveCaughtUpTests(SynchronousTestCase):
    def test_every_reader_and_writer(self) -> None:
        """Each reader must be at or beyond each writer's position."""
        targets = {("s", "a"): 3, ("s", "b"): 5}
        there = {("s", "a"): 4, ("s", "b"): 5}
        self.assertTrue(have_caught_up(targets, [there, there]))
        self.assertFalse(have_caught_up(targets, [there, there | {("s", "a"): 2}]))
        self.assertFalse(have_caught_up(targets, [there, {("s", "a"): 3}]))


class RunScenarioTests(SynchronousTestCase):
    def test_skipped(self) -> None:
        """
        A scenario that cannot run on this machine reports the reason and starts
        nothing.
        """
        scenario = attrs.evolve(
            SCENARIOS["disk-full"], why_skipped=lambda: "only root may"
        )
        found = run_scenario(scenario, Settings(Path("none"), 1.0, 1), self.fail)
        self.assertEqual(found, Result("disk-full", skipped="only root may"))
        self.assertTrue(found.is_good)
