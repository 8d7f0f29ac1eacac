"""TLS between processes: trusted authorities, certificates and private keys.

Listeners use Synapse's keys ``tls_certificate_path`` and ``tls_private_key_path``,
unless ``synapse_replication.tls`` overrides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from msgspec.structs import asdict

from synapse_replication.config.models import SharedFile
from synapse_replication.config.yaml_files import OWN_SECTION, KeyPath, MergedFiles
from synapse_replication.transport.tls import client_context, server_context


def _path(name: str | Path | None) -> Path | None:
    return None if name is None else Path(name)


@attrs.frozen
class TlsConfig:
    """The files for TLS, by purpose. An authority file may also be a folder.

    :ivar ca_file: the authorities that verify the servers to which this process
        connects; those of the system if ``None``.
    :ivar certificate_file: the client certificate of this process, if it has one.
    :ivar private_key_file: the private key of ``certificate_file``; ``None`` if the
        certificate's file contains it.
    :ivar listener_certificate_file: the server certificate of this process's listeners.
    :ivar listener_private_key_file: the private key of ``listener_certificate_file``;
        ``None`` if the certificate's file contains it.
    :ivar client_ca_file: the authorities that verify clients of the listeners; ``None``
        if clients need no certificate.
    """

    ca_file: Path | None = attrs.field(default=None, converter=_path)
    certificate_file: Path | None = attrs.field(default=None, converter=_path)
    private_key_file: Path | None = attrs.field(default=None, converter=_path)
    listener_certificate_file: Path | None = attrs.field(default=None, converter=_path)
    listener_private_key_file: Path | None = attrs.field(default=None, converter=_path)
    client_ca_file: Path | None = attrs.field(default=None, converter=_path)

    def for_connecting(self, hostname: str) -> Any:
        """Return a connection creator for TLS that verifies a host's certificate.

        The files are read at this call, and again for each connection.

        :raises OSError: if a file cannot be read.
        :raises ValueError: if the content of a file is invalid.
        """
        return client_context(
            hostname,
            ca_file=self.ca_file,
            certificate_file=self.certificate_file,
            private_key_file=self.private_key_file,
        )

    def for_listening(self) -> Any:
        """Return the TLS options of the listeners. The files are read at this call.

        :raises OSError: if a file cannot be read.
        :raises ValueError: if the content of a file is invalid, or no certificate is
            configured.
        """
        if self.listener_certificate_file is None:
            raise ValueError("there is no certificate")
        return server_context(
            self.listener_certificate_file,
            self.listener_private_key_file,
            client_ca_file=self.client_ca_file,
        )


def read_tls(
    shared: SharedFile, merged: MergedFiles, listeners: Sequence[KeyPath]
) -> TlsConfig:
    """Return the files for TLS, and check that they can be used.

    The files for connecting are always checked. The files of the listeners are checked
    only if those for connecting are valid and a listener uses TLS.

    :param listeners: the key paths of ``tls: true`` in this process's listeners.
    """
    own = shared.synapse_replication.tls
    pair: tuple[str | None, str | None] = (own.certificate_file, own.private_key_file)
    if pair == (None, None):
        pair = (shared.tls_certificate_path, shared.tls_private_key_path)
    config = TlsConfig(
        **asdict(own),
        listener_certificate_file=pair[0],
        listener_private_key_file=pair[1],
    )
    try:
        config.for_connecting("localhost")
    except (OSError, ValueError) as error:
        merged.report(
            (OWN_SECTION, "tls"), str(error), "name PEM files that can be read"
        )
        return config
    for path in listeners:
        try:
            config.for_listening()
        except (OSError, ValueError) as error:
            merged.report(
                path,
                f"this listener cannot use TLS: {error}",
                "write tls_certificate_path and tls_private_key_path, or "
                f"{OWN_SECTION}.tls.certificate_file and private_key_file",
            )
    return config
