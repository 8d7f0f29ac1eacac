"""The exploration of small worlds: the reader keeps its promises in each state."""

import sys
import time
from io import StringIO
from itertools import count, islice
from typing import ClassVar

from twisted.trial.reporter import TestResult
from twisted.trial.runner import TestLoader
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.explore.search import (
    UNIT_TESTED,
    Call,
    Result,
    Search,
    agrees_unreduced,
    entries,
    explain,
    names,
    replaced,
)
from scripts.tools.explore.world import Bounds, Kind
from scripts.tools.explore.worlds import COMPARED, SHALLOW
from synapse_replication.streams.reader import Reader


class ShallowTests(SynchronousTestCase):
    """Every state of the small worlds."""

    results: ClassVar[dict[str, Result]] = {}

    def result(self, name: str) -> Result:
        """Return the result of the search of a world, which runs once."""
        if name not in self.results:
            self.results[name] = Search(*SHALLOW[name]).run(120)
        return self.results[name]

    def explore(self, name: str, at_least: int) -> None:
        result = self.result(name)
        broken = result.broken
        self.assertIsNone(broken, "" if broken is None else explain(broken))
        self.assertTrue(result.is_complete)
        self.assertGreater(result.states, at_least)

    def test_database(self) -> None:
        self.explore("database", 5_000)

    def test_database_with_a_lie(self) -> None:
        self.explore("database, lie", 500)

    def test_standby(self) -> None:
        self.explore("standby, one id", 200)

    def test_removed_after_a_lie(self) -> None:
        self.explore("database, lie, removed", 5_000)

    def test_database_with_two_links(self) -> None:
        self.explore("database, two links", 3_000)

    def test_caches(self) -> None:
        self.explore("caches", 5_000)

    def test_memory(self) -> None:
        self.explore("memory", 5_000)

    def test_memory_with_two_links(self) -> None:
        self.explore("memory, two links", 300)

    def test_host_memory(self) -> None:
        self.explore("host memory", 5_000)

    def test_host_memory_with_two_links(self) -> None:
        self.explore("host memory, two links", 300)

    def test_stock_memory(self) -> None:
        self.explore("stock memory", 1_000)

    def test_stored_positions(self) -> None:
        self.explore("database, stored positions", 500)

    def test_table(self) -> None:
        """
        Every entry of the table is taken, except those that need larger worlds, and
        nothing else.
        """
        taken = {call for name in SHALLOW for call in self.result(name).calls}
        self.assertEqual(
            names(entries() - taken),
            {
                "BATCH DELIVERING DUE",
                "BATCH FETCHING DUE",
                "DELIVERY_FAILED DUE PAUSED",
                "DELIVERY_FAILED PAUSED PAUSED",
                "EPOCH DELIVERING DUE",
                "EPOCH PAUSED DUE",
                "LINK_LOST LIVE LIVE",
                "LINK_LOST PAUSED PAUSED",
                "LINK_UP DELIVERING DELIVERING",
                "LINK_UP PAUSED DUE",
                "LINK_UP PAUSED PAUSED",
                "LOST_ROWS DELIVERING DELIVERING",
                "LOST_ROWS PAUSED PAUSED",
                "NEXT DUE PAUSED",
                "OVERFLOW DELIVERING DUE",
                "POSITION DELIVERING DUE",
                "REPORT DELIVERING DUE",
                "REPORT FETCHING DUE",
                "REPORT PAUSED DUE",
                "UNREADABLE DUE DUE",
                "UNREADABLE PAUSED PAUSED",
            },
        )
        self.assertLessEqual(taken, entries())

    def test_entries_of_unit_tests(self) -> None:
        """The unit tests that are named for an entry of the table take it."""
        for entry, test in UNIT_TESTED.items():
            taken: set[Call] = set()
            with replaced(Bounds(), taken):
                TestLoader().loadByName(test).run(TestResult())
            self.assertIn(entry, names(taken))

    def test_reduced(self) -> None:
        """
        The search without reductions finds the same states, apart from the faults left.
        """
        for name, world in islice(COMPARED.items(), 2):
            self.assertTrue(agrees_unreduced(*world, 120), name)


class BrokenTests(SynchronousTestCase):
    """A broken promise."""

    def test_unsafe(self) -> None:
        """The shortest sequence of events is printed as a test."""
        self.patch(Reader, "reached", 0)
        result = Search(Kind.DATABASE, Bounds(ids=1, links=2)).run(60)
        assert result.broken is not None
        self.assertEqual(result.broken.reason, "row 1 is delivered twice")
        text = explain(result.broken)
        self.assertIn("World.begin(Kind.DATABASE, Bounds(ids=1, links=2))", text)
        self.assertIn("    world.apply(('message', 0))", text)

    def test_not_live(self) -> None:
        """A state that leads nowhere is a broken promise."""
        self.patch(Reader, "reported", lambda *_args: None)
        self.patch(Reader, "announced", lambda *_args: None)
        result = Search(Kind.DATABASE, Bounds(ids=1)).run(60)
        assert result.broken is not None
        self.assertIn("never at rest", result.broken.reason)
        self.assertIn("self.assertIsNone(rest(world))", explain(result.broken))

    def test_progress(self) -> None:
        """The search prints how far it is."""
        lines = StringIO()
        self.patch(sys, "stderr", lines)
        self.patch(time, "process_time", count().__next__)
        Search(Kind.DATABASE, Bounds(ids=2, links=2)).run(60, 1000, every=1.0)
        self.assertRegex(
            lines.getvalue(), r"states, depth \d+, \d+ states/s, \d+ in the queue"
        )

    def test_out_of_time(self) -> None:
        """A search without enough time is not complete."""
        result = Search(Kind.DATABASE, Bounds(ids=2)).run(0)
        self.assertFalse(result.is_complete)
        self.assertIsNone(result.broken)
