"""The options of one process, which the configuration or the code of a service sets.

:class:`ReplicationOptions` can be created from plain arguments. The validated
configuration, :class:`~synapse_replication.config.process.ProcessConfig`, is a
subclass.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from synapse_replication.config.deployment import DatabaseConfig
from synapse_replication.config.own_section import TracingSection
from synapse_replication.config.tls import TlsConfig
from synapse_replication.errors import ConfigProblem
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.http.client import InstanceLocation
from synapse_replication.redis.options import RedisOptions
from synapse_replication.streams.backlog import BacklogOptions
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from synapse_replication.streams.table import TableStream
from synapse_replication.wire.pending import PendingLimit


@attrs.frozen
class Listener:
    """A listener of this process, on a port or on the path of a Unix socket.

    :ivar addresses: the addresses on which the port is open.
    :ivar resources: which of ``replication``, ``health`` and ``metrics`` it serves;
        irrelevant for direct TCP.
    :ivar direct_tcp: whether it serves direct TCP instead of HTTP.
    :ivar tls: whether it uses TLS.
    """

    port: int | None = None
    path: str | None = None
    addresses: tuple[str, ...] = ("127.0.0.1",)
    resources: frozenset[str] = frozenset({"replication", "health", "metrics"})
    direct_tcp: bool = False
    tls: bool = False


@attrs.frozen(kw_only=True)
class ReplicationOptions:
    """The options of one process.

    :ivar instance_name: ``master`` for the main process of a homeserver.
    :ivar streams: standard streams (by name) and declared ones.
    :ivar writers: the writers of each stream, by its name on the wire; empty for a
        stream that every instance may write.
    :ivar redis: ``None`` if Redis is not used.
    :ivar tcp_connect: the endpoint descriptions of the direct TCP listeners to which
        this process connects; empty if Redis is used. A listener sends only the rows
        that its own process writes, so there must be one for each process whose rows
        this process needs.
    :ivar tcp_listen: endpoint descriptions on which to serve direct TCP, in addition to
        the direct TCP listeners in ``listeners``.
    :ivar listeners: the direct TCP and HTTP listeners.
    :ivar instances: the address at which each instance serves HTTP replication.
    :ivar secret: the secret that requests for rows must contain; the same for all
        instances.
    :ivar stores_user_ips: whether this process stores client IPs.
    :ivar tls: the files for TLS between instances.
    :ivar backlog: the limits of the backlog of each stream; ``None`` if this process
        does not use the extension.
    :ivar receiving: the limits of the data and positions that are accepted from peers.
    :ivar tcp_limit: the most pending data for a direct TCP peer that does not read.
    :ivar max_tcp_connections: the most open connections of all direct TCP listeners
        together.
    :ivar allowed_hosts: host names for which HTTP listeners answer requests, in
        addition to ``localhost``, the name of this machine, each listener's own
        addresses, the hosts of ``instances``, and all IP addresses.
    :ivar max_http_connections: the most open connections of one HTTP listener.
    :ivar torture_level: the longest random delay of each stream in ms, to find races
        in its readers; 0 for none.
    :ivar tracing: the collector that receives spans; ``None`` for none.
    """

    server_name: str
    instance_name: str
    streams: tuple[str | TableStream, ...]
    writers: Mapping[str, tuple[str, ...]]
    database: DatabaseConfig | None = None
    redis: RedisOptions | None = None
    tcp_connect: tuple[str, ...] = ()
    tcp_listen: tuple[str, ...] = ()
    listeners: tuple[Listener, ...] = ()
    instances: Mapping[str, InstanceLocation] = attrs.field(factory=dict)
    secret: str | None = attrs.field(default=None, repr=False)
    stores_user_ips: bool = False
    tls: TlsConfig = attrs.field(factory=TlsConfig)
    backlog: BacklogOptions | None = attrs.field(factory=BacklogOptions)
    receiving: ReceiverOptions = attrs.field(factory=ReceiverOptions)
    tcp_limit: PendingLimit = attrs.field(factory=PendingLimit)
    max_tcp_connections: int = 500
    allowed_hosts: tuple[str, ...] = ()
    max_http_connections: int = 500
    torture_level: int = 0
    tracing: TracingSection | None = None

    @property
    def is_main(self) -> bool:
        """Whether the instance name is that of the main process."""
        return self.instance_name == MAIN_INSTANCE

    def problem(self, option: str, problem: str, hint: str) -> ConfigProblem:
        """Return a problem with the value of an option."""
        return ConfigProblem("ReplicationOptions", option, problem, hint)
