"""Hooks that receive no events, for tests and benchmarks that do not use hooks."""

from __future__ import annotations

from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.instrumentation.hooks import ReplicationHooks
from synapse_replication.instrumentation.status.status_observer import StatusObserver


def silent_hooks(
    clock: Clock, observer: ReplicationObserver | None = None
) -> ReplicationHooks:
    """Return hooks that receive no events from replication.

    Events that the caller triggers itself, for instance with ``stopping()``, are still
    delivered.

    :param observer: receives the failures of callbacks for such events.
    """
    status = StatusObserver("x.test", "nobody", monotonic=clock.seconds)
    return ReplicationHooks(
        clock, status.snapshot, (observer or ReplicationObserver()).failure
    )
