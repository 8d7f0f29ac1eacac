"""TLS between processes: whom to trust, and what to show.

Listeners use the keys of Synapse, ``tls_certificate_path`` and
``tls_private_key_path``, unless ``synapse_replication.tls`` has others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from synapse_replication.config.files import OWN_SECTION, KeyPath, MergedFiles
from synapse_replication.config.models import SharedFile
from synapse_replication.errors import ConfigProblem
from synapse_replication.transport.tls import client_context, server_context

__all__ = ["TlsConfig", "read_tls"]


@attrs.frozen
class TlsConfig:
    """The files, by what they are for. Folders of authorities will do, too.

    :ivar ca_file: the authorities of those that this process connects to; those of
        the system if ``None``.
    :ivar certificate_file: what this process shows when it connects, if it is asked.
    :ivar listener_certificate_file: what its listeners show.
    :ivar client_ca_file: its listeners let in only who has a certificate of these
        authorities; everybody if ``None``.
    """

    ca_file: Path | None = None
    certificate_file: Path | None = None
    private_key_file: Path | None = None
    listener_certificate_file: Path | None = None
    listener_private_key_file: Path | None = None
    client_ca_file: Path | None = None

    def for_connecting(self, hostname: str) -> Any:
        """Make what connects to a process and verifies it. Files are read anew.

        :raises OSError: if a file cannot be read.
        :raises ValueError: if a file does not hold what it should.
        """
        return client_context(
            hostname,
            authority_file=self.ca_file,
            certificate_file=self.certificate_file,
            private_key_file=self.private_key_file,
        )

    def for_listening(self) -> Any:
        """Make what serves over TLS.

        :raises OSError: if a file cannot be read.
        :raises ValueError: if a file does not hold what it should, or there is none.
        """
        if self.listener_certificate_file is None:
            raise ValueError("there is no certificate")
        return server_context(
            self.listener_certificate_file,
            self.listener_private_key_file,
            client_authority_file=self.client_ca_file,
        )


def read_tls(
    shared: SharedFile,
    merged: MergedFiles,
    problems: list[ConfigProblem],
    listeners: Sequence[KeyPath],
) -> TlsConfig:
    """Put the files together, and see whether they can be used.

    :param problems: mistakes are put here.
    :param listeners: the paths of the ``tls: true`` of our listeners.
    """
    own = shared.synapse_replication.tls
    pair: tuple[str | None, str | None] = (own.certificate_file, own.private_key_file)
    if pair == (None, None):
        pair = (shared.tls_certificate_path, shared.tls_private_key_path)
    config = TlsConfig(
        ca_file=_path(own.ca_file),
        certificate_file=_path(own.certificate_file),
        private_key_file=_path(own.private_key_file),
        listener_certificate_file=_path(pair[0]),
        listener_private_key_file=_path(pair[1]),
        client_ca_file=_path(own.client_ca_file),
    )
    try:
        config.for_connecting("localhost")
    except (OSError, ValueError) as error:
        problems.append(
            merged.problem(
                (OWN_SECTION, "tls"), str(error), "name PEM files that can be read"
            )
        )
        return config
    for path in listeners:
        try:
            config.for_listening()
        except (OSError, ValueError) as error:
            problems.append(
                merged.problem(
                    path,
                    f"this listener cannot speak TLS: {error}",
                    "write tls_certificate_path and tls_private_key_path, or "
                    f"{OWN_SECTION}.tls.certificate_file and private_key_file",
                )
            )
    return config


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)
