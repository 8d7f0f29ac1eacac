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
import weakref
from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from synapse_replication.dropin import announcement
from synapse_replication.dropin.monitoring import Monitoring
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.instrumentation.hooks import ReplicationHooks
from synapse_replication.instrumentation.metrics import METRICS
from synapse_replication.instrumentation.prometheus import ReplicationMetrics
from synapse_replication.streams.backlog import Backlog

__all__ = [
    "adopt_metrics",
    "hooks_of",
    "host_metrics",
    "monitoring_of",
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
_monitoring: weakref.WeakKeyDictionary[Any, Monitoring] = weakref.WeakKeyDictionary()


def monitoring_of(hs: Any) -> Monitoring:
    """Return what watches a homeserver: one for all its parts."""
    monitoring = _monitoring.get(hs)
    if monitoring is None:
        monitoring = _monitoring[hs] = Monitoring(hs, host_metrics())
    return monitoring


def observer_of(hs: Any) -> ReplicationObserver:
    """Return the observer of a homeserver: one for all its parts."""
    observer = _observers.get(hs)
    if observer is None:
        # The host's log is set up by now.
        announcement.write()
        observer = _observers[hs] = monitoring_of(hs).observer
    return observer


def hooks_of(hs: Any) -> ReplicationHooks:
    """Return the hooks of a homeserver, for code that runs inside it.

    :param hs: the homeserver, or what the host gives to its modules.
    """
    return monitoring_of(getattr(hs, "_hs", hs)).hooks


def watch_backlog(hs: Any, backlog: Backlog) -> None:
    """Have the use of a homeserver's backlog read at each scrape."""
    monitoring_of(hs).metrics.watch_backlog(backlog)


@functools.cache
def host_metrics() -> ReplicationMetrics:
    """Return the metrics of this process, in the host's registry."""
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
