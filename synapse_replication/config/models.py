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

from pydantic import Field, SecretStr, model_validator

from synapse_replication.config.own_section import OwnSection
from synapse_replication.config.section_types import (
    ForeignSection,
    ListOf,
    Names,
    OrEmpty,
    Port,
    StrictSection,
    invalid,
)
from synapse_replication.config.yaml_files import did_you_mean, hint_for

#: The resources of HTTP listeners that this package serves. It ignores all others,
#: except that a name similar to one of these is an error.
OUR_RESOURCES = ("health", "metrics", "replication")
LISTENER_TYPES = ("http", "metrics", "replication", "manhole")


class DatabaseSection(ForeignSection):
    """The homeserver's database."""

    name: str = "psycopg2"
    """Driver. Streams in a database can be replicated only if the database is
    PostgreSQL (``psycopg2``)."""
    args: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Parameters of libpq (``host``, ``port``, ``dbname``, ``user``, ``password``,
    ...). ``cp_max`` is the maximum number of connections; the default is 10."""


class SentinelSection(StrictSection):
    """Sentinels that know the host and port of the Redis master."""

    master: Annotated[str, Field(pattern=r"^\S+$")]
    """Name by which the Sentinels know the master."""
    sentinels: Annotated[Names, Field(min_length=1)]
    """``HOST:PORT`` of each Sentinel; the default port is 26379."""
    username: str | None = None
    """User name for the Sentinels, not for Redis."""
    password: SecretStr | None = None
    """Password for the Sentinels, not for Redis."""
    password_path: str | None = None
    """File with the password for the Sentinels."""


class RedisSection(ForeignSection):
    """The Redis server over which instances replicate."""

    enabled: bool = False
    """Whether to replicate over Redis instead of direct TCP."""
    host: str = "localhost"
    """Host of Redis."""
    port: Port = 6379
    """Port of Redis."""
    path: str | None = None
    """Unix socket of Redis; takes precedence over ``host`` and ``port``."""
    username: str | None = None
    """User name (ACL)."""
    password: SecretStr | None = None
    """Password."""
    password_path: str | None = None
    """File with the password."""
    dbid: Annotated[int, Field(ge=0)] | None = None
    """Number of the database; the default is 0."""
    use_tls: bool = False
    """Connect with TLS."""
    certificate_file: str | None = None
    """Client certificate (PEM)."""
    private_key_file: str | None = None
    """Private key (PEM) of the client certificate."""
    ca_file: str | None = None
    """Certificate authorities (PEM) that verify Redis; those of the system if neither
    this nor ``ca_path`` is set."""
    ca_path: str | None = None
    """Folder of certificate authorities, if ``ca_file`` is not set."""
    sentinel: SentinelSection | None = None
    """Sentinels that know the host and port; takes precedence over ``host`` and
    ``port``, and excludes ``path``. Synapse has no such key."""

    @model_validator(mode="after")
    def _check_pairs(self) -> RedisSection:
        if (self.certificate_file is None) != (self.private_key_file is None):
            raise invalid(
                "a client certificate needs its private key",
                "write both certificate_file and private_key_file, or neither",
            )
        return self


class InstanceSection(ForeignSection):
    """The address at which an instance serves HTTP replication."""

    host: str | None = None
    """Host of the instance."""
    port: Port | None = None
    """Port of its HTTP listener for ``replication``."""
    tls: bool = False
    """Connect with TLS."""
    path: str | None = None
    """Unix socket, instead of ``host`` and ``port``."""

    @model_validator(mode="after")
    def _check_address(self) -> InstanceSection:
        if self.path is None and (self.host is None or self.port is None):
            raise invalid(
                "the address of the process is missing",
                "write host and port, or path (of a Unix socket)",
            )
        if self.path is not None and (self.host or self.port):
            raise invalid(
                "it has both a path and a host or port",
                "write either path, or host and port",
            )
        return self


class ResourceSection(ForeignSection):
    """One entry of ``resources``."""

    names: Names
    """``replication``, ``health``, ``metrics``; other resources of Synapse are ignored.
    """

    @model_validator(mode="after")
    def _check_names(self) -> ResourceSection:
        for name in self.names:
            meant = did_you_mean(name, OUR_RESOURCES)
            if name not in OUR_RESOURCES and meant is not None:
                raise invalid(f"{name!r} is not a resource", f"did you mean {meant!r}?")
        return self


class ListenerSection(ForeignSection):
    """One listener of a process."""

    type: str
    """``http``, ``metrics`` (an HTTP listener that serves only metrics and the status),
    ``replication`` (direct TCP), or ``manhole``, which is ignored."""
    port: Port | None = None
    """Port; either this or ``path``."""
    path: str | None = None
    """Unix socket."""
    bind_addresses: Names | None = None
    """Addresses to listen on; ``0.0.0.0`` by default."""
    bind_address: str | None = None
    """A single address to listen on, if ``bind_addresses`` is not set."""
    tls: bool = False
    """Serve over TLS."""
    resources: ListOf[ResourceSection] = Field(default_factory=list)
    """Resources of an ``http`` listener."""

    @model_validator(mode="after")
    def _check_listener(self) -> ListenerSection:
        if self.type not in LISTENER_TYPES:
            raise invalid(
                f"{self.type!r} is not a type of listener",
                hint_for(self.type, LISTENER_TYPES),
            )
        if (self.port is None) == (self.path is None):
            raise invalid(
                "a listener needs either a port or a path",
                "write port: 9093, or path: /run/synapse/main.sock",
            )
        return self

    @property
    def addresses(self) -> list[str]:
        """Addresses to listen on; all IPv4 addresses if none is configured."""
        if self.bind_addresses:
            return self.bind_addresses
        return [self.bind_address] if self.bind_address else ["0.0.0.0"]

    @property
    def resource_names(self) -> frozenset[str]:
        """Names of the listener's resources that this package can serve."""
        if self.type == "metrics":
            return frozenset({"metrics"})
        names = {name for section in self.resources for name in section.names}
        return frozenset(names.intersection(OUR_RESOURCES))


