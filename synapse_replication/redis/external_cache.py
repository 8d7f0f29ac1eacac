"""A cache in Redis that all processes share. Its values expire."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import txredisapi
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from synapse_replication.handlers.events import ExternalCacheGet, ExternalCacheSet
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.redis.factory import SynapseRedisFactory
from synapse_replication.redis.sender_protocol import RedisSenderProtocol
from synapse_replication.streams.rows import decode_json, encode_json


@attrs.define(eq=False, repr=False)
class ExternalCache:
    """A store of JSON values by cache name and key.

    :param factory: provides the connection; ``None`` to disable the cache.
    :param observer: notified of each successful request and its duration.
    :param wait: returns an awaitable for a Deferred; a host may pass a function that
        preserves the host's log contexts.
    """

    _factory: SynapseRedisFactory | None
    _clock: IReactorTime
    _observer: ReplicationObserver
    _wait: Callable[[Deferred[Any]], Awaitable[Any]] = lambda deferred: deferred

    def is_enabled(self) -> bool:
        """Return whether the cache is enabled, that is, whether it has a factory."""
        return self._factory is not None

    async def set(self, cache_name: str, key: str, value: Any, expiry_ms: int) -> None:
        """Store a value. If the cache is disabled, only check the arguments.

        :param expiry_ms: the time after which the value expires, in ms.
        :raises ValueError: if the value cannot be encoded as JSON, or ``expiry_ms`` is
            not positive.
        :raises txredisapi.RedisError: if there is currently no connection, Redis does
            not answer in time, or Redis answers with an error.
        """
        if expiry_ms <= 0:
            raise ValueError(f"expiry_ms must be at least 1, not {expiry_ms}")
        text = encode_json(value)
        if self._factory is None:
            return
        started = self._clock.seconds()
        name = _redis_key(cache_name, key)
        await self._wait(_set(_connection(self._factory), name, text, int(expiry_ms)))
        self._observer.observe(
            ExternalCacheSet(cache_name, self._clock.seconds() - started)
        )

    async def get(self, cache_name: str, key: str) -> Any | None:
        """Return a value, or ``None`` if it does not exist or has expired.

        If the cache is disabled, return ``None``.

        :raises txredisapi.RedisError: if there is currently no connection, Redis does
            not answer in time, or Redis answers with an error.
        :raises ValueError: if the stored value is not JSON.
        """
        if self._factory is None:
            return None
        started = self._clock.seconds()
        name = _redis_key(cache_name, key)
        text = await self._wait(_get(_connection(self._factory), name))
        seconds = self._clock.seconds() - started
        self._observer.observe(ExternalCacheGet(cache_name, text is not None, seconds))
        # A connection that the host created may have converted a number already.
        return decode_json(text) if isinstance(text, (bytes, str)) else text


def _connection(factory: SynapseRedisFactory) -> Any:
    # txredisapi's own handler would wait for a connection, with no time limit.
    if not factory.pool:
        raise txredisapi.ConnectionError("there is currently no connection to Redis")
    return factory.pool[0]


# The connection may have been created by the host instead of this package. Such a
# connection has only txredisapi's methods.


def _get(connection: Any, name: str) -> Any:
    if isinstance(connection, RedisSenderProtocol):
        return connection.request(b"GET", name.encode())
    return connection.get(name)


def _set(connection: Any, name: str, text: bytes, expiry_ms: int) -> Any:
    if isinstance(connection, RedisSenderProtocol):
        expiry = b"%d" % expiry_ms
        return connection.request(b"SET", name.encode(), text, b"PX", expiry)
    return connection.set(name, text, pexpire=expiry_ms)


def _redis_key(cache_name: str, key: str) -> str:
    return f"cache_v1:{cache_name}:{key}"
