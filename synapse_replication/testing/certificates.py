"""A private certificate authority and its certificates, as PEM files."""

from __future__ import annotations

import datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import attrs
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

#: A certificate is valid for this long before and after the time of its creation.
VALID = datetime.timedelta(hours=1)


@attrs.frozen
class PrivatePair:
    """The paths of a certificate and of its private key."""

    certificate: Path
    private_key: Path


class PrivateAuthority:
    """A certificate authority for tests.

    :param folder: the folder to which ``NAME.crt`` and ``NAME.key`` are written.
    :param name: the name of the authority.
    :param issuer: the authority that issues this authority's certificate; ``None`` to
        sign it with its own key.
    :ivar certificate: the path of the authority's own certificate.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "authority",
        issuer: PrivateAuthority | None = None,
    ) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        built = (issuer or self)._build(self._name, self._key, None)  # noqa: SLF001 -- of this class
        self.certificate = self._write(name, built, self._key).certificate

    def issue(self, name: str, host: str = "127.0.0.1") -> PrivatePair:
        """Issue a certificate with a new key, and write both to files.

        :param name: the subject, and the base name of the files.
        :param host: the host name or address for which the certificate is valid.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        return self._write(name, self._build(_name(name), key, host), key)

    def _build(self, subject: x509.Name, key: Any, host: str | None) -> Any:
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - VALID)
            .not_valid_after(now + VALID)
            .add_extension(
                x509.BasicConstraints(ca=host is None, path_length=None), critical=True
            )
        )
        if host is not None:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general_name(host)]), critical=False
            )
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name: str, certificate: Any, key: Any) -> PrivatePair:
        pair = PrivatePair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        pair.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
        pair.private_key.write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
        return pair


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
