"""The configuration of one process: parsed and checked once, immutable afterwards.

:func:`load_config` reads Synapse's configuration files and returns a
:class:`ProcessConfig`, or raises one :class:`~synapse_replication.errors.ConfigError`
with every problem that it found: file, key and hint. See docs/operators-guide.rst.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import attrs
from msgspec.structs import asdict
from typing_extensions import override

from synapse_replication.config import deployment, sanity
from synapse_replication.config.models import SharedFile
from synapse_replication.config.own_section import FactorySection, OwnSection
from synapse_replication.config.redis import read_redis
from synapse_replication.config.replication_options import ReplicationOptions
from synapse_replication.config.yaml_files import (
    OWN_SECTION,
    KeyPath,
    MergedFiles,
    read_secret,
)
from synapse_replication.data_files import read_table
from synapse_replication.errors import ConfigError, ConfigProblem
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.redis.options import RedisOptions
from synapse_replication.streams.backlog import BacklogOptions
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from synapse_replication.transport.tls import TlsConfig
from synapse_replication.wire.pending_lines import PendingLimit

#: The purpose for which the configuration is read: ``follow`` for a command that only
#: observes, which needs a link, but no database.
Purpose: TypeAlias = Literal["main", "worker", "follow"]

#: A module that exists if the extra ``otlp`` is installed.
EXPORTER = "opentelemetry.exporter.otlp.proto.http"

#: The keys of the options that have other names in the files.
_KEYS = {
    row["Option"]: row["Key"]
    for row in read_table(Path(__file__).with_name("keys.csv"))
}


@attrs.frozen(kw_only=True)
class ProcessConfig(ReplicationOptions):
    """The configuration of one process: its options, and what only files can set.

    :ivar instance_name: ``master`` for the main process, and for ``follow``.
    :ivar listeners: the direct TCP listeners, and the HTTP listeners that serve a
        resource of this package; empty for ``follow``.
    :ivar files: the files from which it was read.
    :ivar row_sink: the factory of the sink for rows; ``None`` for none.
    :ivar command_sink: the factory of the sink for commands that carry no rows;
        ``None`` for the default sink.
    :ivar modules: the functions to call before replication starts.
    :ivar log_level: the lowest level that is logged.
    :ivar warnings: problems that do not prevent the start: files with secrets that
        every user of this machine can read.
    """

    files: Sequence[str]
    row_sink: FactorySection | None = None
    command_sink: FactorySection | None = None
    modules: tuple[FactorySection, ...] = ()
    log_level: str = "info"
    warnings: tuple[ConfigProblem, ...] = ()

    def key_of(self, option: str) -> str:
        """Return the dotted key that sets an option."""
        if option == "listeners" and not self.is_main:
            return "worker_listeners"
        if option in OwnSection.__struct_fields__:
            return f"{OWN_SECTION}.{option}"
        return _KEYS.get(option, option)

    @override
    def find_problems(self) -> list[ConfigProblem]:
        # load_config() found none.
        return []

    @override
    def problem(self, option: str, problem: str, hint: str) -> ConfigProblem:
        name = re.split(r"[.[]", option, maxsplit=1)[0]
        key = self.key_of(name) + option[len(name) :]
        return ConfigProblem(", ".join(self.files), key, problem, hint)


def load_config(paths: Sequence[str], purpose: Purpose | None = None) -> ProcessConfig:
    """Read, merge and check configuration files.

    :param paths: YAML files, or folders of them; later files take precedence.
    :param purpose: the purpose of the process. ``None`` stands for ``worker`` if the
        files set ``worker_name`` or ``worker_app``, and otherwise for ``main``.
    :raises ConfigError: if the configuration is invalid; the error lists all problems.
    """
    merged, shared = deployment.read_shared(paths)
    config = _Checks(merged, shared, purpose).make_config()
    if merged.problems:
        raise ConfigError(merged.problems)
    return config


class _Checks:
    """Checks several sections together, and makes the configuration from them."""

    def __init__(
        self, merged: MergedFiles, shared: SharedFile, purpose: Purpose | None
    ) -> None:
        self._merged = merged
        self._shared = shared
        self._problem = merged.report
        if purpose is None:
            is_worker = any(merged.values.get(k) for k in ("worker_name", "worker_app"))
            purpose = "worker" if is_worker else "main"
        self._purpose = purpose
        self._is_worker = purpose == "worker"
        self._listeners_key = "worker_listeners" if self._is_worker else "listeners"
        sections = shared.worker_listeners if self._is_worker else shared.listeners
        self._listeners = [section.to_listener() for section in sections]
        #: Those with a resource of this package, by their index.
        self._served = {
            index: listener
            for index, listener in enumerate(self._listeners)
            if purpose != "follow" and (listener.direct_tcp or listener.resources)
        }

    # This method is long because it sets every attribute of the configuration.
    def make_config(self) -> ProcessConfig:
        shared, own = self._shared, self._shared.synapse_replication
        redis = read_redis(shared.redis, self._merged)
        streams = deployment.read_streams(shared)
        instance_name = self._instance_name()
        writers = deployment.read_writers(shared, self._merged, streams)
        config = ProcessConfig(
            files=self._merged.files,
            server_name=shared.server_name,
            instance_name=instance_name,
            creates_tables=instance_name == MAIN_INSTANCE,
            fill_sink=own.fill_sink,
            writer_lock=own.writer_lock,
            database=deployment.read_database(
                shared, self._merged, () if self._purpose == "follow" else streams
            ),
            redis=redis,
            tcp_connect=self._tcp_connect(redis),
            tcp_listen=tuple(own.direct_tcp.listen),
            listeners=tuple(self._served.values()),
            tls=self._tls(),
            streams=streams,
            writers=writers,
            instances={
                MAIN_INSTANCE if name == "main" else name: location
                for name, location in shared.instance_map.items()
            },
            secret=read_secret(shared, ("worker_replication_secret",), self._merged),
            stores_user_ips=self._stores_user_ips(instance_name, redis),
            federation_senders=tuple(shared.federation_sender_instances),
            row_sink=own.row_sink,
            command_sink=own.command_sink,
            modules=tuple(own.modules),
            torture_level=shared.replication_torture_level or 0,
            tcp_limit=PendingLimit(
                own.direct_tcp.max_pending_commands, own.direct_tcp.max_pending_bytes
            ),
            receiving=ReceiverOptions(
                max_queue_size=own.receiving.max_queue_bytes,
                max_batch_rows=own.receiving.max_batch_rows,
                plausible_distance=own.receiving.plausible_distance,
                position_check_seconds=own.receiving.position_check_seconds,
            ),
            max_tcp_connections=own.direct_tcp.max_connections,
            allowed_hosts=tuple(own.http.allowed_hosts),
            max_http_connections=own.http.max_connections,
            backlog=BacklogOptions(
                own.extension.backlog_rows, own.extension.backlog_bytes
            )
            if own.extension.enabled
            else None,
            log_level=own.log_level,
            tracing=own.tracing,
            warnings=tuple(sanity.readable_secrets(self._merged)),
        )
        if own.tracing is not None and not _can_export():
            self._problem(
                (OWN_SECTION, "tracing"),
                "the exporter for spans is not installed",
                "install synapse_replication[otlp], or remove this section",
            )
        failed = self._merged.failed_keys()
        if not failed & {OWN_SECTION, "worker_replication_secret"}:
            self._check_exposure(config)
        if self._is_worker:
            self._check_rows_can_be_requested(config)
        self._check_sanity(config)
        return config

    def _check_exposure(self, config: ProcessConfig) -> None:
        """Check that no untrusted client can use the listeners for replication."""
        own = self._shared.synapse_replication
        if self._purpose == "follow" or own.allow_unprotected_listeners:
            return
        listeners = list(self._served)
        for option, index, problem, hint in config.find_unprotected():
            path: KeyPath = (OWN_SECTION, "direct_tcp", "listen", index)
            if option == "listeners":
                path = (self._listeners_key, listeners[index], "bind_addresses")
            self._problem(path, problem, hint)

    def _check_sanity(self, config: ProcessConfig) -> None:
        key, listeners = self._listeners_key, self._listeners
        findings = list(sanity.mistyped_keys(self._merged.values))
        if self._purpose != "follow":
            listen = self._shared.synapse_replication.direct_tcp.listen
            findings += sanity.clashing_listeners(key, listeners, listen)
        findings += sanity.bad_secret(config.secret)
        for path, problem, hint in findings:
            self._problem(path, problem, hint)

    def _stores_user_ips(self, instance_name: str, redis: RedisOptions | None) -> bool:
        """Return whether this process stores client IPs.

        Over direct TCP, workers send them to the main process only.
        """
        owner = self._shared.run_background_tasks_on or MAIN_INSTANCE
        return owner == instance_name or (redis is None and not self._is_worker)

    # -- the instance's name ------------------------------------------------------

    def _instance_name(self) -> str:
        name = self._shared.worker_name
        if not self._is_worker:
            if name is not None and self._purpose == "main":
                self._problem(
                    ("worker_name",),
                    "the main process must not have a worker_name",
                    "omit this file, or start `synapse-replication worker`",
                )
            return MAIN_INSTANCE
        problem = None
        if name in (MAIN_INSTANCE, "main"):
            problem = f"{name!r} is the name of the main process"
        elif "worker_name" not in self._merged.values:
            problem = "is missing"
        if problem is not None:
            hint = "write a name that no other process of this homeserver has"
            self._problem(("worker_name",), problem, hint)
        return name or "unnamed"

    # -- links and listeners ------------------------------------------------------

    def _tcp_connect(self, redis: RedisOptions | None) -> tuple[str, ...]:
        if redis is not None:
            return ()
        shared = self._shared
        descriptions = tuple(shared.synapse_replication.direct_tcp.connect)
        if descriptions or self._purpose == "main":
            return descriptions
        if shared.worker_replication_port is not None:
            # Imported here, because it takes 0.3 MiB and only direct TCP needs it.
            from twisted.internet.endpoints import quoteStringArgument

            host = quoteStringArgument(  # type: ignore[no-untyped-call]
                shared.worker_replication_host or "localhost"
            )
            return (f"tcp:{host}:{shared.worker_replication_port}",)
        failed = self._merged.failed_keys() & {
            "redis",
            OWN_SECTION,
            "worker_replication_port",
        }
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

    def _tls(self) -> TlsConfig:
        """Return the files for TLS, and check that they can be used.

        Listeners use Synapse's keys ``tls_certificate_path`` and
        ``tls_private_key_path``, unless ``synapse_replication.tls`` overrides them.

        The files for connecting are always checked. The files of the listeners are
        checked only if those for connecting are valid and a listener uses TLS.
        """
        shared, own = self._shared, self._shared.synapse_replication.tls
        pair: tuple[str | None, str | None] = own.certificate_file, own.private_key_file
        if pair == (None, None):
            pair = shared.tls_certificate_path, shared.tls_private_key_path
        config = TlsConfig(
            **asdict(own),
            listener_certificate_file=pair[0],
            listener_private_key_file=pair[1],
        )
        try:
            config.for_connecting("localhost")
        except (OSError, ValueError) as error:
            hint = "name PEM files that can be read"
            self._problem((OWN_SECTION, "tls"), str(error), hint)
            return config
        for index, listener in self._served.items():
            try:
                if listener.tls:
                    config.for_listening()
            except (OSError, ValueError) as error:
                self._problem(
                    (self._listeners_key, index, "tls"),
                    f"this listener cannot use TLS: {error}",
                    "write tls_certificate_path and tls_private_key_path, or "
                    f"{OWN_SECTION}.tls.certificate_file and private_key_file",
                )
        return config

    def _check_rows_can_be_requested(self, config: ProcessConfig) -> None:
        in_memory = [
            name
            for name, stream in config.declared.items()
            if stream.description.held_in_memory and config.writes(name)
        ]
        failed = "worker_listeners" in self._merged.failed_keys()
        serves = any("replication" in each.resources for each in config.listeners)
        if in_memory and not (failed or serves):
            self._problem(
                ("worker_listeners",),
                f"this worker writes to {', '.join(in_memory)}, but has no replication "
                "listener from which readers can request these rows",
                "add `- {type: http, port: ..., resources: [{names: [replication]}]}`, "
                "with the same port as in instance_map",
            )


def _can_export() -> bool:
    """Return whether the extra ``otlp`` is installed."""
    try:
        return importlib.util.find_spec(EXPORTER) is not None
    except ModuleNotFoundError:
        return False
