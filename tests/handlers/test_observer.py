"""Tests of the observer that does nothing."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.events import (
    BackgroundTask,
    CatchUpEvent,
    PositionWrite,
    RowsRequest,
    RowsServed,
)
from synapse_replication.handlers.observer import ReplicationObserver


class ReplicationObserverTests(SynchronousTestCase):
    """The base of all observers."""

    def test_contexts(self) -> None:
        """The methods that span a duration return context managers."""
        observer = ReplicationObserver()
        with (
            observer.span(BackgroundTask("work")),
            observer.span(CatchUpEvent("s", "w", 1, 2)),
            observer.span(RowsRequest("s", "w", {})),
            observer.span(RowsServed("s", {})),
            observer.span(PositionWrite("s", "w", 2)),
        ):
            pass
