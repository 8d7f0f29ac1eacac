"""Small values that all processes share, in Redis, until they expire."""

from __future__ import annotations

from typing import Any

import txredisapi
from twisted.internet.interfaces import IReactorTime

from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.redis.factory import SynapseRedisFactory
from synapse_replication.streams.rows import decode_json, encode_json

__all__ = ["ExternalCache"]


class ExternalCache:
    """Get and set JSON values by cache and key.

    :param factory: keeps the connection to use, and leaves values as bytes
        (``charset=None``, ``convertNumbers=False``); ``None`` if there is no Redis.
    """

    def __init__(
        self,
        factory: SynapseRedisFactory | None,
        clock: IReactorTime,
        observer: ReplicationObserver,
    ) -> None:
        self._factory = factory
        self._clock = clock
        self._observer = observer

    def is_enabled(self) -> bool:
        """Return whether there is a Redis: whether values are kept at all."""
        return self._factory is not None

    async def set(self, cache_name: str, key: str, value: Any, expiry_ms: int) -> None:
        """Keep a value for ``expiry_ms`` ms. Does nothing if there is no Redis.

        :raises ValueError: if the value is not JSON, or the time is not positive.
        :raises txredisapi.RedisError: if there is no connection now, or Redis does not
            answer, or refuses.
        """
        if expiry_ms <= 0:
            raise ValueError(f"a value is kept for at least 1 ms, not {expiry_ms}")
        text = encode_json(value)
        if self._factory is None:
            return
        started = self._clock.seconds()
        connection = _connection(self._factory)
        await connection.set(_redis_key(cache_name, key), text, pexpire=int(expiry_ms))
        self._observer.external_cache_set(cache_name, self._clock.seconds() - started)

    async def get(self, cache_name: str, key: str) -> Any | None:
        """Return a value, or ``None`` if there is none (any more).

        :raises txredisapi.RedisError: if there is no connection now, or Redis does not
            answer, or refuses.
        :raises ValueError: what Redis has under the key is not JSON.
        """
        if self._factory is None:
            return None
        started = self._clock.seconds()
        text = await _connection(self._factory).get(_redis_key(cache_name, key))
        seconds = self._clock.seconds() - started
        self._observer.external_cache_get(cache_name, text is not None, seconds)
        # A connection that was made elsewhere may have read a number already.
        return decode_json(text) if isinstance(text, (bytes, str)) else text


def _connection(factory: SynapseRedisFactory) -> Any:
    # txredisapi's own handler would wait for one, without any limit.
    if not factory.pool:
        raise txredisapi.ConnectionError("there is no connection to Redis now")
    return factory.pool[0]


def _redis_key(cache_name: str, key: str) -> str:
    return f"cache_v1:{cache_name}:{key}"
