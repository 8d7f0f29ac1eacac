"""Models of Synapse's configuration sections.

Sections that Synapse defines ignore unknown keys: a real homeserver.yaml has hundreds
of them. But in some sections, :mod:`synapse_replication.config.sanity` rejects unknown
keys that resemble a known key. In the sections that only this package defines
(``redis.sentinel`` and ``synapse_replication``), any unknown key is an error.

Checks that involve more than one section, a file, or the kind of the process are in
other modules of this package, most of them in
:mod:`synapse_replication.config.process`. The descriptions of the fields become the
manual's reference of configuration keys.
"""

from __future__ import annotations

import re
from typing import Any, Final

import attrs

from synapse_replication.config.listener_safety import OUR_RESOURCES, Listener
from synapse_replication.config.structuring import Section, StrictSection
from synapse_replication.config.yaml_files import did_you_mean, hint_for
from synapse_replication.http.location import PORT, InstanceLocation
from synapse_replication.options import InvalidValueError, option
from synapse_replication.transport.host_names import checked_host, checked_socket_path

#: The ``worker_app`` of the main process.
MAIN_APP: Final = "synapse.app.homeserver"
_MODE_HINT: Final = "write it in octal with a leading zero, for instance 0600"

LISTENER_TYPES = ("http", "metrics", "replication", "manhole")

_WORD: Final = option(pattern=r"\S+")
_HOST: Final = option(check=checked_host)
_SOCKET_PATH: Final = option(check=checked_socket_path)
_SECRET: Final = option(is_secret=True)
SERVER_NAME: Final = option(
    "server_name",
    pattern=r"[^\s/]+",
    hint="write the homeserver's name, without slashes; for instance "
    "`server_name: example.com`",
)


def _mode(value: Any) -> Any:
    """Return the permissions of a socket.

    YAML 1.1 reads ``0600`` as an octal number, and ``0o600`` and ``"0600"`` as texts.
    """
    if value is None:
        return None
    if isinstance(value, str):
        if re.fullmatch(r"(0o?)?[0-7]{1,4}", value) is None:
            raise InvalidValueError(f"{value!r} is not a mode", _MODE_HINT)
        value = int(value.removeprefix("0o"), 8)
    if type(value) is not int or not 0 <= value <= 0o777:
        raise InvalidValueError(f"{value!r} is not a mode", _MODE_HINT)
    return value


def _not_empty(values: list[str]) -> list[str]:
    if not values:
        raise InvalidValueError("is empty", "write at least one entry")
    return values


@attrs.frozen(repr=False, kw_only=True, eq=False)
class DatabaseSection(Section):
    """The homeserver's database.

    :ivar name: driver. Streams in a database can be replicated only if the database is
        PostgreSQL (``psycopg2``).
    :ivar args: parameters of libpq (``host``, ``port``, ``dbname``, ``user``,
        ``password``, ...). ``cp_max`` is the maximum number of connections; the default
        is 10.
    :ivar data_stores: in an entry of ``databases``: the data that it holds. Replication
        uses the database that holds ``main``.
    """

    name: str = "psycopg2"
    args: dict[str, Any] = attrs.field(factory=dict)
    data_stores: list[str] = attrs.field(factory=list)


@attrs.frozen(repr=False, kw_only=True, eq=False)
class SentinelSection(StrictSection):
    """Sentinels that know the host and port of the Redis master.

    :ivar master: name by which the Sentinels know the master.
    :ivar sentinels: ``HOST:PORT`` of each Sentinel; the default port is 26379.
    :ivar username: user name for the Sentinels, not for Redis.
    :ivar password: password for the Sentinels, not for Redis.
    :ivar password_path: file with the password for the Sentinels.
    """

    master: str = attrs.field(metadata=_WORD)
    sentinels: list[str] = attrs.field(metadata=option(check=_not_empty))
    username: str | None = None
    password: str | None = attrs.field(default=None, metadata=_SECRET)
    password_path: str | None = None


@attrs.frozen(repr=False, kw_only=True)
class RedisSection(Section):
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
    host: str = attrs.field(default="localhost", metadata=_HOST)
    port: int = attrs.field(default=6379, metadata=PORT)
    path: str | None = attrs.field(default=None, metadata=_SOCKET_PATH)
    username: str | None = None
    password: str | None = attrs.field(default=None, metadata=_SECRET)
    password_path: str | None = None
    dbid: int | None = attrs.field(default=None, metadata=option(minimum=0))
    use_tls: bool = False
    certificate_file: str | None = None
    private_key_file: str | None = None
    ca_file: str | None = None
    ca_path: str | None = None
    sentinel: SentinelSection | None = None

    def __attrs_post_init__(self) -> None:
        if (self.certificate_file is None) != (self.private_key_file is None):
            raise InvalidValueError(
                "a client certificate needs its private key",
                "write both certificate_file and private_key_file, or neither",
            )


