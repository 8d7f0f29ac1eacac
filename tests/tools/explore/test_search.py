"""The exploration of small worlds: the reader keeps its promises in each state."""

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.explore.search import Search, explain
from scripts.tools.explore.world import Bounds, Kind
from scripts.tools.explore.worlds import SHALLOW
from synapse_replication.streams.reader import Reader


class ShallowTests(SynchronousTestCase):
    """Every state of the small worlds."""

    def explore(self, name: str, at_least: int) -> None:
        kind, bounds = SHALLOW[name]
        result = Search(kind, bounds).run(120)
        broken = result.broken
        self.assertIsNone(broken, "" if broken is None else explain(broken))
        self.assertTrue(result.is_complete)
        self.assertGreater(result.states, at_least)

    def test_database(self) -> None:
        self.explore("database", 5_000)

    def test_database_with_a_lie(self) -> None:
        self.explore("database, lie", 500)

    def test_database_with_two_links(self) -> None:
        self.explore("database, two links", 5_000)

    def test_caches(self) -> None:
        self.explore("caches", 5_000)

    def test_memory(self) -> None:
        self.explore("memory", 5_000)

    def test_memory_with_two_links(self) -> None:
        self.explore("memory, two links", 5_000)

    def test_stock_memory(self) -> None:
        self.explore("stock memory", 1_000)

    def test_claims(self) -> None:
        self.explore("claims", 5_000)


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

    def test_out_of_time(self) -> None:
        """A search without enough time is not complete."""
        result = Search(Kind.DATABASE, Bounds(ids=2)).run(0)
        self.assertFalse(result.is_complete)
        self.assertIsNone(result.broken)
