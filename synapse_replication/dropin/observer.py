"""The observers of replication inside a host: status, hooks, metrics, log, systemd.

Theory of operation: each homeserver object has one :class:`HostObservers`, created by
the first call of :func:`observers_of`; a process may contain several homeserver objects
(the host's tests create them). The observers write to the host's logs and metrics.
Metrics that the host already defines are updated in place, because its dashboards use
their names. The exception is a gauge whose value is computed by a function of the
replaced code: it is removed from the registry, and this package registers its own
metric under that name.

Once this package's command handler has started replication over Redis, the observers
check the status every few seconds, as in a stand-alone process: they log stalled
writers, call hooks, and notify systemd and its watchdog. The host itself reports
readiness, reloads and stops to systemd.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from twisted.internet.defer import Deferred
from twisted.logger import Logger, STDLibLogObserver
from typing_extensions import override

from synapse_replication import __version__
from synapse_replication.app.observers import ProcessObservers
from synapse_replication.dropin.homeserver import Homeserver, WorkerSettings
from synapse_replication.dropin.host_code import host_attribute
from synapse_replication.dropin.host_streams import declared_writers
from synapse_replication.dropin.settings import own_settings
from synapse_replication.dropin.synapse_host import HostClock
from synapse_replication.errors import HooksNotFoundError, SupervisorError
from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.instrumentation.hooks import ReplicationHooks
from synapse_replication.instrumentation.prometheus import METRICS, ReplicationMetrics
from synapse_replication.instrumentation.status.model import encode_status
from synapse_replication.instrumentation.status.status_observer import StatusObserver
from synapse_replication.transport.reactor import IReactor

if TYPE_CHECKING:
    from synapse_replication.app.supervision import SystemdNotifier
    from synapse_replication.app.tracing_export import SpanExport
    from synapse_replication.config.shared_options import TracingOptions
    from synapse_replication.storage.stuck_id_watch import StreamIds

#: Streams that are announced only if other instances send to remote servers.
_NOT_EXPECTED = frozenset({"federation"})

#: Modules of the host that define metrics whose names this package also uses.
_MODULES = (
    "synapse.replication.tcp.protocol",
    "synapse.replication.tcp.handler",
    "synapse.replication.tcp.resource",
    "synapse.replication.tcp.external_cache",
    "synapse.storage.util.id_generators",
)

_LOG_NAME = "synapse_replication"

#: The lines that are logged once the host has set up its log, with their levels.
_announcement: list[tuple[int, str]] = []

_observers: weakref.WeakKeyDictionary[Homeserver, HostObservers] = (
    weakref.WeakKeyDictionary()
)


class HostObservers(ProcessObservers):
    """Observers of the replication of one homeserver object."""

    def __init__(self, hs: Homeserver, metrics: ReplicationMetrics) -> None:
        server_name, instance_name = hs.hostname, hs.get_instance_name()
        self._reactor = hs.get_reactor()
        # A failure in Twisted's log would be a failure of the test in a test runner.
        self._logger = Logger(_LOG_NAME, observer=STDLibLogObserver(_LOG_NAME))
        tracing = own_settings().tracing
        super().__init__(
            server_name,
            HostClock(hs.get_clock(), self._reactor),
            StatusObserver(
                server_name,
                instance_name,
                _expected_writers(hs.config.worker),
                needs_link=bool(hs.config.redis.redis_enabled) and _links_are_ours(),
            ),
            metrics,
            self._logger,
            _export_spans(tracing, server_name, instance_name) if tracing else None,
        )
        self._systemd: SystemdNotifier | None = None

    @override
    def start(
        self,
        reactor: IReactor,
        handler: ReplicationCommandHandler,
        ids: Callable[[], Mapping[str, StreamIds]],
        damage: str,
    ) -> None:
        """Call the functions that subscribe to hooks, and start the periodic checks.

        Call this method when replication starts.

        :raises HooksNotFoundError: if one of these functions cannot be imported.
        """
        for subscribe in load_hooks(own_settings().hooks):
            subscribe(handler.host, {})
            self.hooks.module_loaded(subscribe)
        super().start(reactor, handler, ids, damage)
        self._start_systemd()

    def encode_status(self) -> bytes:
        """Return the current replication status as JSON."""
        return encode_status(self.status.snapshot())

    def stopping(self) -> None:
        """Report to hooks and to systemd that the process stops."""
        self.hooks.stopping()
        if self._systemd is not None:
            self._systemd.stopping()

    @override
    def stop(self) -> Deferred[None] | None:
        """End the periodic checks, and report the modules as unloaded.

        :return: a Deferred that fires when the last spans have been sent or discarded;
            ``None`` if spans are not exported.
        """
        super().stop()
        self.hooks.unload_modules()
        return None if self._spans is None else self._spans.stop(self._reactor)

    def _start_systemd(self) -> None:
        if "NOTIFY_SOCKET" not in os.environ:
            return
        from synapse_replication.app.supervision import (
            SystemdNotifier,
            open_notify_socket,
        )

        try:
            notify = open_notify_socket(os.environ, os.getpid())
        except SupervisorError as error:
            # The host starts nevertheless, as it would without this package.
            self._logger.error("Cannot notify systemd: {error}", error=error)
            return
        if notify is None:
            return
        self._systemd = SystemdNotifier(
            notify, self._clock, self.status.snapshot, reports_lifecycle=False
        )
        self._systemd.start()
        self._systemd.up()


def load_hooks(names: str) -> list[Callable[[Any, dict[str, Any]], object]]:
    """Import the functions that subscribe to hooks.

    :param names: dotted names, separated by commas.
    :raises HooksNotFoundError: if one of the functions cannot be imported.
    """
    found = []
    for name in filter(None, map(str.strip, names.split(","))):
        module_name, _, function_name = name.rpartition(".")
        try:
            function = getattr(importlib.import_module(module_name), function_name)
        except (ImportError, AttributeError, ValueError) as error:
            raise HooksNotFoundError(name, error) from error
        found.append(function)
    return found


def _expected_writers(worker_config: WorkerSettings) -> list[tuple[str, str]]:
    """Return the (stream, writer) pairs whose positions are expected."""
    streams = importlib.import_module("synapse.replication.tcp.streams").STREAMS_MAP
    return [
        (name, writer)
        for name in streams
        if name not in _NOT_EXPECTED
        for writer in declared_writers(worker_config, name)
    ]


def _links_are_ours() -> bool:
    factory = host_attribute("redis", "RedisDirectTcpReplicationClientFactory")
    return getattr(factory, "__module__", "").startswith("synapse_replication.")


def _export_spans(
    tracing: TracingOptions, server_name: str, instance_name: str
) -> SpanExport:
    # Importing OpenTelemetry takes time and memory, and most hosts export no spans.
    from synapse_replication.app.tracing_export import SpanExport

    return SpanExport(tracing, server_name, instance_name)


def observers_of(hs: Homeserver) -> HostObservers:
    """Return the observers of a homeserver, which all its parts share."""
    observers = _observers.get(hs)
    if observers is None:
        # The host has set up its log by now.
        announce()
        observers = _observers[hs] = HostObservers(hs, host_metrics())
    return observers


def observer_of(hs: Homeserver) -> ReplicationObserver:
    """Return the observer of a homeserver, which all its parts share."""
    return observers_of(hs).observer


def hooks_of(hs: Homeserver) -> ReplicationHooks:
    """Return the hooks of a homeserver, for code that runs inside it.

    :param hs: the homeserver, or the ``ModuleApi`` that the host passes to its modules.
    """
    return observers_of(getattr(hs, "_hs", hs)).hooks


@functools.cache
def host_metrics() -> ReplicationMetrics:
    """Return the metrics of this process, in the host's registry."""
    found: dict[str, MetricWrapperBase] = {}
    for module in _MODULES:
        found |= adopt_metrics(vars(importlib.import_module(module)), REGISTRY)
    return ReplicationMetrics(REGISTRY, found)


