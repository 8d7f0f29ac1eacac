"""Tests that lost links leave nothing behind, with real servers."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import TestCase

from scripts.tools.leaks import measure

CYCLES = 300


class LeakTests(TestCase):
    """Tests for each kind of link, which is broken and restored many times."""

    timeout = 60

    def setUp(self) -> None:
        from twisted.internet import reactor  # noqa: TID251 -- the tests' own

        self.reactor: Any = reactor

    async def check(self, kind: str) -> None:
        """Check that nothing grows by even half an object in each cycle."""
        before, after = await measure(self.reactor, kind, CYCLES)
        growth = after.growth_since(before)
        # 6 KiB in each cycle was what a lost connection left.
        self.assertLess(growth.pop("memory"), CYCLES * 3)
        self.assertLess(max(growth.values()), CYCLES / 2, growth)

    async def test_redis(self) -> None:
        """Both connections to Redis."""
        await self.check("redis")

    async def test_sentinel(self) -> None:
        """Both connections to Redis, found through Sentinel."""
        await self.check("sentinel")

    async def test_tcp(self) -> None:
        """Both ends of a direct TCP connection."""
        await self.check("tcp")

    async def test_http(self) -> None:
        """Both ends of a connection for a catch-up."""
        await self.check("http")

    async def test_postgres(self) -> None:
        """A connection of the pool."""
        await self.check("postgres")