@attrs.frozen(repr=False, kw_only=True, eq=False)
class ResourceSection(Section):
    """One entry of ``resources``.

    :ivar names: ``replication``, ``health``, ``metrics``; other resources of Synapse
        are ignored.
    """

    names: list[str] = attrs.field(
        metadata=option(
            hint="write the names of resources, for instance `names: [replication]`"
        )
    )

    def __attrs_post_init__(self) -> None:
        # A name that is similar to one of ours is an error.
        for name in self.names:
            meant = did_you_mean(name, OUR_RESOURCES)
            if name not in OUR_RESOURCES and meant is not None:
                raise InvalidValueError(
                    f"{name!r} is not a resource", f"did you mean {meant!r}?"
                )


@attrs.frozen(repr=False, kw_only=True, eq=False)
class ListenerSection(Section):
    """One listener of a process.

    :ivar type: ``http``, ``metrics`` (an HTTP listener that serves only metrics and the
        status), ``replication`` (direct TCP), or ``manhole``, which is ignored.
    :ivar port: port; either this or ``path``.
    :ivar path: Unix socket.
    :ivar mode: permissions of the Unix socket, in octal with a leading zero; by
        default ``0666``, and ``0600`` for direct TCP, which has no secret.
    :ivar bind_addresses: addresses to listen on; ``0.0.0.0`` by default.
    :ivar bind_address: a single address to listen on, if ``bind_addresses`` is not set.
    :ivar tls: serve over TLS.
    :ivar resources: resources of an ``http`` listener.
    """

    type: str = attrs.field(
        metadata=option(hint=f"write one of {', '.join(LISTENER_TYPES)}")
    )
    port: int | None = attrs.field(default=None, metadata=PORT)
    path: str | None = attrs.field(default=None, metadata=_SOCKET_PATH)
    mode: Any = attrs.field(default=None, metadata=option(check=_mode))
    bind_addresses: list[str] | None = None
    bind_address: str | None = None
    tls: bool = False
    resources: list[ResourceSection] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        if self.type not in LISTENER_TYPES:
            raise InvalidValueError(
                f"{self.type!r} is not a type of listener",
                hint_for(self.type, LISTENER_TYPES),
            )
        if (self.port is None) == (self.path is None):
            raise InvalidValueError(
                "a listener needs either a port or a path",
                "write port: 9093, or path: /run/synapse/main.sock",
            )

    def to_listener(self) -> Listener:
        """Return the listener, with the resources that this package can serve.

        It listens on all IPv4 addresses if none is configured.
        """
        names = {name for section in self.resources for name in section.names}
        addresses = self.bind_addresses or [self.bind_address or "0.0.0.0"]
        return Listener(
            self.port,
            self.path,
            tuple(each.removeprefix("[").removesuffix("]") for each in addresses),
            frozenset({"metrics"} if self.type == "metrics" else names & OUR_RESOURCES),
            self.type == "replication",
            self.tls,
            None if self.mode is None else int(self.mode),
        )


@attrs.frozen(repr=False, kw_only=True)
class SynapseFile(Section):
    """The keys of Synapse that this package reads, merged from all files.

    :ivar server_name: name of the homeserver; also the name of the main Redis channel.
    :ivar database: the homeserver's database. Required if any replicated stream is
        stored in it.
    :ivar databases: several databases, by name, instead of ``database``.
    :ivar redis: Redis.
    :ivar stream_writers: the writers of each stream. A standard stream has Synapse's
        key; by default, ``master`` writes it. The key of a declared stream is its name;
        by default, the ``writers`` of the declaration write it. Every instance writes
        ``caches``.
    :ivar instance_map: the address at which each instance serves HTTP replication, by
        the instance's name; ``main`` is the main process.
    :ivar listeners: listeners of the main process.
    :ivar worker_name: name of this worker. Required for a worker.
    :ivar worker_app: used only to detect that a file belongs to a worker: with any
        value but ``synapse.app.homeserver``.
    :ivar worker_listeners: listeners of this worker.
    :ivar worker_replication_host: host of the main process's direct TCP listener.
    :ivar worker_replication_http_port: used only to say what to write in
        ``instance_map``, which replaces it.
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
    """

    server_name: str = attrs.field(metadata=SERVER_NAME)
    database: DatabaseSection | None = None
    databases: dict[str, DatabaseSection] = attrs.field(factory=dict)
    redis: RedisSection = RedisSection()
    stream_writers: dict[str, list[str]] = attrs.field(factory=dict)
    instance_map: dict[str, InstanceLocation] = attrs.field(factory=dict)
    listeners: list[ListenerSection] = attrs.field(factory=list)
    worker_name: str | None = attrs.field(default=None, metadata=_WORD)
    worker_app: str | None = None
    worker_listeners: list[ListenerSection] = attrs.field(factory=list)
    worker_replication_host: str | None = attrs.field(default=None, metadata=_HOST)
    worker_replication_http_port: int | None = attrs.field(default=None, metadata=PORT)
    worker_replication_port: int | None = attrs.field(default=None, metadata=PORT)
    worker_replication_secret: str | None = attrs.field(default=None, metadata=_SECRET)
    worker_replication_secret_path: str | None = None
    tls_certificate_path: str | None = None
    tls_private_key_path: str | None = None
    run_background_tasks_on: str | None = None
    federation_sender_instances: list[str] = attrs.field(factory=list)
    replication_torture_level: int | None = attrs.field(
        default=None, metadata=option(minimum=0, maximum=60_000)
    )
