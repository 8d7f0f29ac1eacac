"""The configuration of one process: parsed and checked once, immutable afterwards.

:func:`load_config` reads Synapse's configuration files and returns a
:class:`ProcessConfig`, or raises one :class:`~synapse_replication.errors.ConfigError`
with every problem that it found: file, key and hint. See docs/operators-guide.rst.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import attrs
from twisted.internet.endpoints import quoteStringArgument

from synapse_replication.config.deployment import (
    DatabaseConfig,
    are_stored,
    failed_keys,
    read_database,
    read_shared,
    read_streams,
    read_writers,
)
from synapse_replication.config.files import (
    OWN_SECTION,
    KeyPath,
    MergedFiles,
    read_secret,
)
from synapse_replication.config.listener_safety import unprotected_listeners
from synapse_replication.config.models import ListenerSection, SharedFile
from synapse_replication.config.own_section import FactorySection
from synapse_replication.config.process_parts import (
    ExtensionConfig,
    FactoryConfig,
    HttpConfig,
    InstanceLocation,
    Listener,
)
from synapse_replication.config.redis import RedisConfig, read_redis
from synapse_replication.config.sanity import (
    clashing_listeners,
    mistyped_keys,
    readable_secrets,
    why_no_secret,
)
from synapse_replication.config.tls import TlsConfig, read_tls
from synapse_replication.config.tracing import TracingConfig, read_tracing
from synapse_replication.errors import ConfigError, ConfigProblem
from synapse_replication.streams.positions import PLAUSIBLE_DISTANCE
from synapse_replication.streams.standard.registry import (
    MAIN_INSTANCE,
    STANDARD_STREAMS,
)
from synapse_replication.streams.table import TableStream
from synapse_replication.wire.pending import PendingLimit


class Purpose(enum.Enum):
    """The purpose for which the configuration is read."""

    MAIN = "main"
    WORKER = "worker"
    FOLLOW = "follow"  #: a command that only observes: needs a link, but no database


@attrs.frozen
class ReceivingConfig:
    """Limits of the data and positions that are accepted from peers.

    :ivar plausible_distance: the most ids by which a position may exceed the last known
        value of the stream's sequence without being verified. For a stream held in
        memory, the position is compared with the writer's last known position.
    :ivar max_queue_bytes: the most bytes of each stream that wait for a slow row sink,
        and the most bytes of an unfinished batch.
    :ivar max_batch_rows: the most rows of an unfinished batch.
    """

    plausible_distance: int = PLAUSIBLE_DISTANCE
    max_queue_bytes: int = 8 * 1024 * 1024
    max_batch_rows: int = 10_000


@attrs.frozen(kw_only=True)
class ProcessConfig:
    """The configuration of one process.

    :ivar files: the files from which it was read.
    :ivar instance_name: ``master`` for the main process, and for
        :attr:`Purpose.FOLLOW`.
    :ivar redis: ``None`` if Redis is not enabled.
    :ivar tcp_connect: the endpoint descriptions of the direct TCP listeners to which
        this process connects; empty if Redis is used. A listener sends only the rows
        that its own process writes, so there must be one for each process whose rows
        this process needs.
    :ivar tcp_listen: endpoint descriptions on which to serve direct TCP, in addition to
        the direct TCP listeners in ``listeners``.
    :ivar listeners: the direct TCP listeners, and the HTTP listeners that serve a
        resource of this package; empty for :attr:`Purpose.FOLLOW`.
    :ivar streams: standard streams (by name) and declared ones.
    :ivar writers: the writers of each stream, by its name on the wire; empty for a
        stream that every instance may write.
    :ivar replication_secret: the ``worker_replication_secret``.
    :ivar stores_user_ips: whether this process stores client IPs.
    :ivar command_sink: the factory of the sink for commands that carry no rows;
        ``None`` for the default sink.
    :ivar torture_level: the longest random delay of each stream in ms, to find races
        in its readers; 0 for none.
    :ivar tcp_limit: the most pending data for a direct TCP peer that does not read.
    :ivar max_tcp_connections: the most open connections of all direct TCP listeners
        together.
    :ivar http: the limits of the HTTP listeners.
    :ivar receiving: the limits of the data and positions that are accepted from peers.
    :ivar tls: the files for TLS between instances.
    :ivar extension: ``None`` if this process does not use the extension.
    :ivar log_level: the lowest level that is logged.
    :ivar tracing: the collector that receives spans; ``None`` for none.
    :ivar warnings: problems that do not prevent the start: files with secrets that
        every user of this machine can read.
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
    max_tcp_connections: int = 500
    http: HttpConfig = attrs.field(factory=HttpConfig)
    receiving: ReceivingConfig = attrs.field(factory=ReceivingConfig)
    tls: TlsConfig = attrs.field(factory=TlsConfig)
    extension: ExtensionConfig | None = attrs.field(factory=ExtensionConfig)
    log_level: str = "info"
    tracing: TracingConfig | None = None
    warnings: tuple[ConfigProblem, ...] = ()

    @property
    def is_main(self) -> bool:
        """Whether the instance name is that of the main process.

        This is also true for :attr:`Purpose.FOLLOW`.
        """
        return self.instance_name == MAIN_INSTANCE


