"""The link of a process over Redis: wires its two connections together."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from twisted.internet.defer import TimeoutError
from twisted.internet.interfaces import IReactorCore

from synapse_replication.handlers.events import ConnectionBuffers
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.handlers.interfaces import ConnectionHandler
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.redis.external_cache import ExternalCache
from synapse_replication.redis.factory import HANDSHAKE_TIMEOUT
from synapse_replication.redis.fencing import PublisherName
from synapse_replication.redis.options import RedisOptions
from synapse_replication.redis.sender import SENDER_NAME, RedisSender
from synapse_replication.redis.sender_protocol import SenderFactory
from synapse_replication.redis.sentinel import RedisMaster
from synapse_replication.redis.subscriber import SubscriberFactory
from synapse_replication.transport.buffers import read_buffers
from synapse_replication.transport.reactor import as_reactor

#: Time limit of waiting for the last acknowledgements, and of closing afterwards, in s.
STOP_TIMEOUT = 3.0


class RedisReplicationLink:
    """The two connections of a process to Redis, which reconnect until :meth:`stop`.

    The observer knows the publishing connection as ``redis_out``, and the subscribed
    connection as ``redis``.

    :param reactor: opens the connections, and is the clock.
    :param options: the options of both connections.
    :param server_name: the homeserver's name, which is also the main channel.
    :param command_handler: notified of the subscription, and receives its items.
    :param on_lost: announces this instance's positions after rows may have been lost;
        see :class:`~synapse_replication.redis.sender.RedisSender`.
    :param channels: further channels to subscribe to, for instance ``USER_IP``.
    :param extension: sends and receives messages on the extension's channel; ``None``
        to disable the extension.
    :param publisher: the name of this process; ``None`` if it can have no predecessor.
    :param ping_interval: the interval between pings on each connection, in s.
    :param reply_timeout: time limit of a reply, in s.
    :param jitter: see :class:`~synapse_replication.redis.factory.SynapseRedisFactory`,
        also for ``handshake_timeout``.
    :ivar sender: publishes commands.
    :ivar cache: the external cache, on the publishing connection.
    """

    def __init__(
        self,
        reactor: IReactorCore,
        options: RedisOptions,
        server_name: str,
        command_handler: ConnectionHandler,
        observer: ReplicationObserver,
        on_lost: Callable[[int], None],
        channels: Sequence[str] = (),
        *,
        extension: ReplicationExtension | None = None,
        publisher: PublisherName | None = None,
        ping_interval: float = 30.0,
        reply_timeout: float = 30.0,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        # This method is long, because it wires all parts of the link together.
        self._reactor = as_reactor(reactor)
        common: dict[str, Any] = {
            **options.for_factory(),
            "replyTimeout": reply_timeout,
            "clock": self._reactor,
            "observer": observer,
            "ping_interval": ping_interval,
            "handshake_timeout": handshake_timeout,
            "jitter": jitter,
        }
        self.sender = RedisSender(
            self._reactor,
            observer,
            on_lost,
            on_connected=extension.sending_resumed if extension else None,
        )
        self._outbound = SenderFactory(
            **common, sender=self.sender, publisher=publisher
        )
        self._inbound = SubscriberFactory(
            **common,
            server_name=server_name,
            channels=channels,
            command_handler=command_handler,
            sender=self.sender,
            extension=extension,
        )
        self.cache = ExternalCache(self._outbound, self._reactor, observer)
        self._master = RedisMaster(self._reactor, options, observer)

    def start(self) -> None:
        """Open both connections. They reconnect until :meth:`stop`.

        :raises OSError: if a file of the TLS options cannot be read.
        :raises ValueError: if a file of the TLS options does not contain the expected
            PEM data.
        """
        for factory in (self._outbound, self._inbound):
            self._master.connect(factory)

    def buffers(self) -> list[ConnectionBuffers]:
        """Return the fill levels of each open connection's buffers."""
        found = []
        lines, size = self.sender.waiting
        for connection in self._outbound.connections:
            buffers = read_buffers(connection.transport)
            found.append(
                ConnectionBuffers(
                    SENDER_NAME,
                    lines,
                    size + buffers.send,
                    buffers.kernel_send,
                    buffers.kernel_read,
                )
            )
        for connection in self._inbound.connections:
            buffers = read_buffers(connection.transport)
            found.append(ConnectionBuffers("redis", 0, *attrs.astuple(buffers)))
        return found

    async def stop(self) -> None:
        """Wait until published commands are acknowledged, then close both connections.

        Return when both are closed, after a few seconds at most.
        """
        drained = self.sender.drained()
        drained.addTimeout(STOP_TIMEOUT, self._reactor)
        # Closing a socket with unread replies resets the connection, and Redis might
        # not read the last commands.
        with contextlib.suppress(TimeoutError):
            await drained
        # Close both concurrently.
        closing = [
            factory.close(STOP_TIMEOUT) for factory in (self._inbound, self._outbound)
        ]
        self._master.stop()
        for closed in closing:
            await closed
