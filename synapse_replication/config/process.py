"""The configuration of one process: parsed and checked once, immutable afterwards.

:func:`load_config` reads Synapse's configuration files and returns a
:class:`ProcessConfig`, or raises one :class:`~synapse_replication.errors.ConfigError`
with every problem that it found: file, key and hint. See docs/operators-guide.rst.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import attrs
from typing_extensions import override

from synapse_replication.config import deployment, sanity
from synapse_replication.config.models import MAIN_APP, SynapseFile
from synapse_replication.config.redis import read_redis
from synapse_replication.config.replication_options import (
    OptionProblem,
    ReplicationOptions,
)
from synapse_replication.config.structuring import StrictSection, read_value
from synapse_replication.config.yaml_files import (
    OWN_SECTION,
    KeyPath,
    MergedFiles,
    read_secret,
)
from synapse_replication.errors import ConfigError, ConfigProblem
from synapse_replication.options import (
    Leaf,
    build,
    declared_option,
    leaves,
    metadata_of,
    option,
)
from synapse_replication.redis.options import RedisOptions
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from synapse_replication.transport.tls import TlsConfig

#: The purpose for which the configuration is read: ``follow`` for a command that only
#: observes, which needs a link, but no database; ``status`` for one that asks the
#: instances, which needs neither.
Purpose: TypeAlias = Literal["main", "worker", "follow", "status"]


@attrs.frozen(repr=False, kw_only=True)
class FactorySection(StrictSection):
    """A function that you provide.

    :ivar module: dotted name of the function, for instance ``shop.sinks.make_sink``.
    :ivar config: mapping that is passed to the function unchanged.
    """

    module: str = attrs.field(
        metadata=option(
            pattern=r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+",
            hint="write the dotted name of a function, for instance "
            "my_package.my_module.make_sink",
        )
    )
    config: dict[str, Any] = attrs.field(factory=dict, metadata=option())


@attrs.frozen(kw_only=True, eq=False)
class ProcessConfig(ReplicationOptions):
    """The configuration of one process: its options, and what only files can set.

    :ivar instance_name: ``master`` for the main process, and for ``follow``.
    :ivar listeners: the direct TCP listeners, and the HTTP listeners that serve a
        resource of this package; empty for ``follow``.
    :ivar files: the files from which it was read.
    :ivar row_sink: ``factory(host, config) -> RowSink``: the sink receives the rows.
    :ivar command_sink: ``factory(host, config) -> CommandSink``: the sink receives the
        commands for the host, such as ``USER_SYNC``.
    :ivar modules: ``factory(host, config) -> IService | None``: each factory is called
        before replication starts; the service that it returns runs inside this process.
    :ivar log_level: the lowest level that is logged.
    :ivar warnings: problems that do not prevent the start: files with secrets that
        every user of this machine can read.
    """

    files: Sequence[str]
    row_sink: FactorySection | None = attrs.field(
        default=None, metadata=option("synapse_replication.row_sink")
    )
    command_sink: FactorySection | None = attrs.field(
        default=None, metadata=option("synapse_replication.command_sink")
    )
    modules: tuple[FactorySection, ...] = attrs.field(
        default=(), metadata=option("synapse_replication.modules")
    )
    log_level: Literal["debug", "info", "warn", "error", "critical"] = attrs.field(
        default="info", metadata=option("synapse_replication.log_level")
    )
    warnings: tuple[ConfigProblem, ...] = ()

    def key_of(self, name: str) -> str:
        """Return the dotted key that sets an option, from the attribute's name."""
        if name == "listeners" and not self.is_main:
            return "worker_listeners"
        declared = declared_option(getattr(attrs.fields(type(self)), name))
        if declared is None:
            return name
        switch = f".{declared.switch}" if declared.switch else ""
        return (declared.key or name) + switch

    @property
    @override
    def _must_serve_rows(self) -> bool:
        # A main process without workers needs no listener.
        return self.has_links and not self.is_main

    @override
    def problem(self, option: str, problem: str, hint: str) -> ConfigProblem:
        name = re.split(r"[.[]", option, maxsplit=1)[0]
        key = self.key_of(name) + option[len(name) :]
        return ConfigProblem(", ".join(self.files), key, problem, hint)


def own_leaves() -> Iterator[Leaf]:
    """Yield the options whose keys are in this package's section of the files."""
    return (leaf for leaf in leaves(ProcessConfig) if leaf.key[0] == OWN_SECTION)


