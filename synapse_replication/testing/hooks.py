"""Hooks that receive no events, for tests and benchmarks that do not use hooks."""

from __future__ import annotations

from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.instrumentation.hooks import ReplicationHooks
from synapse_replication.instrumentation.status.observer import StatusObserver

__all__ = ["silent_hooks"]


def silent_hooks(
    clock: Clock, observer: ReplicationObserver | None = None
) -> ReplicationHooks:
    """Return hooks that never receive an event.

    :param observer: receives the failures of callbacks.
    """
    status = StatusObserver("x.test", "nobody", monotonic=clock.seconds)
    return ReplicationHooks(
        clock, status.snapshot, (observer or ReplicationObserver()).failure
    )
