"""TLS between processes: trusted authorities, certificates and keys in PEM files.

A client always verifies the server's certificate: its authority and its name. A server
verifies clients if it is configured to require certificates.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from OpenSSL import SSL, crypto
from twisted.internet import ssl
from twisted.internet.error import VerifyError
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.logger import Logger
from zope.interface import implementer

from synapse_replication.options import option
from synapse_replication.transport.error_text import messages

_log = Logger()

_PEM_CERTIFICATE = re.compile(
    rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL
)


def _path(name: str | Path | None) -> Path | None:
    return None if name is None else Path(name)


@attrs.frozen
class TlsConfig:
    """The files for TLS, by purpose. An authority file may also be a folder.

    The file of a certificate also contains its intermediate certificates.

    :ivar ca_file: PEM file, or folder, of the authorities that verify the instances to
        which this process connects (``instance_map`` with ``tls``, and
        ``tls:HOST:PORT``); by default, the authorities of the system.
    :ivar certificate_file: certificate (PEM) that this process presents: to servers
        that request one, and, if the configuration files set it, at its listeners, in
        place of ``tls_certificate_path``.
    :ivar private_key_file: private key (PEM) of ``certificate_file``. In Python,
        ``None`` if the certificate's file contains it.
    :ivar listener_certificate_file: the server certificate of this process's listeners.
    :ivar listener_private_key_file: the private key of ``listener_certificate_file``;
        ``None`` if the certificate's file contains it.
    :ivar client_ca_file: PEM file, or folder, of authorities. If set, listeners with
        ``tls`` accept only clients whose certificate one of these authorities has
        issued.
    """

    ca_file: Path | None = attrs.field(default=None, converter=_path, metadata=option())
    certificate_file: Path | None = attrs.field(
        default=None, converter=_path, metadata=option()
    )
    private_key_file: Path | None = attrs.field(
        default=None, converter=_path, metadata=option()
    )
    listener_certificate_file: Path | None = attrs.field(default=None, converter=_path)
    listener_private_key_file: Path | None = attrs.field(default=None, converter=_path)
    client_ca_file: Path | None = attrs.field(
        default=None, converter=_path, metadata=option()
    )

    def for_connecting(self, hostname: str) -> Any:
        """Return a connection creator for TLS that verifies a host's certificate.

        The files are read at this call, and again for each connection.

        :raises OSError: if a file cannot be read.
        :raises ValueError: if the content of a file is invalid.
        """

        def read() -> Any:
            own, extra = None, {}
            if self.certificate_file is not None:
                own, chain = _read_own(self.certificate_file, self.private_key_file)
                extra = {"extraCertChain": chain} if chain else {}
            return ssl.optionsForClientTLS(
                hostname,
                trustRoot=_read_authority(self.ca_file),
                clientCertificate=own,
                extraCertificateOptions=extra,
            )

        return _ReloadingCreator(read)

    def for_listening(self) -> ssl.CertificateOptions:
        """Return the TLS options of the listeners. The files are read at this call.

        :raises OSError: if a file cannot be read.
        :raises ValueError: if the content of a file is invalid, or no certificate is
            configured.
        """
        if self.listener_certificate_file is None:
            raise ValueError("there is no certificate")
        own, chain = _read_own(
            self.listener_certificate_file, self.listener_private_key_file
        )
        return ssl.CertificateOptions(
            privateKey=own.privateKey.original,
            certificate=own.original,
            extraCertChain=chain or None,
            trustRoot=_read_authority(self.client_ca_file),
        )


@implementer(IOpenSSLClientConnectionCreator)
class _ReloadingCreator:
    """Connection creator that reads the files for each connection.

    Renewed certificates therefore take effect without a restart. While the files cannot
    be loaded, for instance because the certificate was replaced before its key, the
    previous context remains in use and a warning is logged for each connection.

    :param read: returns a new context. The constructor calls it and does not catch its
        errors.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._latest = read()

    def clientConnectionForTLS(self, tlsProtocol: Any) -> SSL.Connection:
        """Create the TLS side of one connection. Called by Twisted."""
        try:
            self._latest = self._read()
        except (OSError, ValueError) as error:
            _log.warn(
                "A TLS connection uses the certificates that were loaded earlier, "
                "because the files cannot be loaded: {error}",
                error=error,
            )
        connection: SSL.Connection = self._latest.clientConnectionForTLS(tlsProtocol)
        return connection


def _read_certificates(path: Path) -> list[ssl.Certificate]:
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
    found = _PEM_CERTIFICATE.findall(b"\n".join(file.read_bytes() for file in files))
    if not found:
        raise ValueError(f"{path} contains no PEM certificate")
    try:
        return [ssl.Certificate.loadPEM(pem) for pem in found]
    except crypto.Error as error:
        raise ValueError(
            f"{path} contains a certificate that cannot be parsed: {messages(error)}"
        ) from error


def _read_authority(path: Path | None) -> Any:
    if path is None:
        return None
    return ssl.trustRootFromCertificates(_read_certificates(path))  # type: ignore[no-untyped-call]


def _read_own(
    certificate_file: Path, private_key_file: Path | None
) -> tuple[Any, list[Any]]:
    first, *others = _read_certificates(certificate_file)
    key_file = private_key_file or certificate_file
    key = key_file.read_bytes()
    try:
        pair = ssl.PrivateCertificate.loadPEM(first.dumpPEM() + b"\n" + key)  # type: ignore[no-untyped-call]
    except (crypto.Error, VerifyError) as error:
        raise ValueError(
            f"{key_file} does not contain the private key of {certificate_file}: "
            f"{messages(error)}"
        ) from error
    return pair, [other.original for other in others]