def read_own_section(merged: MergedFiles) -> dict[str, Any]:
    """Read this package's section, except for ``streams``.

    :return: the options with a valid value, by the attribute of :class:`ProcessConfig`.
    """
    path = (OWN_SECTION,)
    section = read_value(_own_section(), merged.values.get(OWN_SECTION), path, merged)
    values = {}
    for leaf in own_leaves():
        value = section
        for step in leaf.key[1:]:
            value = getattr(value, step, _NOT_SET)
        if value is not _NOT_SET and leaf.attributes != ("streams",):
            values[leaf.key] = value
    return build(ProcessConfig, values)


#: The value of an option that the files do not set.
_NOT_SET: Final[Any] = object()


@functools.cache
def _own_section() -> type[StrictSection]:
    return _section_class((OWN_SECTION,), list(own_leaves()))


def _section_class(path: KeyPath, leaves: Sequence[Leaf]) -> type[StrictSection]:
    """Return the class of a section, whose attributes are its keys.

    :param leaves: the options in the section, and in those in it.
    """
    below: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        below.setdefault(leaf.key[len(path)], []).append(leaf)
    attributes: dict[str, Any] = {}
    for key, inner in below.items():
        leaf, inner_path = inner[0], (*path, key)
        if leaf.key != inner_path:
            section = _section_class(inner_path, inner)
            kind: Any = section | None
            attributes[key] = attrs.field(default=_NOT_SET, type=kind)
            continue
        attributes[key] = attrs.field(
            default=attrs.NOTHING if leaf.default is attrs.NOTHING else _NOT_SET,
            # The entries of streams are read later.
            type=Any if leaf.attributes == ("streams",) else leaf.type,
            metadata=metadata_of(leaf.option),
        )
    return attrs.make_class(
        "_".join(map(str, path)),
        attributes,
        bases=(StrictSection,),
        frozen=True,
        kw_only=True,
        repr=False,
        eq=False,
    )


def load_config(paths: Sequence[str], purpose: Purpose | None = None) -> ProcessConfig:
    """Read, merge and check configuration files.

    :param paths: YAML files, or folders of them; later files take precedence.
    :param purpose: the purpose of the process. ``None`` stands for ``worker`` if the
        files set ``worker_name`` or ``worker_app``, and otherwise for ``main``.
    :raises ConfigError: if the configuration is invalid; the error lists all problems.
    """
    merged, shared = deployment.read_shared(paths)
    streams = deployment.read_streams(merged)
    own = read_own_section(merged)
    reader = _ConfigBuilder(merged, shared, {**own, "streams": streams}, purpose)
    config = reader.make_config()
    if merged.problems:
        raise ConfigError(merged.problems)
    return config


def _is_worker(values: Mapping[str, Any]) -> bool:
    """Return whether files are those of a worker.

    Templates write the ``worker_app`` of the main process into its file.
    """
    app = values.get("worker_app")
    return bool(values.get("worker_name") or (app and app != MAIN_APP))


