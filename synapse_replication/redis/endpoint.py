"""The server to which a process connects: an address, or the master behind Sentinel."""

from __future__ import annotations

from typing import Any

from twisted.internet.interfaces import IConnector

from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.redis.factory import SynapseRedisFactory
from synapse_replication.redis.options import RedisOptions
from synapse_replication.redis.sentinel import SentinelMaster


class RedisEndpoint:
    """Opens connections to Redis.

    :param reactor: opens the connections, and is the clock.
    :param options: the address of Redis, or the Sentinels to query for it.
    :param observer: notified if no Sentinel returns the master's address.
    """

    def __init__(
        self, reactor: Any, options: RedisOptions, observer: ReplicationObserver
    ) -> None:
        self._reactor = reactor
        self._options = options
        self._master: SentinelMaster | None = None
        if options.sentinel is not None:
            self._master = SentinelMaster(reactor, options, options.sentinel, observer)

    def connect(self, factory: SynapseRedisFactory) -> IConnector:
        """Open a connection; behind Sentinel, reconnect it when the master changes.

        :raises OSError: if a file of the TLS options cannot be read.
        :raises ValueError: if a file of the TLS options does not contain the expected
            PEM data.
        """
        if self._master is not None:
            return self._master.connect(factory)
        return self._options.connect(self._reactor, factory)

    def stop(self) -> None:
        """Stop the queries of Sentinels. Open connections are not affected."""
        if self._master is not None:
            self._master.stop()
