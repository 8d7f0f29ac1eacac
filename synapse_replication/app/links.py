"""The links that a process opens: to Redis, or to direct TCP listeners."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from synapse_replication.app.stop_steps import StopSteps
from synapse_replication.config.redis import explained_redis_files
from synapse_replication.config.replication_options import ReplicationOptions
from synapse_replication.transport.reactor import IReactor

if TYPE_CHECKING:
    from synapse_replication.tcp.factory import DirectTcpReplicationClientFactory


class RedisLink(Protocol):
    """A link over Redis, passive or not."""

    def start(self) -> None:
        """Connect, and reconnect until :meth:`stop`.

        :raises OSError: if a file of the TLS options cannot be read.
        :raises ValueError: if a file of the TLS options does not contain the expected
            PEM data.
        """

    def stop(self) -> Awaitable[None]:
        """Close the connections; return an awaitable that waits until they are."""


def connect_redis(
    link: RedisLink, options: ReplicationOptions, stops: StopSteps
) -> None:
    """Start a link over Redis, and close it when the process stops.

    :raises ConfigError: if a file of the TLS options cannot be used.
    """
    with explained_redis_files(options):
        link.start()
    stops.add("closing the Redis connections", link.stop)


def connect_direct_tcp(
    make_client: Callable[[], DirectTcpReplicationClientFactory],
    reactor: IReactor,
    options: ReplicationOptions,
    stops: StopSteps,
) -> None:
    """Connect to all direct TCP listeners of the options, until the process stops.

    :param make_client: returns the factory of one connection.
    :raises ConfigError: if an endpoint cannot be used.
    """
    # Importing Twisted's endpoints takes 0.3 MiB.
    from synapse_replication.config.endpoints import client_endpoint

    for description in options.tcp_connect:
        endpoint = client_endpoint(reactor, description, options)
        client = make_client()
        client.connect(endpoint, description)
        stops.add("closing the direct TCP connection", client.stop)
