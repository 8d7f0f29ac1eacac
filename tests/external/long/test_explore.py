"""Explores a world that is too large for :mod:`tests.tools.explore`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.explore.search import Search, explain
from scripts.tools.explore.worlds import DEEP
from tests.external import skip_reason

skip = skip_reason("long")


class StandbyTests(SynchronousTestCase):
    """A reader of a standby, and a writer that lies."""

    def test_standby_with_a_lie(self) -> None:
        """The reader keeps its promises in each state."""
        result = Search(*DEEP["standby, lie"]).run(600)
        broken = result.broken
        self.assertIsNone(broken, "" if broken is None else explain(broken))
        self.assertTrue(result.is_complete)
        self.assertGreater(result.states, 10_000)
