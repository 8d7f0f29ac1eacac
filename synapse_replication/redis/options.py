"""Where Redis is and how to get in: the same for all connections of a process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeAlias

import attrs
from twisted.internet.interfaces import IConnector
from twisted.internet.protocol import ClientFactory
from twisted.internet.ssl import (
    Certificate,
    PrivateCertificate,
    optionsForClientTLS,
    trustRootFromCertificates,
)

__all__ = ["Place", "RedisOptions", "RedisTlsOptions", "SentinelOptions"]

Place: TypeAlias = tuple[str, int]
"""A host and a port."""

_PEM_CERTIFICATE = re.compile(
    rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL
)


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

        :raises OSError: a file cannot be read.
        :raises ValueError: a file holds no certificate.
        """
        authority = client = None
        if self.authority_file is not None:
            files = [self.authority_file]
            if self.authority_file.is_dir():
                files = sorted(f for f in self.authority_file.iterdir() if f.is_file())
            pems = b"\n".join(file.read_bytes() for file in files)
            found = _PEM_CERTIFICATE.findall(pems)
            if not found:
                raise ValueError(f"{self.authority_file} holds no PEM certificate")
            authority = trustRootFromCertificates(  # type: ignore[no-untyped-call]
                [Certificate.loadPEM(pem) for pem in found]
            )
        if self.certificate_file is not None:
            pem = self.certificate_file.read_bytes()
            if self.private_key_file is not None:
                pem += b"\n" + self.private_key_file.read_bytes()
            client = PrivateCertificate.loadPEM(pem)  # type: ignore[no-untyped-call]
        return optionsForClientTLS(
            self.hostname or host, trustRoot=authority, clientCertificate=client
        )


@attrs.frozen
class SentinelOptions:
    """How to ask Sentinels where Redis is; see ``redis/sentinel.py``.

    :ivar master: the name under which they watch it.
    :ivar places: where they are, at least one.
    :ivar username: theirs, as the password; those of Redis are others.
    """

    master: str
    places: tuple[Place, ...]
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
