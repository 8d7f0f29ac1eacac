"""Parts of the configuration of a process.

The parts are listeners, limits, the addresses of instances, and functions that the user
provides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen
class InstanceLocation:
    """The address at which an instance serves HTTP replication."""

    host: str | None
    port: int | None
    tls: bool
    path: str | None


@attrs.frozen
class Listener:
    """A listener of this process.

    :ivar resources: which of ``replication``, ``health`` and ``metrics`` it serves;
        irrelevant for direct TCP.
    :ivar direct_tcp: whether it serves direct TCP instead of HTTP.
    :ivar tls: whether it uses TLS.
    """

    port: int | None
    path: str | None
    addresses: tuple[str, ...]
    resources: frozenset[str]
    direct_tcp: bool
    tls: bool = False


@attrs.frozen
class HttpConfig:
    """Limits of the HTTP listeners.

    :ivar allowed_hosts: host names for which the listeners answer requests, in
        addition to ``localhost``, the name of this machine, each listener's own
        addresses, and all IP addresses.
    :ivar max_connections: the maximum number of open connections of one listener.
    """

    allowed_hosts: tuple[str, ...] = ()
    max_connections: int = 500


@attrs.frozen
class ExtensionConfig:
    """The limits of the backlog of each stream.

    :ivar backlog_rows: the maximum number of rows in a backlog.
    :ivar backlog_bytes: the approximate maximum size of a backlog in memory, in bytes.
    """

    backlog_rows: int = 10_000
    backlog_bytes: int = 4 * 1024 * 1024


@attrs.frozen
class FactoryConfig:
    """A function that the user provides, and its configuration.

    :ivar module: the dotted name of the function.
    :ivar config: the mapping that is passed to the function.
    """

    module: str
    config: Mapping[str, Any] = attrs.field(repr=False)
