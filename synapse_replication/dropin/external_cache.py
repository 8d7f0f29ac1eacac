"""The replacement for ``synapse.replication.tcp.external_cache``."""

from __future__ import annotations

import logging
from typing import Any

import txredisapi

from synapse_replication.dropin.homeserver import Homeserver
from synapse_replication.dropin.host_code import make_yieldable
from synapse_replication.dropin.observer import observer_of
from synapse_replication.redis import external_cache

logger = logging.getLogger(__name__)


class DropInExternalCache(external_cache.ExternalCache):
    """A cache of small values, stored in Redis and shared by all processes.

    If Redis fails, the failure is logged: a read then returns ``None``, and a write is
    not retried.
    """

    def __init__(self, hs: Homeserver) -> None:
        factory = None
        if hs.config.redis.redis_enabled:
            # txredisapi has no public attribute for the factory.
            factory = hs.get_outbound_redis_connection()._factory  # noqa: SLF001 -- txredisapi's own
        super().__init__(factory, hs.get_reactor(), observer_of(hs), make_yieldable)

    async def set(self, cache_name: str, key: str, value: Any, expiry_ms: int) -> None:
        """Store a JSON value for ``expiry_ms`` ms.

        :raises ValueError: if the value cannot be encoded as JSON, or ``expiry_ms`` is
            less than 1.
        """
        try:
            await super().set(cache_name, key, value, expiry_ms)
        except txredisapi.RedisError as error:
            logger.warning("Cannot set a value of the external cache: %s", error)

    async def get(self, cache_name: str, key: str) -> Any | None:
        """Return a value; ``None`` if there is none, or if Redis fails.

        :raises ValueError: if the stored value is not JSON.
        """
        try:
            return await super().get(cache_name, key)
        except txredisapi.RedisError as error:
            logger.warning("Cannot get a value of the external cache: %s", error)
            return None
