"""The configuration of one process: parsed once, checked once, then only read.

:func:`load_config` reads the files that operators of Synapse have and gives a
:class:`ProcessConfig`, or raises one :class:`~synapse_replication.errors.ConfigError`
with every mistake that it found: file, key and mend. docs/operators-guide.rst.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from pydantic import ValidationError

from synapse_replication.config.files import (
    OWN_SECTION,
    MergedFiles,
    Path_,
    did_you_mean,
    read_files,
    read_secret,
)
from synapse_replication.config.listener_safety import open_to_strangers
from synapse_replication.config.models import (
    FactorySection,
    ListenerSection,
    SharedFile,
    problems_of,
    without_failed_parts,
)
from synapse_replication.config.redis import RedisConfig, read_redis
from synapse_replication.config.tls import TlsConfig, read_tls
from synapse_replication.config.tracing import TracingConfig, read_tracing
from synapse_replication.errors import ConfigError, ConfigProblem
from synapse_replication.streams.standard.registry import (
    MAIN_INSTANCE,
    STANDARD_STREAMS,
)
from synapse_replication.streams.table import TableStream
from synapse_replication.wire.connection import PendingLimit

__all__ = [
    "DatabaseConfig",
    "ExtensionConfig",
    "FactoryConfig",
    "InstanceLocation",
    "Listener",
    "ProcessConfig",
    "Purpose",
    "RedisConfig",
    "TlsConfig",
    "TracingConfig",
    "load_config",
]

#: The keys of ``stream_writers`` that may name one instance only.
SINGLE_WRITER_KEYS = frozenset(
    {"account_data", "presence", "push_rules", "to_device", "typing"}
)


class Purpose(enum.Enum):
    """What the configuration is read for."""

    MAIN = "main"
    WORKER = "worker"
    FOLLOW = "follow"  #: only looks on: needs a link, and no database


@attrs.frozen
class DatabaseConfig:
    """How to reach Postgres.

    :ivar conninfo: libpq's parameters by name.
    :ivar max_connections: connections at most (Synapse's ``cp_max``).
    """

    conninfo: Mapping[str, Any] = attrs.field(repr=False)
    max_connections: int = 10


@attrs.frozen
class InstanceLocation:
    """Where another process of the homeserver serves HTTP replication."""

    host: str | None
    port: int | None
    tls: bool
    path: str | None


@attrs.frozen
class Listener:
    """Where this process listens, and for what.

    :ivar resources: of ``replication``, ``health`` and ``metrics``; empty for
        direct TCP.
    :ivar direct_tcp: it speaks the line protocol, not HTTP.
    :ivar tls: over TLS.
    """

    port: int | None
    path: str | None
    addresses: tuple[str, ...]
    resources: frozenset[str]
    direct_tcp: bool
    tls: bool = False


@attrs.frozen
class ExtensionConfig:
    """What to keep of each stream for readers that missed it.

    :ivar backlog_rows: rows at most.
    :ivar backlog_bytes: memory at most.
    """

    backlog_rows: int = 10_000
    backlog_bytes: int = 4 * 1024 * 1024


@attrs.frozen
class FactoryConfig:
    """A function of the user's, and what it is called with.

    :ivar module: its dotted name.
    """

    module: str
    config: Mapping[str, Any] = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class ProcessConfig:
    """All that one process needs to know.

    :ivar files: what it was read from.
    :ivar instance_name: ``master`` for the main process.
    :ivar redis: ``None`` if it is not enabled.
    :ivar tcp_connect: the endpoint descriptions of the direct TCP listeners to
        connect to: of the main process, and of each other process whose rows this
        one follows, since a listener sends what its own process writes. Empty if
        Redis is used.
    :ivar tcp_listen: endpoint descriptions to serve direct TCP on, besides the
        listeners of that type.
    :ivar listeners: those that have something of ours to serve.
    :ivar streams: standard streams (by name) and declared ones.
    :ivar writers: who writes each of them, by its name on the wire; empty for a
        stream that everybody writes.
    :ivar replication_secret: the ``worker_replication_secret``.
    :ivar stores_user_ips: this process stores client IPs.
    :ivar command_sink: where the commands without rows go.
    :ivar torture_level: ms by which each stream is delayed at most, in random order,
        to find races in what reads it; 0 for none.
    :ivar tcp_limit: how much may wait for a peer over direct TCP that does not read.
    :ivar tls: with other processes.
    :ivar extension: ``None`` if this process speaks the classic wire alone.
    :ivar log_level: what is less than this is not logged.
    :ivar tracing: where spans are sent; ``None`` for nowhere.
    """

    files: Sequence[str]
    server_name: str
    instance_name: str
    database: DatabaseConfig | None
    redis: RedisConfig | None
    tcp_connect: tuple[str, ...]
    tcp_listen: tuple[str, ...]
    listeners: tuple[Listener, ...]
    streams: tuple[str | TableStream, ...]
    writers: Mapping[str, tuple[str, ...]]
    instance_map: Mapping[str, InstanceLocation]
    replication_secret: str | None = attrs.field(repr=False)
    stores_user_ips: bool
    row_sink: FactoryConfig | None
    modules: tuple[FactoryConfig, ...]
    command_sink: FactoryConfig | None = None
    torture_level: int = 0
    tcp_limit: PendingLimit = attrs.field(factory=PendingLimit)
    tls: TlsConfig = attrs.field(factory=TlsConfig)
    extension: ExtensionConfig | None = ExtensionConfig()
    log_level: str = "info"
    tracing: TracingConfig | None = None

    @property
    def is_main(self) -> bool:
        """Tell whether this is the main process."""
        return self.instance_name == MAIN_INSTANCE


def load_config(paths: Sequence[str], purpose: Purpose | None = None) -> ProcessConfig:
    """Read, merge and check configuration files.

    :param paths: YAML files or folders of them; later ones win.
    :param purpose: what the process is to be; ``None`` to tell from
        ``worker_name``.
    :raises ConfigError: there are mistakes; it holds all of them.
    """
    problems: list[ConfigProblem] = []
    merged = read_files(paths, problems)
    if problems and not merged.values:
        raise ConfigError(problems)
    shared: SharedFile | None = None
    try:
        shared = SharedFile.model_validate(merged.values)
    except ValidationError as error:
        problems += problems_of(error, merged)
        # What else is wrong is told in the same go: what failed is left out, so
        # that the rest can be checked.
        shared = without_failed_parts(merged, error)
    if shared is not None:
        config = _Checks(merged, shared, problems, purpose).run()
        if not problems:
            return config
    raise ConfigError(problems)


class _Checks:
    """One pass over what the sections cannot tell by themselves."""

    def __init__(
        self,
        merged: MergedFiles,
        shared: SharedFile,
        problems: list[ConfigProblem],
        purpose: Purpose | None,
    ) -> None:
        self._merged = merged
        self._shared = shared
        self._problems = problems
        if purpose is None:
            is_worker = any(merged.values.get(k) for k in ("worker_name", "worker_app"))
            purpose = Purpose.WORKER if is_worker else Purpose.MAIN
        self._purpose = purpose
        self._is_worker = purpose is Purpose.WORKER
        #: Where our listeners are told to speak TLS.
        self._tls_listeners: list[Path_] = []

    def run(self) -> ProcessConfig:
        shared, own = self._shared, self._shared.synapse_replication
        redis = read_redis(shared.redis, self._merged, self._problems)
        streams = tuple(STANDARD_STREAMS) if own.streams is None else tuple(own.streams)
        instance_name = self._instance_name()
        writers = self._writers(streams)
        config = ProcessConfig(
            files=self._merged.files,
            server_name=shared.server_name,
            instance_name=instance_name,
            database=self._database(streams),
            redis=redis,
            tcp_connect=self._tcp_connect(redis),
            tcp_listen=tuple(own.direct_tcp.listen),
            listeners=self._listeners(),
            tls=read_tls(shared, self._merged, self._problems, self._tls_listeners),
            streams=streams,
            writers=writers,
            instance_map=self._instance_map(),
            replication_secret=read_secret(
                shared.worker_replication_secret.get_secret_value()
                if shared.worker_replication_secret is not None
                else None,
                shared.worker_replication_secret_path,
                ("worker_replication_secret",),
                self._merged,
                self._problems,
            ),
            stores_user_ips=(shared.run_background_tasks_on or MAIN_INSTANCE)
            == instance_name,
            row_sink=_factory(own.row_sink) if own.row_sink is not None else None,
            modules=tuple(_factory(module) for module in own.modules),
            command_sink=_factory(own.command_sink)
            if own.command_sink is not None
            else None,
            torture_level=shared.replication_torture_level or 0,
            tcp_limit=PendingLimit(
                own.direct_tcp.max_pending_commands, own.direct_tcp.max_pending_bytes
            ),
            extension=ExtensionConfig(
                own.extension.backlog_rows, own.extension.backlog_bytes
            )
            if own.extension.enabled
            else None,
            log_level=own.log_level,
            tracing=read_tracing(own.tracing, self._merged, self._problems),
        )
        if not self._failed_keys() & {OWN_SECTION, "worker_replication_secret"}:
            key = "worker_listeners" if self._is_worker else "listeners"
            has_secret = bool(config.replication_secret)
            if self._purpose is not Purpose.FOLLOW:
                for path, problem, mend in open_to_strangers(shared, key, has_secret):
                    self._problem(path, problem, mend)
        if self._is_worker:
            self._check_rows_can_be_asked_for(config)
        return config

    def _problem(self, path: Path_, problem: str, mend: str) -> None:
        self._problems.append(self._merged.problem(path, problem, mend))

    # -- who ----------------------------------------------------------------------

    def _instance_name(self) -> str:
        name = self._shared.worker_name
        if not self._is_worker:
            if name is not None and self._purpose is Purpose.MAIN:
                self._problem(
                    ("worker_name",),
                    "the main process has none",
                    "leave this file out, or start `synapse-replication worker`",
                )
            return MAIN_INSTANCE
        if name is None:
            if "worker_name" not in self._merged.values:
                self._problem(
                    ("worker_name",),
                    "is missing",
                    "write a name that no other process of this homeserver has",
                )
            return "unnamed"
        if name in (MAIN_INSTANCE, "main"):
            self._problem(
                ("worker_name",),
                f"{name!r} is the main process",
                "write a name that no other process of this homeserver has",
            )
        return name

    # -- where --------------------------------------------------------------------

    def _database(
        self, streams: tuple[str | TableStream, ...]
    ) -> DatabaseConfig | None:
        section = self._shared.database
        needed = self._purpose is not Purpose.FOLLOW and any(
            isinstance(stream, TableStream)
            or not STANDARD_STREAMS[stream].description.held_in_memory
            for stream in streams
        )
        if section is None:
            if needed and "database" not in self._merged.values:
                self._problem(
                    ("database",),
                    "is missing",
                    "write name: psycopg2 and args: with host, dbname, user, ...",
                )
            return None
        if section.name != "psycopg2":
            if needed:
                self._problem(
                    ("database", "name"),
                    f"{section.name!r} cannot be replicated: its sequences and "
                    "positions are PostgreSQL's",
                    "write psycopg2, and move the data to PostgreSQL",
                )
            return None
        args = dict(section.args)
        most = args.get("cp_max", 10)
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            self._problem(
                ("database", "args", "cp_max"),
                "is no number of connections",
                "write a whole number from 1, for instance 10",
            )
            most = 10
        # `database` is psycopg2's older name of libpq's `dbname`.
        if "database" in args and "dbname" not in args:
            args["dbname"] = args.pop("database")
        conninfo = {
            name: value
            for name, value in args.items()
            if not name.startswith("cp_") and value is not None
        }
        if needed and (why := _why_no_conninfo(conninfo)) is not None:
            self._problem(
                ("database", "args"),
                why,
                "write libpq's parameters (host, port, dbname, user, password, ...) "
                "and the pool's cp_min and cp_max",
            )
        return DatabaseConfig(conninfo, most)

    def _tcp_connect(self, redis: RedisConfig | None) -> tuple[str, ...]:
        if redis is not None:
            return ()
        shared = self._shared
        descriptions = tuple(shared.synapse_replication.direct_tcp.connect)
        if descriptions or self._purpose is Purpose.MAIN:
            return descriptions
        if shared.worker_replication_port is not None:
            host = _quote(shared.worker_replication_host or "localhost")
            return (f"tcp:{host}:{shared.worker_replication_port}",)
        failed = any(
            str(problem.key).split(".")[0] in ("redis", OWN_SECTION)
            or problem.key == "worker_replication_port"
            for problem in self._problems
        )
        serves = shared.synapse_replication.direct_tcp.listen or any(
            listener.type == "replication" for listener in shared.worker_listeners
        )
        if not failed and not serves:
            self._problem(
                ("redis", "enabled"),
                "there is no way to the other processes",
                "write `redis: {enabled: true}` with its host and port, or, for "
                "direct TCP, worker_replication_host and worker_replication_port",
            )
        return ()

    def _listeners(self) -> tuple[Listener, ...]:
        if self._purpose is Purpose.FOLLOW:
            return ()
        key = "worker_listeners" if self._is_worker else "listeners"
        sections: list[ListenerSection] = getattr(self._shared, key)
        listeners = []
        for index, section in enumerate(sections):
            direct_tcp = section.type == "replication"
            if not direct_tcp and not section.resource_names:
                continue
            if section.tls:
                self._tls_listeners.append((key, index, "tls"))
            listeners.append(
                Listener(
                    section.port,
                    section.path,
                    tuple(section.addresses),
                    section.resource_names,
                    direct_tcp,
                    section.tls,
                )
            )
        return tuple(listeners)

    def _instance_map(self) -> dict[str, InstanceLocation]:
        return {
            MAIN_INSTANCE if name == "main" else name: InstanceLocation(
                section.host, section.port, section.tls, section.path
            )
            for name, section in self._shared.instance_map.items()
        }

    # -- who writes what ----------------------------------------------------------

    def _writers(
        self, streams: tuple[str | TableStream, ...]
    ) -> dict[str, tuple[str, ...]]:
        configured = self._shared.stream_writers
        declared = {s.name: s for s in streams if isinstance(s, TableStream)}
        standard_keys = {s.writers_key for s in STANDARD_STREAMS.values()} - {None}
        known = {key for key in standard_keys if key is not None} | set(declared)
        known_instances = {MAIN_INSTANCE, *self._shared.instance_map} - {"main"}
        for key, names in configured.items():
            path = ("stream_writers", key)
            if key not in known:
                meant = did_you_mean(key, known)
                self._problem(
                    path,
                    "there is no such stream",
                    f"did you mean {meant!r}?"
                    if meant
                    else f"write one of {', '.join(sorted(known))}",
                )
            if not names:
                self._problem(
                    path,
                    "names no instance",
                    f"name one, or leave the key out for {MAIN_INSTANCE}",
                )
            if len(set(names)) < len(names):
                self._problem(path, "names an instance twice", "name each once")
            if key in SINGLE_WRITER_KEYS and key not in declared and len(names) > 1:
                self._problem(path, "may have one writer only", "name one instance")
            self._check_instances(path, names, known_instances)
        writers: dict[str, tuple[str, ...]] = {}
        for index, stream in enumerate(streams):
            place = (OWN_SECTION, "streams", index)
            name = stream if isinstance(stream, str) else stream.name
            if name in writers:
                self._problem(
                    place, f"{name} is declared twice", "give one another name"
                )
            if isinstance(stream, TableStream) and name not in configured:
                self._check_instances(
                    (*place, "writers"), list(stream.writers), known_instances
                )
            if isinstance(stream, TableStream):
                writers[stream.name] = tuple(
                    configured.get(stream.name, stream.writers)
                )
            elif STANDARD_STREAMS[stream].anybody_writes:
                writers[stream] = ()
            else:
                key = STANDARD_STREAMS[stream].writers_key or ""
                writers[stream] = tuple(configured.get(key) or (MAIN_INSTANCE,))
        return writers

    def _check_instances(self, path: Path_, names: list[str], known: set[str]) -> None:
        for index, name in enumerate(names):
            if name in known or "instance_map" in self._failed_keys():
                continue
            if name == "main":
                self._problem(
                    (*path, index),
                    "the main process is not called 'main' as a writer",
                    f"write {MAIN_INSTANCE}",
                )
                continue
            meant = did_you_mean(name, known)
            self._problem(
                (*path, index),
                f"instance {name!r} is not in instance_map",
                f"did you mean {meant!r}?"
                if meant
                else f"add it: `instance_map: {{{name}: {{host: ..., port: ...}}}}`",
            )

    def _failed_keys(self) -> set[str]:
        return {problem.key.split(".")[0].split("[")[0] for problem in self._problems}

    def _check_rows_can_be_asked_for(self, config: ProcessConfig) -> None:
        in_memory = [
            stream
            for stream in config.streams
            if isinstance(stream, str)
            and STANDARD_STREAMS[stream].description.held_in_memory
            and config.instance_name in config.writers[stream]
        ]
        if "worker_listeners" in self._failed_keys() or any(
            "replication" in listener.resources for listener in config.listeners
        ):
            return
        if in_memory:
            self._problem(
                ("worker_listeners",),
                f"this worker writes {', '.join(in_memory)}, which others must ask it "
                "for, but it does not listen",
                "add `- {type: http, port: ..., resources: [{names: [replication]}]}`, "
                "the same port as in instance_map",
            )


def _why_no_conninfo(conninfo: Mapping[str, Any]) -> str | None:
    """Ask the driver, if it is there, what is wrong with the parameters.

    It names the parameter, and repeats no value.
    """
    try:
        from psycopg2 import ProgrammingError
        from psycopg2.extensions import make_dsn
    except ModuleNotFoundError:
        # What needs it says so at the start.
        return None
    try:
        make_dsn(**conninfo)
    except ProgrammingError as error:
        return " ".join(str(error).split())
    return None


def _quote(text: str) -> str:
    """Escape a text for an endpoint description, as quoteStringArgument() does.

    Written here because the pipeline, which loads configuration on machines without
    a reactor, may not import Twisted.
    """
    return text.replace("\\", "\\\\").replace(":", "\\:")


def _factory(section: FactorySection) -> FactoryConfig:
    return FactoryConfig(section.module, section.config)
