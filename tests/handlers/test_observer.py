"""Tests of the observer that does nothing."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.observer import CatchUpEvent, ReplicationObserver


class ReplicationObserverTests(SynchronousTestCase):
    """The base of all observers."""

    def test_contexts(self) -> None:
        """The methods that span a duration return context managers."""
        observer = ReplicationObserver()
        with (
            observer.background_process("work"),
            observer.catch_up(CatchUpEvent("s", "w", 1, 2)),
            observer.requesting_rows("s", "w", {}),
            observer.serving_rows("s", {}),
            observer.position_write("s", "w", 2),
        ):
            pass
