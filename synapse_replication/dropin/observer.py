"""What our code tells of itself, in the logs and metrics of the host.

Theory of operation: a metric that the host has already, under the name that its
dashboards know, is counted in as it is. Some of the host's are functions that its
own code answers when they are read; where our code runs instead, those are taken
out of the registry and ours take their names. The host's process may hold several
homeservers (its tests do), each with an observer of its own, kept as long as it.
"""

from __future__ import annotations

import functools
import importlib
import logging
import weakref
from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from twisted.logger import formatEvent

from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.instrumentation.composite import CompositeObserver
from synapse_replication.instrumentation.logs import LoggingObserver
from synapse_replication.instrumentation.metrics import METRICS
from synapse_replication.instrumentation.prometheus import (
    PrometheusObserver,
    ReplicationMetrics,
)
from synapse_replication.instrumentation.status.observer import StatusObserver
from synapse_replication.streams.backlog import Backlog

__all__ = [
    "StandardLogger",
    "adopt_metrics",
    "host_metrics",
    "observer_of",
    "watch_backlog",
]

#: Modules of the host that define metrics with the names of ours.
_MODULES = (
    "synapse.replication.tcp.protocol",
    "synapse.replication.tcp.handler",
    "synapse.replication.tcp.resource",
    "synapse.replication.tcp.external_cache",
    "synapse.storage.util.id_generators",
)

_observers: weakref.WeakKeyDictionary[Any, ReplicationObserver] = (
    weakref.WeakKeyDictionary()
)
_metrics: weakref.WeakKeyDictionary[Any, PrometheusObserver] = (
    weakref.WeakKeyDictionary()
)


class StandardLogger:
    """Writes to Python's ``logging``, where the host's own log lines go.

    It takes what :class:`twisted.logger.Logger` takes. Failures go there directly,
    with their tracebacks, and not through Twisted: a test runner takes what
    Twisted logs as a failure for one of the test.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def _write(self, level: int, format: str, fields: Mapping[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            text = formatEvent({"log_format": format, **fields})
            failure = fields.get("log_failure")
            error = None if failure is None else failure.value
            self._logger.log(level, "%s", text, exc_info=error)

    def debug(self, format: str, **fields: Any) -> None:
        """Write for who looks for a fault."""
        self._write(logging.DEBUG, format, fields)

    def info(self, format: str, **fields: Any) -> None:
        """Write what is good to know."""
        self._write(logging.INFO, format, fields)

    def warn(self, format: str, **fields: Any) -> None:
        """Write what an operator should look at."""
        self._write(logging.WARNING, format, fields)

    def error(self, format: str, **fields: Any) -> None:
        """Write what went wrong."""
        self._write(logging.ERROR, format, fields)

    def critical(self, format: str, **fields: Any) -> None:
        """Write what should never happen."""
        self._write(logging.CRITICAL, format, fields)


def observer_of(hs: Any) -> ReplicationObserver:
    """Give the observer of a homeserver: one for all its parts."""
    observer = _observers.get(hs)
    if observer is None:
        logger: Any = StandardLogger(logging.getLogger("synapse_replication"))
        name = hs.get_instance_name()
        status = StatusObserver(hs.hostname, name)
        metrics = PrometheusObserver(host_metrics(), hs.hostname, status=status)
        observer = CompositeObserver([status, LoggingObserver(logger), metrics])
        _observers[hs] = observer
        _metrics[hs] = metrics
    return observer


def watch_backlog(hs: Any, backlog: Backlog) -> None:
    """Have the use of a homeserver's backlog read at each scrape."""
    observer_of(hs)
    if (metrics := _metrics.get(hs)) is not None:
        metrics.watch_backlog(backlog)


@functools.cache
def host_metrics() -> ReplicationMetrics:
    """Give the metrics of this process, in the host's registry."""
    found: dict[str, Any] = {}
    for module in _MODULES:
        found |= adopt_metrics(vars(importlib.import_module(module)), REGISTRY)
    return ReplicationMetrics(REGISTRY, found)


def adopt_metrics(
    namespace: Mapping[str, Any], registry: CollectorRegistry
) -> dict[str, Any]:
    """Find a module's metrics that have names of ours.

    Those that something is counted in are given, by name. Those that are functions
    are taken out of the registry: what they would ask is not there any more.
    """
    names = {definition.name for definition in METRICS}
    found = {}
    for value in namespace.values():
        if isinstance(value, MetricWrapperBase):
            name = next(iter(value.describe())).name
            if name in names:
                found[name] = value
        elif Collector in type(value).__mro__ and getattr(value, "name", None) in names:
            registry.unregister(value)
    return found
