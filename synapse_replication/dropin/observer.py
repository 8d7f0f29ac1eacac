"""The observer of a host, which writes to the host's logs and metrics.

Theory of operation: metrics that the host already defines are updated in place, because
its dashboards use their names. The exception is a gauge whose value is computed by a
function of the replaced code: it is removed from the registry, and this package
registers its own metric under that name. A process may contain several homeserver
objects (the host's tests create them); each has an observer of its own, which lives as
long as the homeserver.
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

#: Modules of the host that define metrics whose names this package also uses.
_MODULES = (
    "synapse.replication.tcp.protocol",
    "synapse.replication.tcp.handler",
    "synapse.replication.tcp.resource",
    "synapse.replication.tcp.external_cache",
    "synapse.storage.util.id_generators",
)

_monitoring: weakref.WeakKeyDictionary[Any, Monitoring] = weakref.WeakKeyDictionary()


def monitoring_of(hs: Any) -> Monitoring:
    """Return the monitoring of a homeserver, which all its parts share."""
    monitoring = _monitoring.get(hs)
    if monitoring is None:
        # The host has set up its log by now.
        announcement.write()
        monitoring = _monitoring[hs] = Monitoring(hs, host_metrics())
    return monitoring


def observer_of(hs: Any) -> ReplicationObserver:
    """Return the observer of a homeserver, which all its parts share."""
    return monitoring_of(hs).observer


def hooks_of(hs: Any) -> ReplicationHooks:
    """Return the hooks of a homeserver, for code that runs inside it.

    :param hs: the homeserver, or the ``ModuleApi`` that the host passes to its modules.
    """
    return monitoring_of(getattr(hs, "_hs", hs)).hooks


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
            registry.unregister(value)
    return found
