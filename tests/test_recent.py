"""Tests for synapse_replication.recent."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.recent import RecentDict


class RecentDictTests(SynchronousTestCase):
    """Tests for RecentDict."""

    def test_evicts_the_oldest(self) -> None:
        """Beyond the bound, the entry that was written longest ago is evicted."""
        recent: RecentDict[str, int] = RecentDict(2)
        recent["a"] = 1
        recent["b"] = 2
        recent["a"] = 3
        recent["c"] = 4
        self.assertEqual(dict(recent), {"a": 3, "c": 4})
