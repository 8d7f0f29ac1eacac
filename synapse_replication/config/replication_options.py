"""The options of one process, which the configuration or the code of a service sets.

:class:`ReplicationOptions` can be created from plain arguments. The validated
configuration, :class:`~synapse_replication.config.process.ProcessConfig`, is a
subclass.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

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
from synapse_replication.config.models import SERVER_NAME
from synapse_replication.config.sanity import find_bad_secret
from synapse_replication.config.shared_options import SharedOptions
from synapse_replication.config.yaml_files import KeyPath, dotted, hint_for
from synapse_replication.errors import ConfigError, ConfigProblem
from synapse_replication.http.location import InstanceLocation
from synapse_replication.options import find_invalid, option
from synapse_replication.redis.options import RedisOptions
from synapse_replication.storage.id_streams import IdStream, id_stream_of
from synapse_replication.streams.memory import InMemory
from synapse_replication.streams.standard.registry import (
    DEFAULT_STREAMS,
    MAIN_INSTANCE,
    STANDARD_STREAMS,
    StandardStream,
)
from synapse_replication.streams.table import TableStream, to_names
from synapse_replication.transport.tls import TlsConfig
from synapse_replication.wire.pending_lines import PendingLimit

#: A stream's declaration.
DeclaredStream: TypeAlias = StandardStream | TableStream | InMemory

_Types: TypeAlias = type | tuple[type, ...]

_DATABASE_HINT = 'pass libpq\'s parameters, for instance {"dbname": "shop"}'


@attrs.frozen(eq=False)
class OptionProblem:
    """A reason why options cannot be used.

    :ivar option: the attribute, with those of groups: ``receiving.max_batch_rows``.
    :ivar problem: what is wrong.
    :ivar hint: what to do in Python.
    :ivar file_hint: what to do in the files, if it differs.
    :ivar at: the path within the value of the option.
    :ivar needs: other options that the problem depends on.
    """

    option: str
    problem: str
    hint: str
    file_hint: str = ""
    at: KeyPath = ()
    needs: tuple[str, ...] = ()


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


@attrs.frozen(kw_only=True, eq=False)
class ReplicationOptions(SharedOptions):
    """The options of one process.

    :ivar server_name: the name of the deployment, which is also the name of its main
        Redis channel. All instances of a deployment have the same.
    :ivar instance_name: the name of this process, which no other has; ``master`` for
        the main process of a homeserver.
    :ivar streams: the streams that are replicated: names of standard streams, and
        declarations of your own tables. By default, all standard streams.
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
    :ivar redis: ``None`` if Redis is not used.
    :ivar tcp_connect: the endpoint descriptions, in Twisted's syntax, of the direct TCP
        listeners to which this process connects, for instance
        ``tls:main.example.com:9092``; empty if Redis is used. A listener sends only the
        rows that its own process writes, so there must be one for each process whose
        rows this process needs.
    :ivar tcp_listen: endpoint descriptions on which to serve direct TCP, in addition to
        the direct TCP listeners in ``listeners``; for instance
        ``ssl:9092:privateKey=key.pem:certKey=crt.pem``.
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
    :ivar tcp_limit: the most pending data for a direct TCP peer that does not read.
    :ivar max_tcp_connections: the most connections of all direct TCP listeners together
        that are open at a time.
    :ivar allowed_hosts: host names by which clients reach the HTTP listeners, in
        addition to ``localhost``, the name of the machine, the listeners' own addresses
        and the hosts of ``instance_map``. IP addresses are always accepted.
    :ivar max_http_connections: the most connections of one HTTP listener that are open
        at a time.
    :ivar torture_level: the longest random delay of each stream in ms, to find races
        in its readers; 0 for none.
    :raises ConfigError: if a value is not of the type that its option needs.
    """

    server_name: str = attrs.field(metadata=SERVER_NAME)
    instance_name: str = attrs.field(
        metadata=option("worker_name", pattern=r"\S+", hint="write one word")
    )
    streams: tuple[str | TableStream | InMemory, ...] = attrs.field(
        default=DEFAULT_STREAMS,
        converter=_to_streams,
        metadata=option("synapse_replication.streams"),
    )
    writers: Mapping[str, Sequence[str]] = attrs.field(
        factory=dict, metadata=option("stream_writers")
    )
    database: DatabaseConfig | None = attrs.field(
        default=None, converter=_to_database, metadata=option("database")
    )
    creates_tables: bool = True
    fill_sink: bool = attrs.field(
        default=False, metadata=option("synapse_replication.fill_sink")
    )
    redis: RedisOptions | None = attrs.field(default=None, metadata=option("redis"))
    tcp_connect: tuple[str, ...] = attrs.field(
        default=(),
        converter=to_names,
        metadata=option("synapse_replication.direct_tcp.connect"),
    )
    tcp_listen: tuple[str, ...] = attrs.field(
        default=(),
        converter=to_names,
        metadata=option("synapse_replication.direct_tcp.listen"),
    )
    instances: Mapping[str, InstanceLocation] = attrs.field(
        factory=dict, converter=_to_instances, metadata=option("instance_map")
    )
    listeners: tuple[Listener, ...] = attrs.field(
        default=attrs.Factory(lambda self: self._own_listeners(), takes_self=True),
        converter=_to_listeners,
        metadata=option("listeners"),
    )
    secret: str | None = attrs.field(
        default=None,
        repr=False,
        metadata=option("worker_replication_secret", is_secret=True),
    )
    allow_unprotected_listeners: bool = attrs.field(
        default=False,
        metadata=option("synapse_replication.allow_unprotected_listeners"),
    )
    federation_senders: tuple[str, ...] = attrs.field(
        default=(), metadata=option("federation_sender_instances")
    )
    stores_user_ips: bool = attrs.field(
        default=False, metadata=option("run_background_tasks_on")
    )
    tls: TlsConfig = attrs.field(
        factory=TlsConfig, converter=_to_tls, metadata=option("synapse_replication.tls")
    )
    tcp_limit: PendingLimit = attrs.field(
        factory=PendingLimit, metadata=option("synapse_replication.direct_tcp")
    )
    max_tcp_connections: int = attrs.field(
        default=500,
        metadata=option("synapse_replication.direct_tcp.max_connections", minimum=10),
    )
    allowed_hosts: tuple[str, ...] = attrs.field(
        default=(),
        converter=to_names,
        metadata=option("synapse_replication.http.allowed_hosts"),
    )
    max_http_connections: int = attrs.field(
        default=500,
        metadata=option("synapse_replication.http.max_connections", minimum=10),
    )
    torture_level: int = attrs.field(
        default=0,
        metadata=option("replication_torture_level", minimum=0, maximum=60_000),
    )

    def __attrs_post_init__(self) -> None:
        writers = {
            name: _default_writers(stream) for name, stream in self.declared.items()
        }
        writers.update(
            (name, to_names(instances)) for name, instances in self.writers.items()
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

    @final
    def find_problems(self) -> list[ConfigProblem]:
        """Return the reasons why the options cannot be used."""
        return [
            self.problem(dotted((each.option, *each.at)), each.problem, each.hint)
            for each in self.option_problems()
        ]

    def option_problems(self) -> Iterator[OptionProblem]:
        """Yield the reasons why the options cannot be used.

        The options of the files and those of Python are checked here, and only here;
        what only files can have wrong, for instance a misspelt key, is checked where
        they are read.
        """
        for attributes, error in find_invalid(self):
            yield OptionProblem(".".join(attributes), error.problem, error.hint)
        yield from self._find_bad_streams()
        yield from self._find_missing()
        yield from self._find_unusable()
        if not self.allow_unprotected_listeners:
            yield from self._find_unprotected()

    def link_problems(self) -> Iterator[OptionProblem]:
        """Yield the problems that concern a process that only observes."""
        yield from self._find_unusable()

    def _find_bad_streams(self) -> Iterator[OptionProblem]:
        names = [
            stream if isinstance(stream, str) else stream.name
            for stream in self.streams
        ]
        for stream in self.streams:
            if isinstance(stream, str) and stream not in STANDARD_STREAMS:
                hint = hint_for(stream, STANDARD_STREAMS, "pass its declaration")
                yield OptionProblem(
                    "streams", f"{stream!r} is not a standard stream", hint
                )
        for name in sorted({name for name in names if names.count(name) > 1}):
            hint = "rename or remove one of the two"
            yield OptionProblem("streams", f"{name} is there twice", hint)
        for name in self.writers.keys() - set(names):
            hint = hint_for(
                name,
                names,
                "remove it; for a stream that a module adds, pass the writers to "
                "host.streams.add()",
            )
            yield OptionProblem("writers", f"there is no stream {name}", hint)

    def _find_missing(self) -> Iterator[OptionProblem]:
        stored = list(self.stored)
        if stored and self.database is None:
            problem = f"is missing, but {stored[0]} is stored in it"
            yield OptionProblem("database", problem, _DATABASE_HINT, needs=("streams",))
        others = {
            (name, writer)
            for name, writers in self.writers.items()
            for writer in writers
            if writer != self.instance_name
        }
        if others and not self.has_links:
            name, writer = min(others)
            yield OptionProblem(
                "redis",
                f"there is no link to {writer}, which writes {name}",
                "pass redis, or tcp_connect and tcp_listen",
                "write `redis: {enabled: true}` with its host and port, or, for direct "
                "TCP, a listener of type replication",
                needs=("writers", "tcp_connect", "listeners", "instance_name"),
            )
        if self.redis is not None and self.tcp_connect:
            problem = "is set beside redis: rows would arrive twice"
            yield OptionProblem("tcp_connect", problem, "remove one of the two")
        yield from self._find_missing_sources()

    @property
    def _must_serve_rows(self) -> bool:
        """Whether other processes may request rows from this one."""
        return self.has_links

    def _find_missing_sources(self) -> Iterator[OptionProblem]:
        """Find writers from which the rows of streams in memory cannot be requested."""
        me = self.instance_name
        in_memory = [name for name in self.declared if name not in self.stored]
        mine = [name for name in in_memory if self.writes(name)]
        serves = any("replication" in each.resources for each in self.listeners)
        if mine and self._must_serve_rows and not serves:
            yield OptionProblem(
                "listeners",
                f"this process writes {', '.join(mine)}, held in memory, but has no "
                "replication listener from which readers can request these rows",
                f"add {me} to instances, or a Listener",
                "add `- {type: http, port: ..., resources: [{names: [replication]}]}`, "
                "with the same port as in instance_map",
                needs=("writers", "instance_name"),
            )
        missing: dict[str, str] = {}
        for name in in_memory:
            for writer in self.writers[name]:
                if writer != me and writer not in self.instances:
                    missing.setdefault(writer, name)
        for writer, name in missing.items():
            yield OptionProblem(
                "instances",
                f"{writer} writes {name}, which is held in its memory, but its address "
                "is missing",
                f"add {writer!r}: InstanceLocation(host, port)",
                self._missing_instance_hint(writer),
                needs=("writers", "instance_name"),
            )

    def _missing_instance_hint(self, name: str) -> str:
        """Return what to write in the files for an instance without address."""
        key = "main" if name == MAIN_INSTANCE else name
        return (
            f"write `instance_map: {{{key}: {{host: ..., port: ...}}}}` with the "
            "address of its replication listener"
        )

    def _find_unusable(self) -> Iterator[OptionProblem]:
        redis: object = self.redis
        if redis is not None and not isinstance(redis, RedisOptions):
            hint = "pass RedisOptions(host=..., port=...)"
            yield OptionProblem("redis", f"is {type(redis).__name__}", hint)
        if self.database is not None:
            why = conninfo_problem(self.database.conninfo)
            if why is not None:
                yield OptionProblem("database", why, _DATABASE_HINT)
        if self.secret is not None and (why := find_bad_secret(self.secret)):
            hint = "write a long random secret, for instance the output of pwgen -s 32"
            yield OptionProblem("secret", why, hint)
        if self.tracing is not None and (found := self.tracing.why_unusable()):
            yield OptionProblem("tracing", *found)
        yield from self._find_unusable_tls()

    def _find_unusable_tls(self) -> Iterator[OptionProblem]:
        hint = "pass a TlsConfig with PEM files that can be read"
        try:
            self.tls.for_connecting("localhost")
        except (OSError, ValueError) as error:
            yield OptionProblem(
                "tls", str(error), hint, "name PEM files that can be read"
            )
            return
        for index, listener in enumerate(self.listeners):
            try:
                if listener.tls:
                    self.tls.for_listening()
            except (OSError, ValueError) as error:
                yield OptionProblem(
                    "listeners",
                    f"this listener cannot use TLS: {error}",
                    hint,
                    "write tls_certificate_path and tls_private_key_path, or "
                    "synapse_replication.tls.certificate_file and private_key_file",
                    at=(index, "tls"),
                    needs=("tls",),
                )

    def _find_unprotected(self) -> Iterator[OptionProblem]:
        """Find the listeners that any client on another machine may use."""
        for index, listener in enumerate(self.listeners):
            why = why_unprotected(
                listener,
                has_secret=bool(self.secret),
                verifies_clients=self.tls.client_ca_file is not None,
            )
            if why is not None:
                at = (index, "bind_addresses")
                yield OptionProblem("listeners", *why, at=at, needs=("secret", "tls"))
        for index, description in enumerate(self.tcp_listen):
            if (why := why_unguarded(description)) is not None:
                yield OptionProblem("tcp_listen", *why, at=(index,))


def _default_writers(stream: DeclaredStream) -> tuple[str, ...]:
    if not isinstance(stream, StandardStream):
        return stream.writers
    return () if stream.any_instance_writes else (MAIN_INSTANCE,)
