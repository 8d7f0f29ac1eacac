"""Options of the connections to Redis: address, credentials and TLS.

See docs/failure-modes.rst: failure-redis-options.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, TypeAlias

import attrs
from twisted.internet.interfaces import IConnector
from twisted.internet.protocol import ClientFactory

from synapse_replication.transport.host_names import (
    checked_host,
    checked_socket_path,
    host_port,
)
from synapse_replication.transport.reactor import IReactor
from synapse_replication.transport.resolving import connect_to_host
from synapse_replication.transport.tls import TlsConfig

#: The default time limit of connecting, in s.
CONNECT_TIMEOUT = 10.0

#: A host and a port.
HostPort: TypeAlias = tuple[str, int]


@attrs.frozen
class RedisTlsOptions:
    """TLS options. The server's certificate is always verified.

    :ivar authority_file: a file of trusted PEM certificates, or a directory of such
        files; ``None`` to trust the system's certificates.
    :ivar certificate_file: this process's certificate, if Redis requires one.
    :ivar private_key_file: the certificate's private key; ``None`` if it is in the
        same file.
    :ivar hostname: the name in the server's certificate, if it differs from the host
        to connect to.
    """

    authority_file: Path | None = None
    certificate_file: Path | None = None
    private_key_file: Path | None = None
    hostname: str | None = None

    def context_factory(self, host: str) -> Any:
        """Read the files and return the context factory for ``connectSSL``.

        :raises OSError: if a file cannot be read.
        :raises ValueError: if a file does not contain the expected PEM data.
        """
        files = TlsConfig(
            self.authority_file, self.certificate_file, self.private_key_file
        )
        return files.for_connecting(self.hostname or host)


@attrs.frozen
class SentinelOptions:
    """Options for finding Redis through Sentinels; see ``redis/sentinel.py``.

    :ivar master: the name under which the Sentinels monitor Redis.
    :ivar addresses: the Sentinels' addresses, at least one.
    :ivar username: the user at the Sentinels; ``None`` for the default user.
    :ivar password: the password at the Sentinels; that of Redis may differ.
    """

    master: str
    addresses: tuple[HostPort, ...]
    username: str | None = None
    password: str | None = attrs.field(default=None, repr=False)


@attrs.frozen
class RedisOptions:
    """Address, credentials and TLS of Redis. All connections of a process share them.

    :ivar path: the path of Redis's Unix socket, which replaces host and port.
    :ivar sentinel: the Sentinels that know Redis's address; they replace host, port and
        path. The TLS options apply to connections to the Sentinels, too.
    :ivar username: an ACL user; ``None`` for the default user.
    :ivar dbid: the database of the external cache. Channels do not belong to a
        database.
    :raises InvalidValueError: if the host is neither a name nor an IP address, or if no
        socket can have the path.
    """

    host: str = attrs.field(default="localhost", converter=checked_host)
    port: int = 6379
    path: str | None = attrs.field(
        default=None, converter=attrs.converters.optional(checked_socket_path)
    )
    password: str | None = attrs.field(default=None, repr=False)
    username: str | None = None
    dbid: int | None = None
    tls: RedisTlsOptions | None = None
    sentinel: SentinelOptions | None = None

    @property
    def address(self) -> str:
        """The address, as text for display."""
        if self.sentinel is not None:
            return f"Sentinel's master {self.sentinel.master}"
        if self.path is not None:
            return self.path
        return host_port(self.host, self.port) + (" (TLS)" if self.tls else "")

    def for_factory(self) -> dict[str, Any]:
        """Return the arguments for txredisapi's factories."""
        return {
            "uuid": self.address,
            "dbid": self.dbid,
            "poolsize": 1,
            # Values are sent and received as bytes, numbers included.
            "charset": None,
            "convertNumbers": False,
            "password": self.password,
            "username": self.username,
        }

    def connect(
        self,
        reactor: IReactor,
        factory: ClientFactory,
        timeout: float = CONNECT_TIMEOUT,
    ) -> IConnector:
        """Open one connection to ``path``, or else to ``host`` and ``port``.

        ``sentinel`` is ignored.

        :param reactor: must have the method that the options require: ``connectTCP``,
            ``connectSSL`` or ``connectUNIX``.
        :param timeout: time limit of connecting, in s.
        :raises OSError: if a file of the TLS options cannot be read.
        :raises ValueError: if a file of the TLS options does not contain the expected
            PEM data.
        """
        if self.path is not None:
            connector: IConnector = reactor.connectUNIX(
                self.path, factory, timeout=timeout
            )
            return connector
        connect: Any = functools.partial(reactor.connectTCP, timeout=timeout)
        if self.tls is not None:
            context_factory = self.tls.context_factory(self.host)
            connect = functools.partial(
                reactor.connectSSL, contextFactory=context_factory, timeout=timeout
            )
        return connect_to_host(
            reactor,
            self.host,
            self.port,
            factory,
            lambda host, factory: connect(host, self.port, factory),
        )
