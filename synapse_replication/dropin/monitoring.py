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
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred

from synapse_replication.app.systemd import (
    NotifySocket,
    SystemdNotifier,
    open_notify_socket,
    watchdog_interval,
)
from synapse_replication.dropin.adapter import HostClock, SynapseHost
from synapse_replication.dropin.bridges import host_attribute
from synapse_replication.dropin.logs import StandardLogger
from synapse_replication.dropin.settings import DropInSettings
from synapse_replication.dropin.streams import declared_writers
from synapse_replication.errors import HooksNotFoundError, SupervisorError
from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.handlers.interfaces import DelayedCall
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.instrumentation.composite import CompositeObserver
from synapse_replication.instrumentation.hooks import ReplicationHooks
from synapse_replication.instrumentation.logs import LoggingObserver
from synapse_replication.instrumentation.prometheus import (
    PrometheusObserver,
    ReplicationMetrics,
)
from synapse_replication.instrumentation.status.model import encode_status
from synapse_replication.instrumentation.status.observer import StatusObserver
from synapse_replication.instrumentation.status.stalls import StallLog
from synapse_replication.instrumentation.turns import ReactorTurns
from synapse_replication.storage.stuck_ids import StuckIdWatch

if TYPE_CHECKING:
    from synapse_replication.app.tracing_export import SpanExport

#: The interval at which the lag is sampled and stalls are checked, in s.
SAMPLE_EVERY = 5.0

#: Streams that are announced only if other instances send to remote servers.
_NOT_EXPECTED = frozenset({"federation"})


class Monitoring:
    """Monitors the replication of one homeserver object.

    :ivar status: tracks the replication status.
    :ivar hooks: delivers events to subscribed callbacks.
    :ivar metrics: updates the metrics.
    :ivar observer: receives the events of all parts of this package in the host.
    """

    def __init__(self, hs: Any, metrics: ReplicationMetrics) -> None:
        server_name, instance_name = hs.hostname, hs.get_instance_name()
        self._reactor = hs.get_reactor()
        self._clock = HostClock(hs.get_clock(), self._reactor)
        logger: Any = StandardLogger(logging.getLogger("synapse_replication"))
        self.status = StatusObserver(
            server_name,
            instance_name,
            _expected_writers(hs.config.worker),
            needs_link=bool(hs.config.redis.redis_enabled) and _links_are_ours(),
        )
        self.hooks = ReplicationHooks(
            self._clock,
            self.status.snapshot,
            lambda what, error: self.observer.failure(what, error),
        )
        self._turns = ReactorTurns()
        self.metrics = PrometheusObserver(
            metrics, server_name, status=self.status, turns=self._turns
        )
        observers = [self.status, self.hooks, LoggingObserver(logger), self.metrics]
        self._spans: SpanExport | None = None
        if endpoint := DropInSettings.from_environ(os.environ).tracing_endpoint:
            self._spans, observer = _trace(endpoint, server_name, instance_name)
            observers.append(observer)
        self.observer: ReplicationObserver = CompositeObserver(observers)
        self._logger = logger
        self._stalls = StallLog(logger)
        self._notify: NotifySocket | None = None
        self._systemd: SystemdNotifier | None = None
        self._sampling: DelayedCall | None = None
        self._stuck_ids: StuckIdWatch

    def start(self, handler: ReplicationCommandHandler, host: SynapseHost) -> None:
        """Call the functions that subscribe to hooks, and start the periodic checks.

        Call this method when replication has started.

        :param handler: the command handler of the homeserver.
        :param host: passed to the functions that subscribe to hooks.
        :raises HooksNotFoundError: if one of these functions cannot be imported.
        """
        for subscribe in load_hooks(DropInSettings.from_environ(os.environ).hooks):
            subscribe(host, {})
        written = host.streams.get_streams_to_replicate()
        self.status.watch_own_positions(
            lambda: {
                stream.description.name: handler.sender.last_sent_token(stream)
                for stream in written
            }
        )
        self.status.watch_readers(handler.readers)
        self._stuck_ids = StuckIdWatch(host.streams.get_generators, self._clock)
        self.status.watch_stuck_ids(self._stuck_ids.stuck)
        self.hooks.start()
        self._turns.start(self._reactor)
        self._sample()
        self._start_systemd()

    def encode_status(self) -> bytes:
        """Return the current replication status as JSON."""
        return encode_status(self.status.snapshot())

    def stop(self) -> Deferred[None] | None:
        """Report that the process stops, and end the periodic checks.

        :return: a Deferred that fires when the last spans have been sent or discarded;
            ``None`` if spans are not exported.
        """
        self.hooks.stopping()
        self.hooks.stop()
        if self._sampling is not None and self._sampling.active():
            self._sampling.cancel()
        self._turns.stop()
        if self._systemd is not None and self._notify is not None:
            self._systemd.stopping()
            self._notify.close()
        return None if self._spans is None else self._spans.stop(self._reactor)

    def _sample(self) -> None:
        # Reschedule first, so that an exception cannot stop the timer.
        self._sampling = self._clock.call_later(SAMPLE_EVERY, self._sample)
        self.status.sample()
        self._stuck_ids.check()
        self._stalls.check(self.status)
        self._stalls.report_turns(self._turns.take_stall())

    def _start_systemd(self) -> None:
        try:
            self._notify = open_notify_socket(os.environ)
            feed_every = watchdog_interval(os.environ, os.getpid())
        except SupervisorError as error:
            # The host starts nevertheless, as it would without this package.
            self._logger.error("Cannot notify systemd: {error}", error=error)
            return
        if self._notify is None:
            return
        self._systemd = SystemdNotifier(
            self._notify.send,
            self._clock,
            self.status.snapshot,
            feed_every,
            reports_lifecycle=False,
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


def _trace(
    endpoint: str, server_name: str, instance_name: str
) -> tuple[SpanExport, ReplicationObserver]:
    """Return the export of spans to a collector, and the observer that creates them."""
    # Import OpenTelemetry here: most hosts export no spans, and loading its modules
    # takes time and memory.
    from synapse_replication.app.tracing_export import SpanExport
    from synapse_replication.config.own_section import TracingSection
    from synapse_replication.instrumentation.tracing import TracingObserver

    spans = SpanExport(TracingSection(endpoint=endpoint), server_name, instance_name)
    return spans, TracingObserver(spans.tracer, server_name)
