"""Where Redis is and how to get in: the same for all connections of a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import attrs
from twisted.internet.interfaces import IConnector
from twisted.internet.protocol import ClientFactory

from synapse_replication.transport.tls import client_context

__all__ = ["HostPort", "RedisOptions", "RedisTlsOptions", "SentinelOptions"]

HostPort: TypeAlias = tuple[str, int]
"""A host and a port."""


@attrs.frozen
class RedisTlsOptions:
    """How the connections are encrypted. The server is always verified.

    :ivar authority_file: PEM certificates that are trusted, or a folder of such
        files; the system's if ``None``.
    :ivar certificate_file: our own certificate, if Redis asks for one.
    :ivar private_key_file: its key.
    :ivar hostname: the name that the server's certificate has, if it is not the
        host that is connected to.
    """

    authority_file: Path | None = None
    certificate_file: Path | None = None
    private_key_file: Path | None = None
    hostname: str | None = None

    def context_factory(self, host: str) -> Any:
        """Read the files and make what ``connectSSL`` wants.

        :raises OSError: if a file cannot be read.
        :raises ValueError: if a file does not hold what it should.
        """
        return client_context(
            self.hostname or host,
            authority_file=self.authority_file,
            certificate_file=self.certificate_file,
            private_key_file=self.private_key_file,
        )


@attrs.frozen
class SentinelOptions:
    """How to ask Sentinels where Redis is; see ``redis/sentinel.py``.

    :ivar master: the name under which they watch it.
    :ivar places: where they are, at least one.
    :ivar username: theirs, as the password; those of Redis are others.
    """

    master: str
    places: tuple[HostPort, ...]
    username: str | None = None
    password: str | None = attrs.field(default=None, repr=False)


@attrs.frozen
class RedisOptions:
    """Where Redis is and how to get in.

    :ivar path: its Unix socket, in place of host and port.
    :ivar sentinel: who to ask instead of all that; TLS is for them, too.
    :ivar username: an ACL user; ``None`` for the default one.
    :ivar dbid: the database for the external cache; channels have none.
    """

    host: str = "localhost"
    port: int = 6379
    path: str | None = None
    password: str | None = attrs.field(default=None, repr=False)
    username: str | None = None
    dbid: int | None = None
    tls: RedisTlsOptions | None = None
    sentinel: SentinelOptions | None = None

    @property
    def address(self) -> str:
        """Say where it is, for messages."""
        if self.sentinel is not None:
            return f"Sentinel's {self.sentinel.master}"
        if self.path is not None:
            return self.path
        return f"{self.host}:{self.port}" + (" (TLS)" if self.tls else "")

    def connect(
        self, reactor: Any, factory: ClientFactory, timeout: float
    ) -> IConnector:
        """Open one connection.

        :param reactor: offers ``connectTCP``, ``connectSSL`` or ``connectUNIX``,
            whichever is wanted.
        :param timeout: for the connection to be made, in s.
        """
        if self.path is not None:
            connector = reactor.connectUNIX(self.path, factory, timeout=timeout)
        elif self.tls is not None:
            context_factory = self.tls.context_factory(self.host)
            connector = reactor.connectSSL(
                self.host, self.port, factory, context_factory, timeout=timeout
            )
        else:
            connector = reactor.connectTCP(
                self.host, self.port, factory, timeout=timeout
            )
        opened: IConnector = connector
        return opened
