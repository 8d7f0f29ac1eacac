"""Models of Synapse's configuration sections.

Sections that Synapse defines ignore unknown keys: a real homeserver.yaml has hundreds
of them. But in some sections, :mod:`synapse_replication.config.sanity` rejects unknown
keys that resemble a known key. In the sections that only this package defines
(``redis.sentinel`` and those of :mod:`synapse_replication.config.own_section`), any
unknown key is an error.

Checks that involve more than one section, a file, or the kind of the process are in
other modules of this package, most of them in
:mod:`synapse_replication.config.process`. The descriptions of the fields become the
manual's reference of configuration keys.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, field

from synapse_replication.config import sections
from synapse_replication.config.listener_safety import OUR_RESOURCES, Listener
from synapse_replication.config.own_section import OwnSection
from synapse_replication.config.yaml_files import did_you_mean, hint_for
from synapse_replication.http.location import InstanceLocation

LISTENER_TYPES = ("http", "metrics", "replication", "manhole")


class DatabaseSection(sections.Section, frozen=True):
    """The homeserver's database.

    :ivar name: driver. Streams in a database can be replicated only if the database is
        PostgreSQL (``psycopg2``).
    :ivar args: parameters of libpq (``host``, ``port``, ``dbname``, ``user``,
        ``password``, ...). ``cp_max`` is the maximum number of connections; the default
        is 10.
    """

    name: str = "psycopg2"
    args: dict[str, Any] = field(default_factory=dict)


class SentinelSection(sections.StrictSection, frozen=True):
    """Sentinels that know the host and port of the Redis master.

    :ivar master: name by which the Sentinels know the master.
    :ivar sentinels: ``HOST:PORT`` of each Sentinel; the default port is 26379.
    :ivar username: user name for the Sentinels, not for Redis.
    :ivar password: password for the Sentinels, not for Redis.
    :ivar password_path: file with the password for the Sentinels.
    """

    master: Annotated[str, Meta(pattern=r"^\S+\Z")]
    sentinels: Annotated[list[str], sections.not_empty]
    username: str | None = None
    password: sections.Secret | None = None
    password_path: str | None = None


class RedisSection(sections.Section, frozen=True):
    """The Redis server over which instances replicate.

    :ivar enabled: whether to replicate over Redis instead of direct TCP.
    :ivar host: host of Redis.
    :ivar port: port of Redis.
    :ivar path: Unix socket of Redis; takes precedence over ``host`` and ``port``.
    :ivar username: user name (ACL).
    :ivar password: password.
    :ivar password_path: file with the password.
    :ivar dbid: number of the database; the default is 0.
    :ivar use_tls: connect with TLS.
    :ivar certificate_file: client certificate (PEM).
    :ivar private_key_file: private key (PEM) of the client certificate.
    :ivar ca_file: certificate authorities (PEM) that verify Redis; those of the system
        if neither this nor ``ca_path`` is set.
    :ivar ca_path: folder of certificate authorities, if ``ca_file`` is not set.
    :ivar sentinel: Sentinels that know the host and port; takes precedence over
        ``host`` and ``port``, and excludes ``path``. Synapse has no such key.
    """

    enabled: bool = False
    host: str = "localhost"
    port: sections.Port = 6379
    path: str | None = None
    username: str | None = None
    password: sections.Secret | None = None
    password_path: str | None = None
    dbid: Annotated[int, Meta(ge=0)] | None = None
    use_tls: bool = False
    certificate_file: str | None = None
    private_key_file: str | None = None
    ca_file: str | None = None
    ca_path: str | None = None
    sentinel: SentinelSection | None = None

    def __post_init__(self) -> None:
        if (self.certificate_file is None) != (self.private_key_file is None):
            raise sections.InvalidValueError(
                "a client certificate needs its private key",
                "write both certificate_file and private_key_file, or neither",
            )


class InstanceSection(InstanceLocation, sections.Section, frozen=True):
    """The address at which an instance serves HTTP replication.

    :ivar host: host of the instance.
    :ivar port: port of its HTTP listener for ``replication``.
    :ivar tls: connect with TLS.
    :ivar path: Unix socket, instead of ``host`` and ``port``.
    """

    port: sections.Port | None = None

    def __post_init__(self) -> None:
        if self.path is None and (self.host is None or self.port is None):
            raise sections.InvalidValueError(
                "the address of the process is missing",
                "write host and port, or path (of a Unix socket)",
            )
        if self.path is not None and (self.host or self.port):
            raise sections.InvalidValueError(
                "it has both a path and a host or port",
                "write either path, or host and port",
            )


class ResourceSection(sections.Section, frozen=True):
    """One entry of ``resources``.

    :ivar names: ``replication``, ``health``, ``metrics``; other resources of Synapse
        are ignored.
    """

    names: list[str]

    def __post_init__(self) -> None:
        # A name that is similar to one of ours is an error.
        for name in self.names:
            meant = did_you_mean(name, OUR_RESOURCES)
            if name not in OUR_RESOURCES and meant is not None:
                raise sections.InvalidValueError(
                    f"{name!r} is not a resource", f"did you mean {meant!r}?"
                )


class ListenerSection(sections.Section, frozen=True):
    """One listener of a process.

    :ivar type: ``http``, ``metrics`` (an HTTP listener that serves only metrics and the
        status), ``replication`` (direct TCP), or ``manhole``, which is ignored.
    :ivar port: port; either this or ``path``.
    :ivar path: Unix socket.
    :ivar bind_addresses: addresses to listen on; ``0.0.0.0`` by default.
    :ivar bind_address: a single address to listen on, if ``bind_addresses`` is not set.
    :ivar tls: serve over TLS.
    :ivar resources: resources of an ``http`` listener.
    """

    type: str
    port: sections.Port | None = None
    path: str | None = None
    bind_addresses: list[str] | None = None
    bind_address: str | None = None
    tls: bool = False
    resources: list[ResourceSection] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.type not in LISTENER_TYPES:
            raise sections.InvalidValueError(
                f"{self.type!r} is not a type of listener",
                hint_for(self.type, LISTENER_TYPES),
            )
        if (self.port is None) == (self.path is None):
            raise sections.InvalidValueError(
                "a listener needs either a port or a path",
                "write port: 9093, or path: /run/synapse/main.sock",
            )

    def to_listener(self) -> Listener:
        """Return the listener, with the resources that this package can serve.

        It listens on all IPv4 addresses if none is configured.
        """
        names = {name for section in self.resources for name in section.names}
        return Listener(
            self.port,
            self.path,
            tuple(self.bind_addresses or [self.bind_address or "0.0.0.0"]),
            frozenset({"metrics"} if self.type == "metrics" else names & OUR_RESOURCES),
            self.type == "replication",
            self.tls,
        )


class SharedFile(sections.Section, frozen=True):
    """All keys that this package reads, merged from all files.

    :ivar server_name: name of the homeserver; also the name of the main Redis channel.
    :ivar database: the homeserver's database. Required if any replicated stream is
        stored in it.
    :ivar redis: Redis.
    :ivar stream_writers: the writers of each stream. A standard stream has Synapse's
        key; by default, ``master`` writes it. The key of a declared stream is its name;
        by default, the ``writers`` of the declaration write it. Every instance writes
        ``caches``.
    :ivar instance_map: the address at which each instance serves HTTP replication, by
        the instance's name; ``main`` is the main process.
    :ivar listeners: listeners of the main process.
    :ivar worker_name: name of this worker. Required for a worker.
    :ivar worker_app: used only to detect that a file belongs to a worker.
    :ivar worker_listeners: listeners of this worker.
    :ivar worker_replication_host: host of the main process's direct TCP listener.
    :ivar worker_replication_port: port of the main process's direct TCP listener.
    :ivar worker_replication_secret: secret for HTTP replication, the same for all
        instances.
    :ivar worker_replication_secret_path: file with the replication secret.
    :ivar tls_certificate_path: certificate (PEM) of listeners with ``tls``.
    :ivar tls_private_key_path: private key (PEM) of ``tls_certificate_path``.
    :ivar run_background_tasks_on: instance that stores client IPs; by default, the main
        process.
    :ivar federation_sender_instances: instances whose FEDERATION_ACK frees rows of
        ``federation``; by default, all that send it.
    :ivar replication_torture_level: for tests: the longest random delay of each stream,
        in ms, at most a minute. If it is not 0, streams are also sent in random order.
    :ivar synapse_replication: settings of this package for which Synapse has no key.
    """

    server_name: Annotated[str, Meta(pattern=r"^[^\s/]+\Z")]
    database: DatabaseSection | None = None
    redis: RedisSection = RedisSection()
    stream_writers: dict[str, list[str]] = field(default_factory=dict)
    instance_map: dict[str, InstanceSection] = field(default_factory=dict)
    listeners: list[ListenerSection] = field(default_factory=list)
    worker_name: Annotated[str, Meta(pattern=r"^\S+\Z")] | None = None
    worker_app: str | None = None
    worker_listeners: list[ListenerSection] = field(default_factory=list)
    worker_replication_host: str | None = None
    worker_replication_port: sections.Port | None = None
    worker_replication_secret: sections.Secret | None = None
    worker_replication_secret_path: str | None = None
    tls_certificate_path: str | None = None
    tls_private_key_path: str | None = None
    run_background_tasks_on: str | None = None
    federation_sender_instances: list[str] = field(default_factory=list)
    replication_torture_level: Annotated[int, Meta(ge=0, le=60_000)] | None = None
    synapse_replication: OwnSection = field(default_factory=OwnSection)
