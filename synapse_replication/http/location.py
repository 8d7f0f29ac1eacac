"""The address at which an instance serves HTTP replication."""

from __future__ import annotations

from msgspec import Struct


class InstanceLocation(Struct, frozen=True):
    """The address at which an instance serves HTTP replication.

    :ivar host: host name or IP address; ``None`` for a Unix socket.
    :ivar port: port; ``None`` for a Unix socket.
    :ivar tls: whether to connect over TLS.
    :ivar path: path of a Unix socket; ``None`` if host and port are set.
    """

    host: str | None = None
    port: int | None = None
    tls: bool = False
    path: str | None = None