def load_config(paths: Sequence[str], purpose: Purpose | None = None) -> ProcessConfig:
    """Read, merge and check configuration files.

    :param paths: YAML files, or folders of them; later files take precedence.
    :param purpose: the purpose of the process. ``None`` stands for
        :attr:`Purpose.WORKER` if the files set ``worker_name`` or ``worker_app``, and
        otherwise for :attr:`Purpose.MAIN`.
    :raises ConfigError: if the configuration is invalid; the error lists all problems.
    """
    problems: list[ConfigProblem] = []
    merged, shared = read_shared(paths, problems)
    if shared is not None:
        config = _Checks(merged, shared, problems, purpose).run()
        if not problems:
            return config
    raise ConfigError(problems)


class _Checks:
    """Checks several sections together, and makes the configuration from them."""

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
        #: The key paths of ``tls: true`` in this process's listeners.
        self._tls_listeners: list[KeyPath] = []

    # This method is long because it sets every attribute of the configuration.
    def run(self) -> ProcessConfig:
        shared, own = self._shared, self._shared.synapse_replication
        redis = read_redis(shared.redis, self._merged, self._problems)
        streams = read_streams(shared)
        instance_name = self._instance_name()
        writers = read_writers(shared, self._merged, self._problems, streams)
        config = ProcessConfig(
            files=self._merged.files,
            server_name=shared.server_name,
            instance_name=instance_name,
            database=read_database(
                shared,
                self._merged,
                self._problems,
                is_needed=self._purpose is not Purpose.FOLLOW and are_stored(streams),
            ),
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
            receiving=ReceivingConfig(
                own.receiving.plausible_distance,
                own.receiving.max_queue_bytes,
                own.receiving.max_batch_rows,
            ),
            max_tcp_connections=own.direct_tcp.max_connections,
            http=HttpConfig(
                (
                    *own.http.allowed_hosts,
                    *(m.host for m in shared.instance_map.values() if m.host),
                ),
                own.http.max_connections,
            ),
            extension=ExtensionConfig(
                own.extension.backlog_rows, own.extension.backlog_bytes
            )
            if own.extension.enabled
            else None,
            log_level=own.log_level,
            tracing=read_tracing(own.tracing, self._merged, self._problems),
        )
        if not failed_keys(self._problems) & {OWN_SECTION, "worker_replication_secret"}:
            key = "worker_listeners" if self._is_worker else "listeners"
            has_secret = bool(config.replication_secret)
            if self._purpose is not Purpose.FOLLOW:
                for path, problem, hint in unprotected_listeners(
                    shared, key, has_secret
                ):
                    self._problem(path, problem, hint)
        if self._is_worker:
            self._check_rows_can_be_requested(config)
        self._check_sanity(config)
        return attrs.evolve(config, warnings=tuple(readable_secrets(self._merged)))

    def _check_sanity(self, config: ProcessConfig) -> None:
        shared = self._shared
        findings = list(mistyped_keys(self._merged.values))
        if self._purpose is not Purpose.FOLLOW:
            key = "worker_listeners" if self._is_worker else "listeners"
            listen = shared.synapse_replication.direct_tcp.listen
            findings += clashing_listeners(key, getattr(shared, key), listen)
        if why := why_no_secret(config.replication_secret):
            secret = ("worker_replication_secret",)
            hint = "write a long random secret, for instance the output of pwgen -s 32"
            findings.append((secret, why, hint))
        for path, problem, hint in findings:
            self._problem(path, problem, hint)

    def _problem(self, path: KeyPath, problem: str, hint: str) -> None:
        self._problems.append(self._merged.problem(path, problem, hint))

    # -- the instance's name ------------------------------------------------------

    def _instance_name(self) -> str:
        name = self._shared.worker_name
        if not self._is_worker:
            if name is not None and self._purpose is Purpose.MAIN:
                self._problem(
                    ("worker_name",),
                    "the main process must not have a worker_name",
                    "omit this file, or start `synapse-replication worker`",
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
                f"{name!r} is the name of the main process",
                "write a name that no other process of this homeserver has",
            )
        return name

    # -- links and listeners ------------------------------------------------------

    def _tcp_connect(self, redis: RedisConfig | None) -> tuple[str, ...]:
        if redis is not None:
            return ()
        shared = self._shared
        descriptions = tuple(shared.synapse_replication.direct_tcp.connect)
        if descriptions or self._purpose is Purpose.MAIN:
            return descriptions
        if shared.worker_replication_port is not None:
            host = quoteStringArgument(  # type: ignore[no-untyped-call]
                shared.worker_replication_host or "localhost"
            )
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
                "there is no link to the other processes",
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

    def _check_rows_can_be_requested(self, config: ProcessConfig) -> None:
        in_memory = [
            stream
            for stream in config.streams
            if isinstance(stream, str)
            and STANDARD_STREAMS[stream].description.held_in_memory
            and config.instance_name in config.writers[stream]
        ]
        if "worker_listeners" in failed_keys(self._problems) or any(
            "replication" in listener.resources for listener in config.listeners
        ):
            return
        if in_memory:
            self._problem(
                ("worker_listeners",),
                f"this worker writes to {', '.join(in_memory)}, but has no replication "
                "listener from which readers can request these rows",
                "add `- {type: http, port: ..., resources: [{names: [replication]}]}`, "
                "with the same port as in instance_map",
            )


def _factory(section: FactorySection) -> FactoryConfig:
    return FactoryConfig(section.module, section.config)
