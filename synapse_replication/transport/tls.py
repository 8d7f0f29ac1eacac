"""TLS between processes: contexts from PEM files, and what its errors mean.

Whoever is connected to is always verified: by an authority, and by its name. Whoever
connects is, if it is asked for a certificate.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from OpenSSL import SSL, crypto
from service_identity import VerificationError
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

from synapse_replication.transport.failures import one_line

__all__ = ["client_context", "explain", "server_context"]

_log = Logger()

_PEM_CERTIFICATE = re.compile(
    rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL
)

#: What the end of OpenSSL's words means, and what to do.
_MEANINGS = {
    "certificate verify failed": "the certificate of the other end is of no authority "
    "that is trusted here, or has expired",
    "peer did not return a certificate": "the other end connected without a "
    "certificate; give it one",
    "alert certificate required": "the other end asks for a certificate; give this "
    "process one",
    "alert unknown ca": "the other end does not trust the authority of the "
    "certificate that it was shown",
    "alert bad certificate": "the other end refuses the certificate that it was shown",
    "alert handshake failure": "the other end refuses, perhaps for want of a "
    "certificate",
    "alert certificate expired": "the certificate that the other end was shown has "
    "expired",
    "wrong version number": "the other end does not speak TLS",
    "http request": "the other end speaks HTTP without TLS",
    "unexpected eof while reading": "the other end hung up during TLS",
}


def client_context(
    hostname: str,
    *,
    authority_file: Path | None = None,
    certificate_file: Path | None = None,
    private_key_file: Path | None = None,
) -> Any:
    """Make what connects to a server and verifies it.

    Files are read for each connection.

    :param hostname: the name, or the address, that its certificate must have.
    :param authority_file: PEM certificates that are trusted, or a folder of such
        files; the system's if ``None``.
    :param certificate_file: shown if the server asks for it, with those between it
        and its authority behind it.
    :param private_key_file: its key; ``None`` if that is in the same file.
    :raises OSError: if a file cannot be read.
    :raises ValueError: if a file does not hold what it should.
    """
    return _ReadAnew(
        partial(
            _read_context, hostname, authority_file, certificate_file, private_key_file
        )
    )


@implementer(IOpenSSLClientConnectionCreator)
class _ReadAnew:
    """Makes each connection of files as they are then: certificates are renewed.

    While they do not fit together those of before serve on, and that is logged.

    :param read: makes a context; it must work the first time.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._latest = read()

    def clientConnectionForTLS(self, tlsProtocol: Any) -> SSL.Connection:
        """Make the TLS side of one connection; Twisted's name."""
        try:
            self._latest = self._read()
        except (OSError, ValueError) as error:
            _log.warn(
                "A TLS connection is made with the files of before: {error}",
                error=error,
            )
        connection: SSL.Connection = self._latest.clientConnectionForTLS(tlsProtocol)
        return connection


def _read_context(
    hostname: str,
    authority_file: Path | None,
    certificate_file: Path | None,
    private_key_file: Path | None,
) -> Any:
    authority = own = None
    extra: dict[str, Any] = {}
    if authority_file is not None:
        authority = trustRootFromCertificates(  # type: ignore[no-untyped-call]
            _read_certificates(authority_file)
        )
    if certificate_file is not None:
        own, chain = _read_own(certificate_file, private_key_file)
        if chain:
            extra["extraCertChain"] = chain
    return optionsForClientTLS(
        hostname,
        trustRoot=authority,
        clientCertificate=own,
        extraCertificateOptions=extra,
    )


def server_context(
    certificate_file: Path,
    private_key_file: Path | None = None,
    *,
    client_authority_file: Path | None = None,
) -> CertificateOptions:
    """Make what serves, and lets in whom it should.

    :param certificate_file: its certificate, with those between it and its authority
        behind it.
    :param private_key_file: its key; ``None`` if that is in the same file.
    :param client_authority_file: clients need a certificate of one of these
        authorities (a file, or a folder of files); ``None`` to ask for none.
    :raises OSError: if a file cannot be read.
    :raises ValueError: if a file does not hold what it should.
    """
    own, chain = _read_own(certificate_file, private_key_file)
    authority = None
    if client_authority_file is not None:
        authority = trustRootFromCertificates(  # type: ignore[no-untyped-call]
            _read_certificates(client_authority_file)
        )
    return CertificateOptions(
        privateKey=own.privateKey.original,
        certificate=own.original,
        extraCertChain=chain or None,
        trustRoot=authority,
    )


def explain(error: BaseException) -> str:
    """Say in words what an error of a connection is, and what to do if it is TLS's."""
    if isinstance(error, VerificationError):
        wanted = ", ".join(_show(e.mismatched_id) for e in error.errors)
        return (
            f"TLS: the certificate of the other end is not for {wanted}; connect by a "
            "name that it has"
        )
    if not isinstance(error, SSL.Error):
        return one_line(error)
    words = _words(error)
    for end, meaning in _MEANINGS.items():
        if words.endswith(end):
            return f"TLS: {words}: {meaning}"
    return f"TLS: {words or one_line(error)}"


def _show(wanted: Any) -> str:
    name = getattr(wanted, "hostname", None) or getattr(wanted, "ip", "that name")
    return name.decode() if isinstance(name, bytes) else str(name)


def _words(error: BaseException) -> str:
    """Take the words out of the list that OpenSSL's errors hold."""
    if error.args and isinstance(error.args[0], list):
        return "; ".join(str(entry[-1]) for entry in error.args[0])
    return ", ".join(str(part) for part in error.args)


def _read_pems(place: Path) -> list[bytes]:
    files = [place]
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.is_file())
    found = _PEM_CERTIFICATE.findall(b"\n".join(file.read_bytes() for file in files))
    if not found:
        raise ValueError(f"{place} holds no PEM certificate")
    return found


def _read_certificates(place: Path) -> list[Certificate]:
    try:
        return [Certificate.loadPEM(pem) for pem in _read_pems(place)]
    except crypto.Error as error:
        raise ValueError(
            f"{place} holds a certificate that cannot be read: {_words(error)}"
        ) from error


def _read_own(
    certificate_file: Path, private_key_file: Path | None
) -> tuple[Any, list[Any]]:
    first, *others = _read_certificates(certificate_file)
    key_file = private_key_file or certificate_file
    key = key_file.read_bytes()
    try:
        pair = PrivateCertificate.loadPEM(first.dumpPEM() + b"\n" + key)  # type: ignore[no-untyped-call]
    except (crypto.Error, VerifyError) as error:
        raise _no_pair(certificate_file, private_key_file, error) from error
    return pair, [other.original for other in others]


def _no_pair(certificate: Path, key: Path | None, error: BaseException) -> ValueError:
    return ValueError(
        f"{key or certificate} does not hold the private key of {certificate}: "
        f"{_words(error)}"
    )
