"""Tests of the external cache."""

from __future__ import annotations

from typing import Any

import txredisapi
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock, deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.redis.external_cache import ExternalCache
from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import RedisOptions
from synapse_replication.testing.servers import shared_redis
from tests.redis.doubles import Events, MemoryLink, OrderedObserver, RecordingHandler


class WithRedisTests(TestCase):
    """:class:`ExternalCache` with a real Redis."""

    timeout = 30

    async def test_values(self) -> None:
        """Any JSON value is returned by cache and key until it expires."""
        from twisted.internet import reactor as untyped_reactor  # noqa: TID251

        reactor: Any = untyped_reactor
        events = Events()
        observer = OrderedObserver(events)
        link = RedisReplicationLink(
            reactor,
            RedisOptions(path=str(shared_redis().socket_path)),
            self.id(),
            RecordingHandler(events),
            observer,
            lambda count: None,
        )
        link.start()
        self.addCleanup(lambda: Deferred.fromCoroutine(link.stop()))
        await events.until(lambda: ("made", "redis_out") in events.all)
        cache = link.cache
        self.assertTrue(cache.is_enabled())
        for value in (None, 0, 12, "12", 1.5, "ä", [1, {"a": None}]):
            await cache.set("values", "key:ä", value, 60_000)
            self.assertEqual(await cache.get("values", "key:ä"), value)
        self.assertIsNone(await cache.get("other", "key:ä"))
        self.assertEqual(shared_redis().command("GET", "cache_v1:values:key:ä")[0], "[")
        await cache.set("values", "short", 1, 20)
        while await cache.get("values", "short") is not None:
            await deferLater(reactor, 0.005, lambda: None)
        self.assertIn(("get", "values", True), observer.cache)
        self.assertIn(("get", "values", False), observer.cache)
        self.assertIn(("set", "values"), observer.cache)


class WithoutRedisTests(SynchronousTestCase):
    """:class:`ExternalCache` without Redis."""

    def test_not_configured(self) -> None:
        """Without Redis, nothing is stored and no call fails."""
        cache = ExternalCache(None, Clock(), ReplicationObserver())
        self.assertFalse(cache.is_enabled())
        setting = Deferred.fromCoroutine(cache.set("c", "k", 1, 1000))
        self.assertIsNone(self.successResultOf(setting))
        value = Deferred.fromCoroutine(cache.get("c", "k"))
        self.assertIsNone(self.successResultOf(value))

    def test_not_connected(self) -> None:
        """Without a connection, calls fail immediately."""
        memory = MemoryLink()
        memory.lose(0)
        value = Deferred.fromCoroutine(memory.link.cache.get("c", "k"))
        self.failureResultOf(value, txredisapi.ConnectionError)

    def test_wrong_values(self) -> None:
        """A value that is not JSON, and an expiry of 0, are refused."""
        cache = MemoryLink().link.cache
        for value, expiry_ms in ((float("nan"), 1000), (object(), 1000), (1, 0)):
            setting = Deferred.fromCoroutine(cache.set("c", "k", value, expiry_ms))
            self.failureResultOf(setting, ValueError)
