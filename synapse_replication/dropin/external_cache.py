"""The replacement for ``synapse.replication.tcp.external_cache``."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import txredisapi
from twisted.internet.defer import Deferred

from synapse_replication.dropin.bridges import make_yieldable
from synapse_replication.dropin.observer import observer_of
from synapse_replication.redis import external_cache

__all__ = ["ExternalCache"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ExternalCache:
    """A cache of small values in Redis, which all processes share.

    If Redis fails, the failure is logged, a read returns ``None``, a write is not
    retried, and the host continues without the cache.
    """

    def __init__(self, hs: Any) -> None:
        factory = None
        if hs.config.redis.redis_enabled:
            # txredisapi has no public attribute for the factory.
            factory = hs.get_outbound_redis_connection()._factory
        self._cache = external_cache.ExternalCache(
            factory, hs.get_reactor(), observer_of(hs)
        )

    def is_enabled(self) -> bool:
        """Return whether Redis is configured."""
        return self._cache.is_enabled()

    async def set(self, cache_name: str, key: str, value: Any, expiry_ms: int) -> None:
        """Store a JSON value for ``expiry_ms`` ms."""
        try:
            await _in_sentinel_context(
                self._cache.set(cache_name, key, value, expiry_ms)
            )
        except txredisapi.RedisError as error:
            logger.warning("Cannot set a value of the external cache: %s", error)

    async def get(self, cache_name: str, key: str) -> Any | None:
        """Return a value; ``None`` if there is none, or if Redis fails."""
        try:
            return await _in_sentinel_context(self._cache.get(cache_name, key))
        except txredisapi.RedisError as error:
            logger.warning("Cannot get a value of the external cache: %s", error)
            return None


def _in_sentinel_context(coroutine: Coroutine[Any, Any, T]) -> Deferred[T]:
    """Run a coroutine that ignores log contexts.

    :return: a Deferred whose awaiting caller resumes in its own log context.
    """
    context = importlib.import_module("synapse.logging.context")
    with context.PreserveLoggingContext():
        waiting = Deferred.fromCoroutine(coroutine)
    return make_yieldable(waiting)
