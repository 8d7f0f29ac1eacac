"""Tests for :mod:`scripts.tools.faults.synapse.schedule`."""

from __future__ import annotations

from collections import Counter

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.synapse.schedule import MIXED, make_schedule

NEMESES = ("pause", "redis-kill", "kill-master", MIXED)
MIXABLE = NEMESES[:3]


class MakeScheduleTests(SynchronousTestCase):
    def test_seeded(self) -> None:
        """The same seed makes the same schedule, and another seed another one."""
        first, again, other = (
            make_schedule(seed, NEMESES, 3, MIXABLE) for seed in (1, 1, 2)
        )
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)

    def test_each_as_often(self) -> None:
        """Each fault occurs once before any is repeated."""
        schedule = make_schedule(5, NEMESES, 3, MIXABLE)
        names = [one.nemesis for one in schedule]
        self.assertEqual(Counter(names), dict.fromkeys(NEMESES, 3))
        self.assertEqual(set(names[:4]), set(NEMESES))

    def test_mixed(self) -> None:
        """A mixed round has two or three different faults that may be mixed."""
        for seed in range(50):
            (one,) = make_schedule(seed, [MIXED], 1, MIXABLE)
            self.assertIn(len(one.faults), (2, 3))
            self.assertEqual(len(set(one.faults)), len(one.faults))
            self.assertLessEqual(set(one.faults), set(MIXABLE))

    def test_chance_of_a_round(self) -> None:
        """The random choices of a round are reproducible, and differ between rounds."""
        first, second = make_schedule(1, ["pause"], 2, MIXABLE)
        self.assertEqual(first.chance.random(), first.chance.random())
        self.assertNotEqual(first.chance.random(), second.chance.random())
