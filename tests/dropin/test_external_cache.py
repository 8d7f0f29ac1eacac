"""Tests for the external cache inside a host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.external_cache import DropInExternalCache
from tests.dropin.host import FakeHomeserver, fake_modules


class ExternalCacheTests(SynchronousTestCase):
    """Tests for DropInExternalCache."""

    def setUp(self) -> None:
        fake_modules(self)

    def _cache(self, pool: list[Any] | None) -> DropInExternalCache:
        hs: Any = FakeHomeserver()
        if pool is not None:
            hs.config.redis.redis_enabled = True
            connection = SimpleNamespace(_factory=SimpleNamespace(pool=pool))
            hs.get_outbound_redis_connection = lambda: connection
        return DropInExternalCache(hs)

    def _get(self, cache: DropInExternalCache) -> Any:
        return self.successResultOf(Deferred.fromCoroutine(cache.get("c", "k")))

    def test_no_redis(self) -> None:
        """Without Redis the cache is disabled."""
        cache = self._cache(None)
        self.assertFalse(cache.is_enabled())
        self.assertIs(self._get(cache), None)

    def test_values(self) -> None:
        """Values are decoded from JSON; a number that Redis returned is kept."""
        for found, value in (
            (b'{"a":1}', {"a": 1}),
            ("[2]", [2]),
            (3, 3),
            (None, None),
        ):
            connection = SimpleNamespace(get=lambda key, found=found: succeed(found))
            cache = self._cache([connection])
            self.assertTrue(cache.is_enabled())
            self.assertEqual(self._get(cache), value)

    def test_no_connection(self) -> None:
        """While Redis is down the cache is empty, and a warning is logged."""
        cache = self._cache([])
        with self.assertLogs("synapse_replication.dropin.external_cache", "WARNING"):
            self.assertIs(self._get(cache), None)
        with self.assertLogs("synapse_replication.dropin.external_cache", "WARNING"):
            self.successResultOf(Deferred.fromCoroutine(cache.set("c", "k", 1, 1000)))