def adopt_metrics(
    namespace: Mapping[str, object], registry: CollectorRegistry
) -> dict[str, MetricWrapperBase]:
    """Return those metrics of a module whose names this package uses, by name.

    A gauge that calls a function is removed from the registry instead, because the code
    that it calls is not running.
    """
    names = {definition.name for definition in METRICS}
    found = {}
    for value in namespace.values():
        if isinstance(value, MetricWrapperBase):
            name = next(iter(value.describe())).name
            if name in names:
                found[name] = value
        elif Collector in type(value).__mro__ and getattr(value, "name", None) in names:
            registry.unregister(cast(Collector, value))
    return found


def prepare_announcement(
    parts: Sequence[str], version: str | None, problem: str | None
) -> None:
    """Prepare the log lines that name the replaced parts.

    The host sets up its log after the parts have been replaced. The lines are therefore
    logged when the observers of a homeserver are created.

    :param parts: the replaced parts.
    :param version: the version of the host.
    :param problem: why that version may not work; ``None`` if it was tested.
    """
    _announcement[:] = [
        (
            logging.INFO,
            f"This process replicates with synapse_replication {__version__} instead "
            f"of Synapse's own code; replaced parts: {', '.join(parts)}; "
            f"Synapse {version}",
        )
    ]
    if problem is not None:
        _announcement.append(
            (
                logging.WARNING,
                f"{problem}. Replication may still work; if it does not, start this "
                "process without synapse_replication, or install a tested version",
            )
        )


def announce() -> None:
    """Log the prepared lines, unless they have been logged."""
    lines, _announcement[:] = _announcement[:], []
    for level, text in lines:
        logging.getLogger(_LOG_NAME).log(level, "%s", text)