class _ConfigBuilder:
    """Makes the configuration of a process from sections, which it checks together.

    :param own: the options that this package's section sets.
    """

    def __init__(
        self,
        merged: MergedFiles,
        shared: SynapseFile,
        own: dict[str, Any],
        purpose: Purpose | None,
    ) -> None:
        self._merged = merged
        self._shared = shared
        self._own = own
        self._problem = merged.report
        if purpose is None:
            purpose = "worker" if _is_worker(merged.values) else "main"
        self._purpose = purpose
        self._is_worker = purpose == "worker"
        self._is_observer = purpose in ("follow", "status")
        self._listeners_key = "worker_listeners" if self._is_worker else "listeners"
        sections = shared.worker_listeners if self._is_worker else shared.listeners
        self._listeners = [section.to_listener() for section in sections]
        #: Those with a resource of this package, by their index.
        self._served = {
            index: listener
            for index, listener in enumerate(self._listeners)
            if not self._is_observer and (listener.direct_tcp or listener.resources)
        }

    def make_config(self) -> ProcessConfig:
        """Return the configuration; problems are reported."""
        shared, own, merged = self._shared, self._own, self._merged
        redis = read_redis(shared.redis, merged)
        streams = own["streams"]
        instance_name = self._instance_name()
        writers = deployment.read_writers(shared, merged, streams)
        if not self._is_observer:
            self._check_addresses()
        config = ProcessConfig(
            files=merged.files,
            server_name=shared.server_name,
            instance_name=instance_name,
            creates_tables=instance_name == MAIN_INSTANCE,
            database=deployment.read_database(
                shared, merged, () if self._is_observer else streams
            ),
            redis=redis,
            tcp_connect=self._tcp_connect(redis),
            listeners=tuple(self._served.values()),
            tls=self._tls(),
            writers=writers,
            instances={
                MAIN_INSTANCE if name == "main" else name: location
                for name, location in shared.instance_map.items()
            },
            secret=read_secret(shared, ("worker_replication_secret",), merged),
            stores_user_ips=self._stores_user_ips(instance_name),
            federation_senders=tuple(shared.federation_sender_instances),
            torture_level=shared.replication_torture_level or 0,
            warnings=tuple(sanity.readable_secrets(merged)),
            **{k: own[k] for k in own if k not in ("tls", "tcp_connect")},
        )
        if self._purpose == "follow":
            self._check(config, config.link_problems())
        elif self._purpose != "status":
            self._check(config, config.option_problems())
        self._check_sanity()
        return config

    def _check(self, config: ProcessConfig, problems: Iterator[OptionProblem]) -> None:
        """Report problems that do not result from values that are invalid anyway."""
        listeners, failed = list(self._served), self._merged.failed_keys()
        if "databases" in failed:
            failed.add("database")
        for found in list(problems):
            name, *inner = found.option.split(".")
            at = found.at
            if name == "listeners" and at:
                at = (listeners[int(at[0])], *at[1:])
            keys = {config.key_of(each).partition(".")[0] for each in found.needs}
            key = config.key_of(name).split(".")
            if not (keys | {key[0]}) & failed:
                path: KeyPath = (*key, *inner, *at)
                hint = found.file_hint or found.hint
                old_port = self._shared.worker_replication_http_port
                if found.option == "instances" and old_port:
                    host = self._shared.worker_replication_host or "localhost"
                    hint = (
                        f"write `instance_map: {{main: {{host: {host}, port: "
                        f"{old_port}}}}}`, which replaces worker_replication_host and "
                        "worker_replication_http_port"
                    )
                self._problem(path, found.problem, hint)

    def _check_addresses(self) -> None:
        """Check that no two instances have one address, as after copying a line."""
        known: dict[str, str] = {}
        for name, location in self._shared.instance_map.items():
            other = known.setdefault(location.text, name)
            if other != name:
                self._problem(
                    ("instance_map", name),
                    f"it has the same address as {other}: {location.text}",
                    "write the address of the replication listener of each instance",
                )

    def _check_sanity(self) -> None:
        key, listeners = self._listeners_key, self._listeners
        problems = list(sanity.mistyped_keys(self._merged.values))
        if not self._is_observer:
            listen = self._own.get("tcp_listen", ())
            problems += sanity.clashing_listeners(key, listeners, listen)
        for path, problem, hint in problems:
            self._problem(path, problem, hint)

    def _stores_user_ips(self, instance_name: str) -> bool:
        """Return whether this process needs client IPs.

        The instance that runs background tasks stores them. The main process needs them
        in any case, to send the notices that wait for a user.
        """
        is_owner = self._shared.run_background_tasks_on == instance_name
        return is_owner or not self._is_worker

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
        descriptions: tuple[str, ...] = self._own.get("tcp_connect", ())
        if descriptions or self._purpose in ("main", "status"):
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
        serves = self._own.get("tcp_listen") or any(
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
        """Return the files for TLS.

        Listeners use Synapse's keys ``tls_certificate_path`` and
        ``tls_private_key_path``, unless ``synapse_replication.tls`` overrides them.
        """
        shared = self._shared
        own: TlsConfig = self._own.get("tls", TlsConfig())
        pair: Any = own.certificate_file, own.private_key_file
        if (pair[0] is None) != (pair[1] is None):
            self._problem(
                (OWN_SECTION, "tls"),
                "a certificate and its private key must be configured together",
                "write both certificate_file and private_key_file, or neither",
            )
        if pair == (None, None):
            pair = shared.tls_certificate_path, shared.tls_private_key_path
        return attrs.evolve(
            own, listener_certificate_file=pair[0], listener_private_key_file=pair[1]
        )
