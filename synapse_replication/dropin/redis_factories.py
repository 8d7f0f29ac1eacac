"""Replacements for ``synapse.replication.tcp.redis``.

Theory of operation: the host opens one outbound connection, for publishing and for its
cache, and passes it to the factory of the subscription. If the part ``redis`` is
replaced, both connections come from this package, and the subscription sends its
commands through the outbound connection's sender, which pipelines the commands. If the
command handler is also replaced, and the extension is not disabled, the subscription
includes the extension's channel. The outbound connection ends those of a predecessor,
and is used only if the process still has its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import txredisapi
from twisted.internet.interfaces import IConnector
from txredisapi import RedisFactory

from synapse_replication.dropin.foreign import as_connection_handler
from synapse_replication.dropin.homeserver import Homeserver, RedisHandler
from synapse_replication.dropin.host_code import host_attribute
from synapse_replication.dropin.host_database import find_name_check
from synapse_replication.dropin.observer import observer_of
from synapse_replication.handlers.extension.extension import ReplicationExtension
from synapse_replication.redis.fencing import PublisherName
from synapse_replication.redis.sender import RedisSender
from synapse_replication.redis.sender_protocol import SenderFactory
from synapse_replication.redis.subscriber import CommandPublisher, SubscriberFactory
from synapse_replication.transport.resolving import connect_to_host

#: The timeout for connecting, in s.
_CONNECT_TIMEOUT = 30.0


class DropInRedisFactory(SenderFactory):
    """The reconnecting factory of outbound connections."""

    def __init__(
        self,
        hs: Homeserver,
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

        def resume_extension() -> None:
            extension = _extension_of(hs.get_replication_command_handler())
            if extension is not None:
                extension.sending_resumed()

        super().__init__(
            clock=reactor,
            observer=observer,
            sender=RedisSender(
                reactor,
                observer,
                announce,
                on_connected=resume_extension,
            ),
            publisher=PublisherName(
                observer,
                hs.hostname,
                hs.get_instance_name(),
                lambda: find_name_check(hs.get_datastores().main.db_pool),
            ),
            uuid=uuid,
            dbid=dbid,
            poolsize=poolsize,
            isLazy=isLazy,
            handler=handler,
            charset=charset,
            username=username,
            password=password,
            replyTimeout=replyTimeout,
            convertNumbers=convertNumbers,
        )


class RedisDirectTcpReplicationClientFactory(SubscriberFactory):
    """The reconnecting factory of the subscription.

    :param outbound_redis_connection: the connection on which commands are published.
    :param channel_names: the names of further channels, without ``<server_name>/``.
    """

    def __init__(
        self,
        hs: Homeserver,
        outbound_redis_connection: RedisHandler,
        channel_names: Sequence[str],
    ) -> None:
        config = hs.config.redis
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
            observer=observer_of(hs),
            server_name=hs.hostname,
            channels=channel_names,
            command_handler=as_connection_handler(hs, handler),
            sender=sender,
            # Extension messages and commands must use one connection, in order.
            extension=(
                _extension_of(handler) if isinstance(sender, RedisSender) else None
            ),
        )


def _extension_of(handler: object) -> ReplicationExtension | None:
    """Return the extension of a command handler; ``None`` if it has no extension."""
    extension = getattr(handler, "extension", None)
    return extension if isinstance(extension, ReplicationExtension) else None


class _ForeignSender:
    """Publishes on a connection of the host, one line at a time."""

    def __init__(self, connection: RedisHandler) -> None:
        self._connection = connection

    is_behind = False

    def call_when_ready(self, callback: Callable[[], object]) -> None:
        """Do nothing: this sender is never behind."""

    def publish(self, command_name: str, channel: str, lines: Sequence[bytes]) -> None:
        """Publish lines. Errors are not handled, and nothing is retried."""
        for line in lines:
            self._connection.publish(channel, line.decode())


def _sender_of(connection: RedisHandler) -> CommandPublisher:
    factory = inspect.getattr_static(connection, "_factory", None)
    if isinstance(factory, SenderFactory):
        return factory.sender
    return _ForeignSender(connection)


def lazyConnection(
    hs: Homeserver,
    host: str = "localhost",
    port: int = 6379,
    dbid: int | None = None,
    reconnect: bool = True,
    username: str | None = None,
    password: str | None = None,
    replyTimeout: float = 30.0,
) -> RedisHandler:
    """Begin to open an outbound connection, and return its handler immediately."""
    factory = _outbound(
        hs,
        f"{host}:{port}",
        dbid=dbid,
        reconnect=reconnect,
        username=username,
        password=password,
        replyTimeout=replyTimeout,
    )
    _connect_to_port(hs, host, port, factory)
    handler: RedisHandler = factory.handler
    return handler


def lazyUnixConnection(
    hs: Homeserver,
    path: str = "/tmp/redis.sock",
    dbid: int | None = None,
    reconnect: bool = True,
    username: str | None = None,
    password: str | None = None,
    replyTimeout: float = 30.0,
) -> RedisHandler:
    """Begin to connect to a Unix socket, and return the connection's handler."""
    factory = _outbound(
        hs,
        path,
        dbid=dbid,
        reconnect=reconnect,
        username=username,
        password=password,
        replyTimeout=replyTimeout,
    )
    hs.get_reactor().connectUNIX(path, factory, timeout=_CONNECT_TIMEOUT)
    handler: RedisHandler = factory.handler
    return handler


def connect_subscriber(
    hs: Homeserver, outbound: RedisHandler, channels: Sequence[str]
) -> RedisFactory:
    """Connect a factory that subscribes to channels, and return it.

    :param outbound: the connection for the commands that this process sends.
    """
    config = hs.config.redis
    factory: RedisFactory = host_attribute(
        "redis", "RedisDirectTcpReplicationClientFactory"
    )(hs, outbound, channel_names=list(channels))
    if config.redis_path is not None:
        hs.get_reactor().connectUNIX(
            config.redis_path, factory, timeout=_CONNECT_TIMEOUT
        )
    else:
        _connect_to_port(hs, config.redis_host, config.redis_port, factory)
    return factory


def _connect_to_port(
    hs: Homeserver, host: str, port: int, factory: RedisFactory
) -> None:
    reactor = hs.get_reactor()
    connect: Callable[..., IConnector] = partial(
        reactor.connectTCP, timeout=_CONNECT_TIMEOUT
    )
    if hs.config.redis.redis_use_tls:
        context = host_attribute("context", "ClientContextFactory")(hs.config.redis)
        connect = partial(
            reactor.connectSSL, contextFactory=context, timeout=_CONNECT_TIMEOUT
        )
    connect_to_host(
        reactor, host, port, factory, lambda host, made: connect(host, port, made)
    )


def _outbound(
    hs: Homeserver, uuid: str, *, reconnect: bool, **options: Any
) -> DropInRedisFactory:
    factory: DropInRedisFactory = host_attribute("redis", "SynapseRedisFactory")(
        hs, uuid=uuid, poolsize=1, isLazy=True, convertNumbers=False, **options
    )
    if not reconnect:
        factory.stopTrying()
    # Close the connection even if the host shuts down before it starts replication.
    hs.register_sync_shutdown_handler(
        phase="during", eventType="shutdown", shutdown_func=partial(close, factory)
    )
    return factory


def close(factory: RedisFactory) -> None:
    """Close a factory's connection, and stop the factory from reconnecting.

    The pending messages of an outbound connection are written first, if possible.
    """
    if isinstance(factory, SenderFactory):
        factory.sender.flush()
    factory.stopTrying()
    if factory.connector is not None:
        factory.connector.disconnect()
