"""``synapse.replication.tcp.redis`` on our connections to Redis.

Theory of operation: the host asks for one outbound connection, for publishing and
for its cache, and gives it to the factory of the subscription. Both are ours when
this part is replaced; what the subscription sends then goes through the outbound
connection's sender, pipelined, and the extension's channel is subscribed to, if the
command handler is ours as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import txredisapi

from synapse_replication.dropin.bridges import as_connection_handler, installed
from synapse_replication.dropin.extension import extension_of
from synapse_replication.dropin.observer import observer_of
from synapse_replication.redis.sender import RedisSender
from synapse_replication.redis.sender_protocol import SenderFactory
from synapse_replication.redis.subscriber import SubscriberFactory

__all__ = [
    "RedisDirectTcpReplicationClientFactory",
    "SynapseRedisFactory",
    "close",
    "lazyConnection",
    "lazyUnixConnection",
]

#: How long a connection may take to be made, in s.
_CONNECT_TIMEOUT = 30.0


class SynapseRedisFactory(SenderFactory):
    """Keeps the outbound connections up."""

    def __init__(
        self,
        hs: Any,
        uuid: str,
        dbid: int | None,
        poolsize: int,
        isLazy: bool = False,
        handler: type = txredisapi.ConnectionHandler,
        charset: str = "utf-8",
        username: str | None = None,
        password: str | None = None,
        replyTimeout: float = 30.0,
        convertNumbers: bool = True,
    ) -> None:
        reactor, observer = hs.get_reactor(), observer_of(hs)

        def announce(lost: int) -> None:
            hs.get_replication_command_handler().send_positions_to_connection()

        def greet() -> None:
            extension = extension_of(hs.get_replication_command_handler())
            if extension is not None:
                extension.sending_resumed()

        super().__init__(
            uuid=uuid,
            dbid=dbid,
            poolsize=poolsize,
            isLazy=isLazy,
            handler=handler,
            charset=charset,
            password=password,
            replyTimeout=replyTimeout,
            convertNumbers=convertNumbers,
            username=username,
            clock=reactor,
            observer=observer,
            name="redis_out",
            sender=RedisSender(
                reactor, observer, "redis_out", announce, on_connected=greet
            ),
        )


class RedisDirectTcpReplicationClientFactory(SubscriberFactory):
    """Keeps the subscription up.

    :param outbound_redis_connection: what is sent goes out here.
    :param channel_names: more channels, by what follows ``<server_name>/``.
    """

    def __init__(
        self,
        hs: Any,
        outbound_redis_connection: Any,
        channel_names: Sequence[str],
    ) -> None:
        config, observer = hs.config.redis, observer_of(hs)
        handler = hs.get_replication_command_handler()
        sender = _sender_of(outbound_redis_connection)
        super().__init__(
            uuid="subscriber",
            dbid=None,
            poolsize=1,
            charset=None,
            password=config.redis_password,
            username=getattr(config, "redis_username", None),
            replyTimeout=30.0,
            clock=hs.get_reactor(),
            observer=observer,
            name="redis",
            server_name=hs.hostname,
            channels=channel_names,
            command_handler=as_connection_handler(
                handler, hs.run_as_background_process, observer
            ),
            sender=sender,
            # Its messages and ours must go the same way, in order.
            extension=(
                extension_of(handler) if isinstance(sender, RedisSender) else None
            ),
        )


class _ForeignSender:
    """Publishes on a connection that was not made by us, one line at a time."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    is_behind = False

    def call_when_ready(self, callback: Callable[[], object]) -> None:
        """Do nothing: it never is behind."""

    def publish(self, command_name: str, channel: str, lines: Sequence[bytes]) -> None:
        """Publish lines; what becomes of them is the connection's affair."""
        for line in lines:
            self._connection.publish(channel, line.decode())


def _sender_of(connection: Any) -> Any:
    factory = inspect.getattr_static(connection, "_factory", None)
    if isinstance(factory, SenderFactory):
        return factory.sender
    return _ForeignSender(connection)


def lazyConnection(
    hs: Any,
    host: str = "localhost",
    port: int = 6379,
    dbid: int | None = None,
    reconnect: bool = True,
    username: str | None = None,
    password: str | None = None,
    replyTimeout: float = 30.0,
) -> Any:
    """Open an outbound connection; it is there at once, and is used when it is up."""
    factory = _outbound(
        hs, f"{host}:{port}", dbid, reconnect, username, password, replyTimeout
    )
    reactor = hs.get_reactor()
    if hs.config.redis.redis_use_tls:
        context = installed("context", "ClientContextFactory")(hs.config.redis)
        reactor.connectSSL(
            host, port, factory, context, timeout=_CONNECT_TIMEOUT, bindAddress=None
        )
    else:
        reactor.connectTCP(
            host, port, factory, timeout=_CONNECT_TIMEOUT, bindAddress=None
        )
    return factory.handler


def lazyUnixConnection(
    hs: Any,
    path: str = "/tmp/redis.sock",
    dbid: int | None = None,
    reconnect: bool = True,
    username: str | None = None,
    password: str | None = None,
    replyTimeout: float = 30.0,
) -> Any:
    """Open an outbound connection by a Unix socket."""
    factory = _outbound(hs, path, dbid, reconnect, username, password, replyTimeout)
    hs.get_reactor().connectUNIX(path, factory, timeout=_CONNECT_TIMEOUT)
    return factory.handler


def _outbound(
    hs: Any,
    uuid: str,
    dbid: int | None,
    reconnect: bool,
    username: str | None,
    password: str | None,
    reply_timeout: float,
) -> SynapseRedisFactory:
    factory: SynapseRedisFactory = installed("redis", "SynapseRedisFactory")(
        hs,
        uuid=uuid,
        dbid=dbid,
        poolsize=1,
        isLazy=True,
        username=username,
        password=password,
        replyTimeout=reply_timeout,
        convertNumbers=False,
    )
    if not reconnect:
        factory.stopTrying()
    # For a host that ends without having started replication.
    hs.register_sync_shutdown_handler(
        phase="during", eventType="shutdown", shutdown_func=partial(close, factory)
    )
    return factory


def close(factory: Any) -> None:
    """Write what was said on a factory's connections, close them, make no more."""
    if isinstance(factory, SenderFactory):
        factory.sender.flush()
    factory.stopTrying()
    if factory.connector is not None:
        factory.connector.disconnect()
