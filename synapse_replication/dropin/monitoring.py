"""The monitoring of replication inside a host: status, hooks, systemd and spans.

Theory of operation: each homeserver object has one :class:`Monitoring`, created by the
first call of :func:`~synapse_replication.dropin.observer.monitoring_of`. It owns the
observers. Once this package's command handler has started replication over Redis, the
monitoring checks the status every few seconds, as a stand-alone process does: it logs
stalled writers, calls hooks, and notifies systemd and its watchdog. The host itself
reports readiness, reloads and stops to systemd.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.logger import Logger, STDLibLogObserver

from synapse_replication.app.observers import ProcessObservers
from synapse_replication.dropin.host_code import host_attribute
from synapse_replication.dropin.host_streams import declared_writers
from synapse_replication.dropin.settings import own_settings
from synapse_replication.dropin.synapse_host import HostClock, SynapseHost
from synapse_replication.errors import HooksNotFoundError, SupervisorError
from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.instrumentation.prometheus import ReplicationMetrics
from synapse_replication.instrumentation.status.model import encode_status
from synapse_replication.instrumentation.status.observer import StatusObserver

if TYPE_CHECKING:
    from synapse_replication.app.systemd import SystemdNotifier
    from synapse_replication.app.tracing_export import SpanExport

#: Streams that are announced only if other instances send to remote servers.
_NOT_EXPECTED = frozenset({"federation"})


class Monitoring(ProcessObservers):
    """Monitors the replication of one homeserver object."""

    def __init__(self, hs: Any, metrics: ReplicationMetrics) -> None:
        server_name, instance_name = hs.hostname, hs.get_instance_name()
        self._reactor = hs.get_reactor()
        # A failure in Twisted's log would be a failure of the test in a test runner.
        name = "synapse_replication"
        self._logger = Logger(name, observer=STDLibLogObserver(name))
        endpoint = own_settings().tracing_endpoint
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
            _export_spans(endpoint, server_name, instance_name) if endpoint else None,
        )
        self._systemd: SystemdNotifier | None = None

    def begin(self, handler: ReplicationCommandHandler, host: SynapseHost) -> None:
        """Call the functions that subscribe to hooks, and start the periodic checks.

        Call this method when replication has started.

        :param handler: the command handler of the homeserver.
        :param host: passed to the functions that subscribe to hooks.
        :raises HooksNotFoundError: if one of these functions cannot be imported.
        """
        for subscribe in load_hooks(own_settings().hooks):
            subscribe(host, {})
        streams = host.streams
        self.start(
            self._reactor,
            handler,
            streams.get_streams_to_replicate(),
            streams.get_generators,
        )
        self._start_systemd()

    def encode_status(self) -> bytes:
        """Return the current replication status as JSON."""
        return encode_status(self.status.snapshot())

    def end(self) -> Deferred[None] | None:
        """Report that the process stops, and end the periodic checks.

        :return: a Deferred that fires when the last spans have been sent or discarded;
            ``None`` if spans are not exported.
        """
        self.hooks.stopping()
        self.stop()
        if self._systemd is not None:
            self._systemd.stopping()
        return None if self._spans is None else self._spans.stop(self._reactor)

    def _start_systemd(self) -> None:
        if "NOTIFY_SOCKET" not in os.environ:
            return
        from synapse_replication.app.systemd import SystemdNotifier, open_notify_socket

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


def _expected_writers(worker_config: Any) -> list[tuple[str, str]]:
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


def _export_spans(endpoint: str, server_name: str, instance_name: str) -> SpanExport:
    # Importing OpenTelemetry takes time and memory, and most hosts export no spans.
    from synapse_replication.app.tracing_export import SpanExport
    from synapse_replication.config.own_section import TracingSection

    return SpanExport(TracingSection(endpoint=endpoint), server_name, instance_name)
