"""Tests for synapse_replication.recent."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.recent import GroupedRecentDict, RecentDict


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


class GroupedRecentDictTests(SynchronousTestCase):
    """Tests for GroupedRecentDict."""

    def test_groups(self) -> None:
        """Only the entries of one group are removed, without looking at others."""
        grouped: GroupedRecentDict[int] = GroupedRecentDict(3)
        for number, key in enumerate(
            [("a", 1), ("b", 1), ("a", 2), ("a", 1), ("c", 1)]
        ):
            grouped[key] = number
        self.assertEqual(list(grouped), [("a", 2), ("a", 1), ("c", 1)])
        grouped.remove_group("b")
        grouped.remove_group("a")
        self.assertEqual(dict(grouped), {("c", 1): 4})
        self.assertEqual(grouped.popitem(), (("c", 1), 4))
        self.assertEqual(grouped._groups, {})
