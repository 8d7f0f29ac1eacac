"""Tests for the observer that records events."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import UnknownCommandError
from synapse_replication.handlers.events import (
    BackgroundTask,
    Discarded,
    DiscardReason,
    LineRefused,
)
from tests.support.recording_observer import RecordingObserver


class RecordingObserverTests(SynchronousTestCase):
    """Tests for RecordingObserver."""

    def test_remembers(self) -> None:
        """Events are recorded, with the sum of their counts."""
        observer = RecordingObserver()
        for _ in range(2):
            observer.observe(Discarded("s", "w", DiscardReason.OLD_TOKEN, 2))
        observer.observe(LineRefused("c", UnknownCommandError("X")))
        with observer.span(BackgroundTask("work")):
            self.assertEqual(observer.open_processes, 1)
        self.assertEqual(observer.open_processes, 0)
        self.assertEqual(observer.discards["s", "w", DiscardReason.OLD_TOKEN], 4)
        self.assertEqual(len(observer.refused), 1)
        self.assertEqual(observer.processes, ["work"])
