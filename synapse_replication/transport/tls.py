"""TLS between processes: contexts from PEM files.

A client always verifies the server's certificate: its authority and its name. A server
verifies clients if it is configured to require certificates.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from OpenSSL import SSL, crypto
from twisted.internet.error import VerifyError
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.internet.ssl import (
    Certificate,
    CertificateOptions,
    PrivateCertificate,
    optionsForClientTLS,
    trustRootFromCertificates,
)
from twisted.logger import Logger
from zope.interface import implementer

from synapse_replication.transport.tls_errors import messages

_log = Logger()

_PEM_CERTIFICATE = re.compile(
    rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL
)


def client_context(
    hostname: str,
    *,
    ca_file: Path | None = None,
    certificate_file: Path | None = None,
    private_key_file: Path | None = None,
) -> Any:
    """Return a connection creator that verifies the server.

    The files are read once by this function, and again for each connection.

    :param hostname: the name or address for which the server's certificate must be
        valid.
    :param ca_file: a file of trusted PEM certificates, or a directory of such
        files; ``None`` to trust the system's certificates.
    :param certificate_file: the certificate to present if the server requests one,
        followed by its intermediate certificates.
    :param private_key_file: the certificate's private key; ``None`` if it is in the
        same file.
    :raises OSError: if a file cannot be read.
    :raises ValueError: if a file does not contain the expected PEM data.
    """

    def read() -> Any:
        own, extra = None, {}
        if certificate_file is not None:
            own, chain = _read_own(certificate_file, private_key_file)
            extra = {"extraCertChain": chain} if chain else {}
        return optionsForClientTLS(
            hostname,
            trustRoot=_read_authority(ca_file),
            clientCertificate=own,
            extraCertificateOptions=extra,
        )

    return _ReloadingCreator(read)


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


def server_context(
    certificate_file: Path,
    private_key_file: Path | None = None,
    *,
    client_ca_file: Path | None = None,
) -> CertificateOptions:
    """Return the options of a TLS server.

    :param certificate_file: the server's certificate, followed by its intermediate
        certificates.
    :param private_key_file: the certificate's private key; ``None`` if it is in the
        same file.
    :param client_ca_file: a file, or a directory of files, with the PEM
        certificates of the authorities that may issue clients' certificates; ``None``
        to require no client certificates.
    :raises OSError: if a file cannot be read.
    :raises ValueError: if a file does not contain the expected PEM data.
    """
    own, chain = _read_own(certificate_file, private_key_file)
    return CertificateOptions(
        privateKey=own.privateKey.original,
        certificate=own.original,
        extraCertChain=chain or None,
        trustRoot=_read_authority(client_ca_file),
    )


def _read_pems(path: Path) -> list[bytes]:
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
    found = _PEM_CERTIFICATE.findall(b"\n".join(file.read_bytes() for file in files))
    if not found:
        raise ValueError(f"{path} contains no PEM certificate")
    return found


def _read_certificates(path: Path) -> list[Certificate]:
    try:
        return [Certificate.loadPEM(pem) for pem in _read_pems(path)]
    except crypto.Error as error:
        raise ValueError(
            f"{path} contains a certificate that cannot be parsed: {messages(error)}"
        ) from error


def _read_authority(path: Path | None) -> Any:
    if path is None:
        return None
    return trustRootFromCertificates(_read_certificates(path))  # type: ignore[no-untyped-call]


def _read_own(
    certificate_file: Path, private_key_file: Path | None
) -> tuple[Any, list[Any]]:
    first, *others = _read_certificates(certificate_file)
    key_file = private_key_file or certificate_file
    key = key_file.read_bytes()
    try:
        pair = PrivateCertificate.loadPEM(first.dumpPEM() + b"\n" + key)  # type: ignore[no-untyped-call]
    except (crypto.Error, VerifyError) as error:
        raise ValueError(
            f"{key_file} does not contain the private key of {certificate_file}: "
            f"{messages(error)}"
        ) from error
    return pair, [other.original for other in others]