#: The greatest ``replication_torture_level``, in ms.
_MAX_TORTURE_MS = 60_000


class SharedFile(ForeignSection):
    """All keys that this package reads, merged from all files."""

    server_name: Annotated[str, Field(pattern=r"^[^\s/]+$")]
    """Name of the homeserver; also the name of the main Redis channel."""
    database: DatabaseSection | None = None
    """The homeserver's database. Required if any replicated stream is stored in it."""
    redis: OrEmpty[RedisSection] = RedisSection()
    """Redis."""
    stream_writers: OrEmpty[dict[str, Names]] = Field(default_factory=dict)
    """The writers of each stream. A standard stream has Synapse's key; by default,
    ``master`` writes it. The key of a declared stream is its name; by default, the
    ``writers`` of the declaration write it. Every instance writes ``caches``."""
    instance_map: OrEmpty[dict[str, InstanceSection]] = Field(default_factory=dict)
    """The address at which each instance serves HTTP replication, by the instance's
    name; ``main`` is the main process."""
    listeners: ListOf[ListenerSection] = Field(default_factory=list)
    """Listeners of the main process."""
    worker_name: Annotated[str, Field(pattern=r"^\S+$")] | None = None
    """Name of this worker. Required for a worker."""
    worker_app: str | None = None
    """Used only to detect that a file belongs to a worker."""
    worker_listeners: ListOf[ListenerSection] = Field(default_factory=list)
    """Listeners of this worker."""
    worker_replication_host: str | None = None
    """Host of the main process's direct TCP listener."""
    worker_replication_port: Port | None = None
    """Port of the main process's direct TCP listener."""
    worker_replication_secret: SecretStr | None = None
    """Secret for HTTP replication, the same for all instances."""
    worker_replication_secret_path: str | None = None
    """File with the replication secret."""
    tls_certificate_path: str | None = None
    """Certificate (PEM) of listeners with ``tls``."""
    tls_private_key_path: str | None = None
    """Private key (PEM) of ``tls_certificate_path``."""
    run_background_tasks_on: str | None = None
    """Instance that stores client IPs; by default, the main process."""
    federation_sender_instances: list[str] = Field(default_factory=list)
    """Instances whose FEDERATION_ACK frees rows of ``federation``; by default, all that
    send it."""
    replication_torture_level: (
        Annotated[int, Field(ge=0, le=_MAX_TORTURE_MS)] | None
    ) = None
    """For tests: the longest random delay of each stream, in ms. If it is not 0,
    streams are also sent in random order."""
    synapse_replication: OrEmpty[OwnSection] = OwnSection()
    """Settings of this package for which Synapse has no key."""
