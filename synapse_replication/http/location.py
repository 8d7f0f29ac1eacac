"""The address at which an instance serves HTTP replication."""

from __future__ import annotations

from typing import Final

import attrs

from synapse_replication.options import InvalidValueError, option
from synapse_replication.transport.host_names import (
    checked_host,
    checked_socket_path,
    host_port,
)

#: The metadata of an option that is a port number.
PORT: Final = option(
    minimum=1, maximum=65535, hint="write a port number from 1 to 65535"
)


@attrs.frozen
class InstanceLocation:
    """The address at which an instance serves HTTP replication.

    :ivar host: host of the instance: a name, or an IP address.
    :ivar port: port of its HTTP listener for ``replication``.
    :ivar tls: connect with TLS.
    :ivar path: Unix socket, instead of ``host`` and ``port``.
    :raises InvalidValueError: if it has no address, an invalid one, or two.
    """

    host: str | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(checked_host),
        metadata=option(check=checked_host),
    )
    port: int | None = attrs.field(default=None, metadata=PORT)
    tls: bool = False
    path: str | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(checked_socket_path),
        metadata=option(check=checked_socket_path),
    )

    @property
    def text(self) -> str:
        """The address as text: a host and port, or a path."""
        return self.path or host_port(self.host or "", self.port)

    def __attrs_post_init__(self) -> None:
        if self.path is None and (self.host is None or self.port is None):
            raise InvalidValueError(
                "the address of the process is missing",
                "write host and port, or path (of a Unix socket)",
            )
        if self.path is not None and (self.host or self.port):
            raise InvalidValueError(
                "it has both a path and a host or port",
                "write either path, or host and port",
            )
