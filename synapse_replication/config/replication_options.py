"""The options of one process, which the configuration or the code of a service sets.

:class:`ReplicationOptions` can be created from plain arguments. The validated
configuration, :class:`~synapse_replication.config.process.ProcessConfig`, is a
subclass.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from synapse_replication.config.deployment import (
    DatabaseConfig,
    conninfo_problem,
)
from synapse_replication.config.listener_safety import (
    Listener,
    why_unguarded,
    why_unprotected,
)
from synapse_replication.config.own_section import TracingSection
from synapse_replication.config.yaml_files import hint_for
from synapse_replication.errors import ConfigError, ConfigProblem
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.http.location import InstanceLocation
from synapse_replication.redis.options import RedisOptions
from synapse_replication.storage.id_streams import IdStream, id_stream_of
from synapse_replication.streams.backlog import BacklogOptions
from synapse_replication.streams.memory import InMemory
from synapse_replication.streams.standard.registry import (
    MAIN_INSTANCE,
    STANDARD_STREAMS,
    StandardStream,
)
from synapse_replication.streams.table import TableStream
from synapse_replication.transport.tls import TlsConfig
from synapse_replication.wire.pending_lines import PendingLimit

#: A stream's declaration.
DeclaredStream: TypeAlias = StandardStream | TableStream | InMemory

#: An option, what is wrong with it, and the hint.
_Finding: TypeAlias = tuple[str, str, str]
_Types: TypeAlias = type | tuple[type, ...]

_DATABASE_HINT = 'pass libpq\'s parameters, for instance {"dbname": "shop"}'


def _to_names(value: Iterable[str] | str) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _to_streams(
    value: Iterable[str | TableStream | InMemory] | str | TableStream | InMemory,
) -> tuple[str | TableStream | InMemory, ...]:
    if isinstance(value, (str, TableStream, InMemory)):
        return (value,)
    return tuple(value)


def _check_type(option: str, value: object, types: _Types, hint: str) -> None:
    if not isinstance(value, types):
        problem = f"is {type(value).__name__}"
        raise ConfigError([ConfigProblem("ReplicationOptions", option, problem, hint)])


def _to_listeners(value: Iterable[Listener]) -> tuple[Listener, ...]:
    listeners = (value,) if isinstance(value, Listener) else tuple(value)
    for each in listeners:
        _check_type("listeners", each, Listener, "pass a list of Listener(port)")
    return listeners


def _to_instances(
    value: Mapping[str, InstanceLocation],
) -> Mapping[str, InstanceLocation]:
    for name, each in value.items():
        hint = f"pass {{{name!r}: InstanceLocation(host, port)}}"
        _check_type(f"instances[{name!r}]", each, InstanceLocation, hint)
    return value


def _to_tls(value: TlsConfig) -> TlsConfig:
    _check_type("tls", value, TlsConfig, "pass TlsConfig(ca_file=..., ...)")
    return value


def _to_database(value: Any) -> DatabaseConfig | None:
    if value is None or isinstance(value, DatabaseConfig):
        return value
    _check_type("database", value, (str, Mapping), _DATABASE_HINT)
    return DatabaseConfig({"dsn": value} if isinstance(value, str) else value)


@attrs.frozen(kw_only=True)
class ReplicationOptions:
    """The options of one process.

    :ivar server_name: the name of the deployment, which is also the name of its main
        Redis channel. All instances of a deployment have the same.
    :ivar instance_name: the name of this process, which no other has; ``master`` for
        the main process of a homeserver.
    :ivar streams: standard streams (by name) and declared ones.
    :ivar writers: replaces the declared writers of streams, by the stream's name.
        After the creation, it has the writers of every stream: none for a stream that
        every instance may write. By default, ``master`` writes a standard stream.
    :ivar database: libpq's parameters by name, a DSN, or a ``DatabaseConfig``; ``None``
        if no stream is stored in PostgreSQL.
    :ivar creates_tables: whether this process creates the tables that replication needs
        if they are missing. If not, it waits for them.
    :ivar fill_sink: whether a sink that has saved no position of a writer receives all
        rows of this writer from the beginning, and rows that this process wrote before
        its start, too. By default, it receives the rows of others that are written from
        now on. Rows of streams held in memory always arrive from the beginning.
    :ivar writer_lock: whether a process that writes streams in PostgreSQL holds an
        advisory lock there, so that a second one with its name waits for ten seconds
        and refuses to start.
    :ivar redis: ``None`` if Redis is not used.
    :ivar tcp_connect: the endpoint descriptions of the direct TCP listeners to which
        this process connects; empty if Redis is used. A listener sends only the rows
        that its own process writes, so there must be one for each process whose rows
        this process needs.
    :ivar tcp_listen: endpoint descriptions on which to serve direct TCP, in addition to
        the direct TCP listeners in ``listeners``.
    :ivar instances: the address at which each instance serves HTTP replication. Needed
        for the writers of streams held in memory; for other writers, it lets readers
        fetch missed rows without the database.
    :ivar listeners: the direct TCP and HTTP listeners; by default, an HTTP listener at
        this instance's own address in ``instances``, if it is there.
    :ivar secret: the secret that requests for rows must contain; the same for all
        instances.
    :ivar allow_unprotected_listeners: whether other machines may reach a listener for
        replication that requires neither a secret nor a client certificate.
    :ivar federation_senders: the instances whose FEDERATION_ACK frees rows of
        ``federation``; by default, all that send it.
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
    :raises ConfigError: if a value is not of the type that its option needs.
    """

    server_name: str
    instance_name: str
    streams: tuple[str | TableStream | InMemory, ...] = attrs.field(
        converter=_to_streams
    )
    writers: Mapping[str, Sequence[str]] = attrs.field(factory=dict)
    database: DatabaseConfig | None = attrs.field(default=None, converter=_to_database)
    creates_tables: bool = True
    fill_sink: bool = False
    writer_lock: bool = True
    redis: RedisOptions | None = None
    tcp_connect: tuple[str, ...] = attrs.field(default=(), converter=_to_names)
    tcp_listen: tuple[str, ...] = attrs.field(default=(), converter=_to_names)
    instances: Mapping[str, InstanceLocation] = attrs.field(
        factory=dict, converter=_to_instances
    )
    listeners: tuple[Listener, ...] = attrs.field(
        default=attrs.Factory(lambda self: self._own_listeners(), takes_self=True),
        converter=_to_listeners,
    )
    secret: str | None = attrs.field(default=None, repr=False)
    allow_unprotected_listeners: bool = False
    federation_senders: tuple[str, ...] = ()
    stores_user_ips: bool = False
    tls: TlsConfig = attrs.field(factory=TlsConfig, converter=_to_tls)
    backlog: BacklogOptions | None = attrs.field(factory=BacklogOptions)
    receiving: ReceiverOptions = attrs.field(factory=ReceiverOptions)
    tcp_limit: PendingLimit = attrs.field(factory=PendingLimit)
    max_tcp_connections: int = 500
    allowed_hosts: tuple[str, ...] = attrs.field(default=(), converter=_to_names)
    max_http_connections: int = 500
    torture_level: int = 0
    tracing: TracingSection | None = None

    def __attrs_post_init__(self) -> None:
        writers = {
            name: _default_writers(stream) for name, stream in self.declared.items()
        }
        writers.update(
            (name, _to_names(instances)) for name, instances in self.writers.items()
        )
        object.__setattr__(self, "writers", writers)

    def _own_listeners(self) -> tuple[Listener, ...]:
        own = self.instances.get(self.instance_name)
        if own is None:
            return ()
        if own.path is not None:
            return (Listener(path=own.path, addresses=()),)
        try:
            address = str(ipaddress.ip_address(own.host or ""))
        except ValueError:
            # A name may have other addresses here than at the peers.
            address = "127.0.0.1" if own.host == "localhost" else "0.0.0.0"
        return (Listener(own.port, addresses=(address,), tls=own.tls),)

    @property
    def declared(self) -> Mapping[str, DeclaredStream]:
        """The declaration of each stream, by its name; unknown names are skipped."""
        streams = (
            STANDARD_STREAMS.get(stream) if isinstance(stream, str) else stream
            for stream in self.streams
        )
        return {stream.name: stream for stream in streams if stream is not None}

    @property
    def stored(self) -> Mapping[str, StandardStream | TableStream]:
        """The declarations of the streams that are stored in the database."""
        return {
            name: stream
            for name, stream in self.declared.items()
            if not isinstance(stream, InMemory)
            and not stream.description.held_in_memory
        }

    @property
    def id_streams(self) -> Mapping[str, IdStream]:
        """The ids of the streams that are stored in the database, by name."""
        return {
            name: id_stream_of(
                stream, self.writers[name], self.receiving.plausible_distance
            )
            for name, stream in self.stored.items()
        }

    @property
    def is_main(self) -> bool:
        """Whether the instance name is that of the main process."""
        return self.instance_name == MAIN_INSTANCE

    @property
    def has_direct_tcp(self) -> bool:
        """Whether this process connects, or listens, for direct TCP."""
        return bool(
            self.tcp_connect
            or self.tcp_listen
            or any(listener.direct_tcp for listener in self.listeners)
        )

    @property
    def serves_http(self) -> bool:
        """Whether this process has an HTTP listener."""
        return any(not listener.direct_tcp for listener in self.listeners)

    @property
    def has_links(self) -> bool:
        """Whether there is a link to other processes, or a listener for links."""
        return self.redis is not None or self.has_direct_tcp

    def writes(self, stream_name: str) -> bool:
        """Return whether this instance may write a stream.

        Every instance may write a stream without declared writers.
        """
        writers = self.writers[stream_name]
        return not writers or self.instance_name in writers

    def problem(self, option: str, problem: str, hint: str) -> ConfigProblem:
        """Return a problem with the value of an option."""
        return ConfigProblem("ReplicationOptions", option, problem, hint)

    def error(self, option: str, problem: str, hint: str) -> ConfigError:
        """Return the error of an option whose value cannot be used."""
        return ConfigError([self.problem(option, problem, hint)])

    def find_problems(self) -> list[ConfigProblem]:
        """Return the reasons why the options cannot be used."""
        findings = [
            *self._find_bad_names(),
            *self._find_missing(),
            *self._find_unusable(),
        ]
        if not self.allow_unprotected_listeners:
            findings += [(each[0], *each[2:]) for each in self.find_unprotected()]
        return [self.problem(*finding) for finding in findings]

    def _find_bad_names(self) -> Iterator[_Finding]:
        if not re.fullmatch(r"[^\s/]+", self.server_name):
            hint = "write one word without slashes, for instance shop.example.com"
            yield "server_name", f"is {self.server_name!r}", hint
        if not re.fullmatch(r"\S+", self.instance_name):
            yield "instance_name", f"is {self.instance_name!r}", "write one word"
        names = [
            stream if isinstance(stream, str) else stream.name
            for stream in self.streams
        ]
        for stream in self.streams:
            if isinstance(stream, str) and stream not in STANDARD_STREAMS:
                hint = hint_for(stream, STANDARD_STREAMS, "pass its declaration")
                yield "streams", f"{stream!r} is not a standard stream", hint
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield "streams", f"{name} is there twice", "rename or remove one of the two"
        for name in self.writers.keys() - set(names):
            yield "writers", f"there is no stream {name}", f"write one of {names}"

    def _find_missing(self) -> Iterator[_Finding]:
        me, stored = self.instance_name, list(self.stored)
        if stored and self.database is None:
            problem = f"is missing, but {stored[0]} is stored in it"
            yield "database", problem, _DATABASE_HINT
        others = {
            (name, writer)
            for name, writers in self.writers.items()
            for writer in writers
            if writer != me
        }
        if others and not self.has_links:
            name, writer = min(others)
            yield (
                "redis",
                f"there is no link to {writer}, which writes {name}",
                "pass redis, or tcp_connect and tcp_listen",
            )
        if self.redis is not None and self.tcp_connect:
            hint = "remove one of the two"
            yield "tcp_connect", "is set beside redis: rows would arrive twice", hint
        serves = any("replication" in each.resources for each in self.listeners)
        for name in self.declared.keys() - set(stored):
            if me in self.writers[name] and self.has_links and not serves:
                yield (
                    "listeners",
                    f"this instance writes {name}, which is held in memory, but has no "
                    "listener from which readers can request its rows",
                    f"add {me} to instances, or a Listener",
                )
            for writer in self.writers[name]:
                if writer != me and writer not in self.instances:
                    yield (
                        "instances",
                        f"{writer} writes {name}, which is held in its memory, but its "
                        "address is missing",
                        f"add {writer!r}: InstanceLocation(host, port)",
                    )

    def _find_unusable(self) -> Iterator[_Finding]:
        redis: object = self.redis
        if redis is not None and not isinstance(redis, RedisOptions):
            hint = "pass RedisOptions(host=..., port=...)"
            yield "redis", f"is {type(redis).__name__}", hint
        if self.database is not None:
            why = conninfo_problem(self.database.conninfo)
            if why is not None:
                yield "database", why, _DATABASE_HINT
        try:
            self.tls.for_connecting("localhost")
            if any(listener.tls for listener in self.listeners):
                self.tls.for_listening()
        except (OSError, ValueError) as error:
            yield "tls", str(error), "pass a TlsConfig with PEM files that can be read"

    def find_unprotected(self) -> Iterator[tuple[str, int, str, str]]:
        """Find the listeners that any client on another machine may use.

        :return: an option, an index in its value, what is wrong with it, and the hint.
        """
        for index, listener in enumerate(self.listeners):
            why = why_unprotected(
                listener,
                has_secret=bool(self.secret),
                verifies_clients=self.tls.client_ca_file is not None,
            )
            if why is not None:
                yield ("listeners", index, *why)
        for index, description in enumerate(self.tcp_listen):
            if (why := why_unguarded(description)) is not None:
                yield ("tcp_listen", index, *why)


def _default_writers(stream: DeclaredStream) -> tuple[str, ...]:
    if not isinstance(stream, StandardStream):
        return stream.writers
    return () if stream.any_instance_writes else (MAIN_INSTANCE,)
